"""What a report holds: the live page, frozen with all that it asks for."""

from __future__ import annotations

import json
import re
from typing import Any


def read_answers(page: str) -> dict[str, Any]:
    """Read of a frozen page what it would be answered, by path."""
    (data,) = re.findall(
        r'<script type="application/json" id="frozen">(.*?)</script>', page, re.DOTALL
    )
    return dict(json.loads(data)["answers"])
