"""Rows that are left out, and how many may be: ``data.bad_rows``, ``data.wrong_answers``.

`data/splitting.py: Router` adds bad rows, `data/preparation.py: Tally` wrong answers. The stage
`data_prep` makes both budgets and checks both at its end; `Router` checks the bad rows while it
reads, too. `data/preparation.py: report_rows` takes exactly these two, and a third has to be handed
to it. Rows with too many tokens are counted elsewhere, against the same share
(`formats/too_long.py`).
"""

import bisect
from dataclasses import dataclass, field
from typing import Literal

from tuneloop.core.errors import UserError, shorten_text
from tuneloop.formats.rows import split_numbers

Policy = Literal["drop", "refuse"]
"""What becomes of rows that are wrong. ``drop``: they are left out, up to a share of the rows.
``refuse``: a single one refuses the data. It is the type of two options of
`stages/data_prep.py`."""
SHOWN = 10
"""Rows that are kept with their reasons for the manifest, and that an error lists. So many bad rows
also start the early check (`Budget.check_early`)."""
SHOWN_IN_LOG = 3
"""Rows that the line in the log lists."""


@dataclass(frozen=True, order=True)
class Omission:
    """A row that is left out, and why. `key`, its name by `split_numbers`, decides the order."""

    key: tuple[tuple[int, str], ...]
    row: str
    reason: str


@dataclass
class Budget:
    """Rows that are left out for one kind of reason: `count` of them, and the first ones with their
    reasons, in the order of files and rows.

    Attributes:
        setting: what decides about them, such as ``data.bad_rows``; without ``data.`` it is the key
            of ``facts.dropped``.
        problem: what is wrong with them, as the end of a sentence: ``cannot be used``.
        noun: what is counted: ``rows``.
        share: the largest share that may be left out, from 0 to 1 (``data.drop_at_most``).
        advice: what the error names first, before the remedy to correct the rows; may be empty.
    """

    setting: str
    problem: str
    noun: str
    policy: Policy
    share: float
    count: int = 0
    advice: str = ""
    _first: list[Omission] = field(default_factory=list)

    @property
    def examples(self) -> list[str]:
        """The first rows, each with its reason."""
        return [f"{omission.row}: {omission.reason}" for omission in self._first]

    def add(self, row: str, reason: str) -> None:
        """Count one row."""
        self.count += 1
        # Rows come in any order; those that stand first in their files are kept.
        omission = Omission(key=split_numbers(row), row=row, reason=shorten_text(reason, 120))
        bisect.insort(self._first, omission)
        del self._first[SHOWN:]

    def list_by_reason(self, limit: int = SHOWN) -> str:
        """List the first `limit` rows by reason: ``ROW, ROW: REASON; ROW: REASON``."""
        rows_by_reason: dict[str, list[str]] = {}
        for omission in self._first[:limit]:
            rows_by_reason.setdefault(omission.reason, []).append(omission.row)
        return "; ".join(f"{', '.join(rows)}: {reason}" for reason, rows in rows_by_reason.items())

    def check(self, total: int) -> None:
        """Check that no more than the share of `total` is left out. Raises UserError that lists the
        first ones."""
        allowed = 0 if self.policy == "refuse" else int(self.share * total)
        if self.count <= allowed:
            return
        remedy = f"{self.problem}: {self.list_by_reason()}; "
        if self.advice:
            remedy += f"{self.advice}, or "
        remedy += "correct them"
        if self.policy == "drop":
            remedy += f", or allow more than {self.share:.2%} of them (data.drop_at_most)"
        else:
            remedy += f", or leave them out ({self.setting}=drop)"
        raise UserError(self.setting, f"{self.count} of {total} {self.noun}", remedy)

    def check_early(self, total: int | None) -> None:
        """Check the budget before all rows are read, once `SHOWN` rows are left out.

        Args:
            total: rows of the source; None: unknown, so that only the policy ``refuse`` can fail
                early.

        Raises:
            UserError: as `check`.
        """
        # A user who sees ten rows corrects more of them at once than one who sees the first.
        if self.count < SHOWN:
            return
        if self.policy == "refuse":
            self.check(self.count)
        elif total is not None and self.count > self.share * total:
            self.check(total)

    def describe(self) -> str:
        """Describe what was left out, for a line on the terminal; empty if nothing was."""
        if not self.count:
            return ""
        listed = self.list_by_reason(SHOWN_IN_LOG)
        if self.count > SHOWN_IN_LOG:
            listed += "; …"
        return f"left out {self.count} {self.noun} that {self.problem}: {listed}"

    def to_facts(self) -> dict[str, object]:
        """Return the count and the examples, for the manifest."""
        return {"count": self.count, "examples": self.examples}
