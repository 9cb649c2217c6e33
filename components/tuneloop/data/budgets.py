"""Rows that are left out, and how many of them may be: ``data.bad_rows``, ``data.wrong_answers``."""

from dataclasses import dataclass, field
from typing import Literal

from tuneloop.core.errors import UserError, shorten_text

Policy = Literal["drop", "refuse"]
SHOWN = 10
"""Examples that are kept, and that an error lists."""


@dataclass
class Budget:
    """Rows that are left out for one kind of reason: `count` of them, the first ones with a reason.

    Attributes:
        setting: what decides about them, such as ``data.bad_rows``.
        problem: what is wrong with them, as the end of a sentence: ``cannot be used``.
        noun: what is counted: ``rows``.
        share: the most that may be left out, of all that were read.
        advice: what helps rather than to correct the rows; empty: nothing else does.
    """

    setting: str
    problem: str
    noun: str
    policy: Policy
    share: float
    count: int = 0
    examples: list[str] = field(default_factory=list)
    advice: str = ""

    def add(self, row: str, reason: str) -> None:
        """Count one row."""
        self.count += 1
        if len(self.examples) < SHOWN:
            self.examples.append(f"{row}: {shorten_text(reason, 120)}")

    def check(self, total: int) -> None:
        """Check that no more than the share of `total` is left out. Raises UserError that lists the
        first ones."""
        allowed = 0 if self.policy == "refuse" else int(self.share * total)
        if self.count <= allowed:
            return
        listed = "; ".join(self.examples)
        remedy = f"{self.problem}: {listed}; "
        if self.advice:
            remedy += f"{self.advice}, or "
        remedy += "correct them"
        if self.policy == "drop":
            remedy += f", or allow more than {self.share:.2%} of them (data.drop_at_most)"
        else:
            remedy += f", or leave them out ({self.setting}=drop)"
        raise UserError(self.setting, f"{self.count} of {total} {self.noun}", remedy)

    def check_early(self, total: int | None) -> None:
        """Check the budget before all rows are read, where their number is known or its policy
        leaves no choice: once there are ten examples to show."""
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
        more = "; …" if self.count > 3 else ""
        return f"left out {self.count} {self.noun} that {self.problem}: {'; '.join(self.examples[:3])}{more}"

    def to_facts(self) -> dict[str, object]:
        """Return the count and the examples, for the manifest."""
        return {"count": self.count, "examples": self.examples}
