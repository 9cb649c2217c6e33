"""``python -m tests.certify.held``: a stage of the toy, in a pod, which stands still where the plan has a fault.

What makes the fault sees the line that says so in the pod's log, and tells the program to go on, or to use up its
memory, by a file. SIGTERM ends the wait, too: what follows is what the stage does with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.unit import toy
from tuneloop.core.artifacts import Draft, Manifest

HOLDS, ORDERS = "CERTIFY_HOLDS", "CERTIFY_ORDERS"
"""Variables: output of a stage below the run → moment at which its program stands still, as JSON; and the file by which
it is told what to do then (default: `FILE`)."""
FILE = "/tmp/certify-orders"
GO, HOG = "go on", "use up memory"
HELD = "certify: stands still at "
WORK, COMMIT, END = "before its work", "before its commit", "after its commit"
MOMENTS = (WORK, COMMIT, END)
LIMIT_S = 900.0
"""Seconds after which a program ends because nobody has told it anything."""


def main(argv: list[str]) -> None:
    """Run the stage that `argv` names, and stand still at its moment."""
    moment = find_moment(argv)
    if moment == WORK:
        stand_still(WORK)
    real = Draft.commit

    def commit(draft: Draft, **about: Any) -> Manifest:
        if moment == COMMIT:
            stand_still(COMMIT)
        made = real(draft, **about)
        if moment == END:
            stand_still(END)
        return made

    Draft.commit = commit  # type: ignore[method-assign]
    toy.main(argv)


def find_moment(argv: list[str]) -> str:
    """Return where the stage stands still whose output `argv` names, the only URL without a digest; empty: nowhere."""
    (output,) = [word for word in argv if "://" in word and "@" not in word]
    holds: dict[str, str] = json.loads(os.environ.get(HOLDS, "{}"))
    return next((moment for key, moment in holds.items() if output.endswith(f"/{key}")), "")


def stand_still(moment: str) -> None:
    """Say so, and wait for what is to be done."""
    ended = threading.Event()
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        ended.set()
        if callable(before):
            before(number, frame)
        else:
            sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    orders, deadline = Path(os.environ.get(ORDERS, FILE)), time.monotonic() + LIMIT_S
    print(f"{HELD}{moment}, process {os.getpid()}", flush=True)
    while not ended.wait(0.05) and not orders.exists():
        if time.monotonic() > deadline:
            sys.exit(f"certify: nobody has said what follows, {LIMIT_S:.0f} s long")
    signal.signal(signal.SIGTERM, before)
    if not ended.is_set() and orders.read_text() == HOG:
        _use_up_memory()


def _use_up_memory() -> None:
    hog = []
    while True:
        hog.append(b"x" * (16 << 20))


if __name__ == "__main__":
    main(sys.argv[1:])
