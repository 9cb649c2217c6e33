"""What judging a completion gives: a score, or what kept it from one.

`reward` writes an `Outcome` as the columns ``outcome``, ``score`` and ``breakdown``; trainers and
people read these. A kind that is added is a value of that column, and has to be decided in
`rewards/score_record.py` (is it final, or judged again?), `rewards/error_budget.py` (what is said of
it), `rewards/scoring.py` (which of several kinds is the row's), and in `training/samples.py` and
`runs/run_record.py` (does such a row have a score?).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tuneloop.core.json_types import JsonMapping

Kind = Literal["score", "timeout", "infra_error", "unverifiable", "escape"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Row = JsonMapping
"""A completion with its ``answer``, its ``metadata`` (JSON, or empty) and its ``reward_spec``."""
RAISED = "raised"
RETURNED = "returned"
"""The first word of the reason of an ``infra_error`` that the reward itself caused."""
OUT_OF_RANGE = "outside its RANGE"
"""In the reason of an ``infra_error``: what a reward returned."""
GARBAGE = "is no JSON"
"""In the reason of an ``infra_error``: what the judge of a reward answered."""


class Escape(Exception):
    """Raised by a reward: the program in a completion tried to leave its sandbox, and was stopped."""


class Unverifiable(Exception):
    """Raised by a reward that cannot judge a row, whatever its completion: says what is missing."""


class Verdict(NamedTuple):
    """The result of one call of a reward.

    Attributes:
        kind: ``score``, or what kept it from one.
        value: the score before weighting, or the reason why there is none.
        parts: what the reward tells besides, by name.
        ended_by: what the completion did to its judge: ``timeout`` or ``crash``; else empty.
    """

    kind: Kind
    value: float | str
    parts: Mapping[str, float] = {}
    ended_by: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of judging one completion by all of its rewards.

    Attributes:
        outcome: ``score``, or what kept it from one: ``escape``, else the first failure among its
            rewards.
        score: the weighted sum of its rewards; None unless `outcome` is ``score``.
        breakdown: reward → its value before weighting, or what went wrong; ``reward.part`` → what
            it tells besides.
    """

    outcome: Kind
    score: float | None
    breakdown: dict[str, float | str]


def may_pass(outcome: Outcome) -> bool:
    """Return whether judging again may give a score.

    It gives none where a reward failed by itself, as it would again on the same text.
    """
    if outcome.outcome not in ("timeout", "infra_error"):
        return False
    # Scores are numbers, and only reasons begin with a word.
    reasons = map(str, outcome.breakdown.values())
    return not any(reason.startswith((RAISED, RETURNED)) for reason in reasons)
