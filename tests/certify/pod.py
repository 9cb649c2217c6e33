"""A pod of the toy pipeline, with something between it and its files: the program that the executor's rig starts.

``CERTIFY_POD`` says what, as JSON: ``record``, a directory to note the calls in; or ``key`` and ``at``, the output of
the stage and the number of the call at which to ``act`` (``kill`` or ``terminate``), once, as the file ``once`` shows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.certify import interpose
from tests.certify.attempts import count_stages
from tests.unit import toy

VARIABLE = "CERTIFY_POD"


def main(argv: list[str]) -> None:
    count_stages()
    told = json.loads(os.environ.get(VARIABLE) or "{}")
    root = told.get("root", "")
    key = next(
        word.removeprefix(f"file://{root}/")
        for word in argv
        if word.startswith("file://") and "@" not in word
    )
    between = interpose.Interposer(root)
    if told.get("key") == key and not Path(told["once"]).exists():
        Path(told["once"]).touch()
        between.at, between.before = told["at"], getattr(interpose, told["act"])
    if told:
        between.install()
    try:
        toy.main(argv)
    finally:
        if told.get("record"):
            between.paused = True
            Path(told["record"], key.replace("/", "_")).write_text(json.dumps([key, between.calls]))


if __name__ == "__main__":
    main(sys.argv[1:])
