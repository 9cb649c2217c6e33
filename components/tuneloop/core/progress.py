"""Progress of long steps: rates and time left, as a bar on a terminal, as a line every few seconds elsewhere."""

import os
import sys
import time

EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Shows `done` of `total`; `begun` were done earlier and do not count in the rate. A terminal line is redrawn; else
    a line is printed every `EVERY_S` seconds at most, and at the end. ``$ARGO_PROGRESS_FILE`` gets ``done/total``."""

    def __init__(
        self, name: str, total: int, unit: str, begun: int = 0, *, quiet: bool = False
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self.begun = begun
        self.start = self.printed = time.monotonic()
        self.file = os.environ.get("ARGO_PROGRESS_FILE")
        self.tty = sys.stderr.isatty()

    def update(self, done: int, **facts: float) -> None:
        """Show that `done` units are finished, followed by `facts` (loss, reward)."""
        if self.quiet:
            return
        now = time.monotonic()
        if self.file:
            with open(self.file, "w") as out:
                out.write(f"{done}/{self.total}")
        finished = done >= self.total
        if not finished and now - self.printed < (0.1 if self.tty else EVERY_S):
            return
        self.printed = now
        rate = (done - self.begun) / max(now - self.start, 1e-9)
        left = (self.total - done) / rate if rate > 0 else 0.0
        shown = "  ".join(f"{k} {v:.4g}" for k, v in facts.items())
        line = f"{self.name}: {done}/{self.total} {self.unit}  {rate:.1f} {self.unit}/s  {left:.0f} s left  {shown}"
        if self.tty:
            print(
                "\r\033[K" + line.rstrip(),
                end="\n" if finished else "",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(line.rstrip(), file=sys.stderr, flush=True)
