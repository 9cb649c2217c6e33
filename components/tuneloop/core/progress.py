"""Progress of long steps: rates and time left, as a bar on a terminal, as a line every few seconds
elsewhere.

Lines have one form: name, colon, ``done/total``, unit, and facts as two blanks, name and value.
`cli/live.py` recognizes them by its patterns `PROGRESS` and `FACT`; another form, or a name with a
blank or a hyphen, is not shown by `tuneloop run`.
"""

import os
import sys
import time

EVERY_S = 5.0
"""Seconds between two lines where there is no terminal."""
REDRAW_S = 0.1
"""Seconds between two pictures of the line of a terminal."""


class Progress:
    """A display of the units that a step has finished, with their rate and the time left.

    The line of a terminal is redrawn. Elsewhere a line is printed every `EVERY_S` seconds at most,
    and at the end. Argo reads ``done/total`` from the file that ``$ARGO_PROGRESS_FILE`` names.
    """

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        earlier: int = 0,
        *,
        quiet: bool = False,
    ) -> None:
        """Begin the display of `total` units.

        Args:
            earlier: how many of them were finished before, and do not count in the rate.
            quiet: display nothing.
        """
        self.name = name
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self.earlier = earlier
        self.start = time.monotonic()
        self.printed = self.start
        self.file = os.environ.get("ARGO_PROGRESS_FILE")
        self.tty = sys.stderr.isatty()

    def update(self, done: int, **facts: float) -> None:
        """Show that `done` units are finished, followed by `facts` (loss, reward)."""
        if self.quiet:
            return
        now_s = time.monotonic()
        # Argo's executor polls the file, so it is written however often this is called.
        if self.file:
            with open(self.file, "w") as file:
                file.write(f"{done}/{self.total}")
        finished = done >= self.total
        pause_s = REDRAW_S if self.tty else EVERY_S
        if not finished and now_s - self.printed < pause_s:
            return
        self.printed = now_s
        line = self._describe(done, now_s - self.start, facts)
        if self.tty:
            # Return to the line's beginning, and erase it (ECMA-48).
            end = "\n" if finished else ""
            print(f"\r\033[K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _describe(self, done: int, seconds: float, facts: dict[str, float]) -> str:
        parts = [f"{self.name}: {done}/{self.total} {self.unit}"]
        # Before the first unit is finished nobody knows how long one takes.
        if done > self.earlier:
            rate = (done - self.earlier) / max(seconds, 1e-9)
            # A step of a large model takes minutes on a CPU: its rate would be 0.0.
            slow = rate < 1
            parts.append(f"{1 / rate:.3g} s each" if slow else f"{rate:.1f} {self.unit}/s")
            if done < self.total:
                parts.append(f"{(self.total - done) / rate:.0f} s left")
        parts += [f"{name} {value:.4g}" for name, value in facts.items()]
        return "  ".join(parts)
