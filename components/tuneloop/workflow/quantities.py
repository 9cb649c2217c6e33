"""Quantities of Kubernetes, as in ``500m`` or ``2Gi``.

All that compares or adds them uses `parse_resource_quantity`: settings, estimates, quotas and
claims. Which forms a setting may have is decided in `workflow/settings.py` (`CPU`, `MEMORY`).
"""

import re
from decimal import Decimal

from tuneloop.core.errors import UserError

UNITS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
}
"""Suffix of a Kubernetes quantity → its factor."""
UNITS |= {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)}
UNITS |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}


def parse_resource_quantity(quantity: object) -> Decimal:
    """Parse a Kubernetes quantity (``500m``, ``2Gi``, ``8``) into a number.

    The parser of the package kubernetes does the same, and is slow to import.

    Raises:
        UserError: it is no quantity.
    """
    match = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(\w*)", str(quantity))
    if not match or match[2] not in UNITS:
        raise UserError("quantity", quantity, "is not a Kubernetes quantity, as in 500m or 2Gi")
    return Decimal(match[1]) * UNITS[match[2]]
