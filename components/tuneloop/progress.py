"""Progress of long steps: rates and time left, as a bar on a terminal, as a line every few seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time


class Progress:
    """Shows `done` of `total`.

    On a terminal one line is redrawn; otherwise a line is printed at most every `every` seconds and at the end.
    Also writes ``done/total`` to ``$ARGO_PROGRESS_FILE``, where Argo's executor looks for it.
    """

    def __init__(self, name: str, total: int, unit: str, *, quiet: bool = False, every: float = 5.0) -> None:
        self.name, self.total, self.unit, self.quiet, self.every = name, total, unit, quiet, every
        self.start = time.monotonic()
        self.first: int | None = None
        self.printed = self.start
        self.file = os.environ.get("ARGO_PROGRESS_FILE")
        self.tty = sys.stderr.isatty()

    def update(self, done: int, **facts: float) -> None:
        """`done` units are finished; `facts` are shown behind (loss, reward)."""
        if self.quiet:
            return
        now = time.monotonic()
        if self.first is None:  # a resumed stage starts in the middle: its rate counts from there
            self.first, self.start = min(done, self.total) - 1 if done else 0, self.start
        if self.file:
            with open(self.file, "w") as out:
                out.write(f"{done}/{self.total}")
        finished = done >= self.total
        if not finished and now - self.printed < (0.1 if self.tty else self.every):
            return
        self.printed = now
        rate = (done - self.first) / max(now - self.start, 1e-9)
        left = (self.total - done) / rate if rate > 0 else 0.0
        shown = "  ".join(f"{k} {v:.4g}" for k, v in facts.items())
        line = f"{self.name}: {done}/{self.total} {self.unit}  {rate:.1f} {self.unit}/s  {left:.0f} s left  {shown}"
        if self.tty:
            print("\r\033[K" + line.rstrip(), end="\n" if finished else "", file=sys.stderr, flush=True)
        else:
            print(line.rstrip(), file=sys.stderr, flush=True)
