"""What judging a completion gives: a score, or what kept it from one.

`reward` writes an `Outcome` as the columns ``outcome``, ``score`` and ``breakdown``; trainers and
people read these. A kind that is added is a value of that column, and has to be decided in
`rewards/score_record.py: FINAL` (is it final, or judged again?), `may_pass` below (may another
attempt give a score?), `rewards/error_budget.py` (what is said of it),
`rewards/scoring.py: _combine` (which of several kinds is the row's), and in `training/samples.py`
and `runs/run_record.py` (does such a row have a score?). `extensions/evaluation/evaluate_lm_eval.py` and
`inference/held_out.py` write kinds by themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tuneloop.core.json_types import JsonMapping

Kind = Literal["score", "timeout", "infra_error", "unverifiable", "escape"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The order in which the facts of `reward` and `evaluate` count outcomes."""
Row = JsonMapping
"""A completion with its ``answer``, its ``metadata`` (JSON, or empty) and its ``reward_spec``."""
# These four are compared with the texts of reasons, which `rewards/judging.py` writes and the
# breakdown of a row keeps. `may_pass` reads the first two, `rewards/error_budget.py: REMEDIES` the
# other two.
RAISED = "raised"
RETURNED = "returned"
"""The first word of the reason of an ``infra_error`` that the reward itself caused."""
OUT_OF_RANGE = "outside its RANGE"
"""In the reason of an ``infra_error``: what a reward returned."""
GARBAGE = "what its judge answered is no JSON"
"""In the reason of an ``infra_error``: what the judge of a reward answered."""


class Escape(Exception):
    """Raised by a reward: the program in a completion tried to leave its sandbox, and was stopped."""


class Unverifiable(Exception):
    """Raised by a reward that cannot judge a row, whatever its completion: says what is missing."""


class Verdict(NamedTuple):
    """The result of one call of a reward.

    `rewards/workers.py` sends the fields through a pipe and `rewards/score_record.py` writes them
    to a file, as JSON and in this order. A field that is added comes last, holds JSON, and has a
    default, as earlier attempts have written lines without it.

    Attributes:
        kind: ``score``, or what kept it from one.
        value: the score before weighting, or the reason why there is none.
        parts: what the reward tells besides, by name; ``timeout`` and ``crash`` say what a
            completion did to its judge (`rewards/scoring.py: _settle`, `stages/reward.py`,
            `local/probe.py`).
        ended_by: what the completion did to its judge: ``timeout`` or ``crash``; else empty. Such a
            verdict becomes the least score.
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
            `stages/reward.py` may give an ``escape`` one (``escape_score``).
        breakdown: reward → its value before weighting, or the reason why there is none;
            ``reward.part`` → what it tells besides. `stages/model_reward.py` adds ``model``.
    """

    outcome: Kind
    score: float | None
    breakdown: dict[str, float | str]


def may_pass(outcome: Outcome) -> bool:
    """Return whether judging again may give a score.

    It does not if a reward raised an error or returned a bad value, since it would do so again on
    the same text.
    """
    if outcome.outcome not in ("timeout", "infra_error"):
        return False
    # Scores are numbers, and only reasons begin with a word.
    reasons = map(str, outcome.breakdown.values())
    return not any(reason.startswith((RAISED, RETURNED)) for reason in reasons)
