"""What becomes of rows that are too long, and how many may be dropped.

`data_prep` puts the settings into its facts, and every later stage reads them from there
(`formats/facts.py: PromptFacts`), as tokens are counted only where there is a tokenizer.
`stages/tokenize_data.py` passes them on by a list of their names: a setting that is added to
`PromptFacts` belongs into that list, too, or runs with tokenized data have its default. Tests:
`tests/unit/stages/test_too_long.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count

TooLong = Literal["drop", "truncate", "refuse"]
"""`drop` leaves a row out, `truncate` cuts the end of a demonstration off, `refuse` ends the
stage. A prompt to sample from is never cut: with `truncate` it is left out. Readers ask for
`truncate` (`training/lengths.py`) and `refuse` (`check_share`, `inference/prompt_room.py`) alone,
so a further action would act as `drop` until each of them knows it."""
DROP_AT_MOST = 0.01
"""The share of rows that may be dropped: the default of `stages/data_prep.py: DataOptions`, and the
share for data whose manifest does not state one."""
SHOWN = 10
"""Rows that an error or a fact names; `data/budgets.py` has its own for rows that cannot be
used."""


@dataclass(frozen=True)
class LengthPolicy:
    """The settings ``data.too_long`` and ``data.drop_at_most``, as an artifact of data states
    them."""

    action: TooLong = "drop"
    share: float = DROP_AT_MOST

    def count_allowed(self, total: int) -> int:
        """Return how many of `total` rows may be dropped: the share, rounded down, and one at least
        where others stay, so that a small split does not end a stage for a single row."""
        if self.share <= 0 or total <= 1:
            return 0
        return max(1, int(self.share * total))

    def check_share(self, dropped: int, total: int, rows: Sequence[str], problem: str) -> None:
        """Check that `dropped` of `total` rows may be left out.

        Args:
            rows: descriptions of the dropped rows; the first `SHOWN` are in the error.
            problem: ends the sentence about them, with what the user can do.

        Raises UserError: more rows than are allowed, or any where they are refused.
        """
        allowed = 0 if self.action == "refuse" else self.count_allowed(total)
        if dropped <= allowed:
            return
        choice = "set data.too_long=drop"
        if self.action != "refuse":
            choice = f"allow more than {self.share:.2%} of them (data.drop_at_most)"
        remedy = f"{'; '.join(rows[:SHOWN])}: {problem}, drop the rows, or {choice}"
        raise UserError("data.too_long", f"{dropped} of {format_count(total, 'row')}", remedy)
