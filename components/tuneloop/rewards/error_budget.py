"""How many completions may go without a score, and what error is raised if more do.

The stages `reward` and `evaluate` check it after scoring (`rewards/stage_scoring.py`). A Retryable
lets the workflow engine start the stage again, which keeps the scores that it has. A kind of
outcome that is added gets its remedy in `_find_remedy`, or else the one for wrong data. Tests are
in `tests/unit/rewards/test_judges.py` and `tests/unit/stages/test_reward.py`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.wording import format_count
from tuneloop.rewards.outcomes import GARBAGE, OUT_OF_RANGE, Kind, Outcome, may_pass

# Mark in the reason of a failure → what helps. A reason is any text of a reward, so that a mark has
# to occur in no other reason.
REMEDIES = {
    OUT_OF_RANGE: (
        "let its module say RANGE = (LOW, HIGH), the interval that its scores are in "
        "(docs/extending.md), or change what it returns"
    ),
    GARBAGE: (
        "let the reward read what its judge answers, and return None or raise "
        "RewardUnavailable where it cannot (docs/extending.md)"
    ),
}


def check_error_budget(stage: str, outcomes: Sequence[Outcome], budget: float) -> None:
    """Check that the completions without a score are within the budget, and that at least one has a
    score.

    A failure lasts if judging again would give it again (`rewards/outcomes.py: may_pass` says no):
    a reward raised an error or returned a bad value, or the outcome is ``unverifiable`` or
    ``escape``.

    Args:
        stage: name of the stage whose setting ``error_budget`` is `budget`.
        budget: a share of all completions, from 0 to 1.

    Raises:
        Retryable: too many have no score, but those that last are within the budget: the others
            (timeouts, crashes, I/O errors) may have a score in another attempt.
        UserError: those that last are already too many.
    """
    failures = [outcome for outcome in outcomes if outcome.score is None]
    if len(failures) <= budget * len(outcomes) and len(failures) < len(outcomes):
        return
    kinds = Counter(outcome.outcome for outcome in failures)
    causes = Counter(
        f"{name}: {reason}"
        for outcome in failures
        for name, reason in outcome.breakdown.items()
        if isinstance(reason, str)
    )
    listed = "; ".join(f"{count} × {cause}" for cause, count in causes.most_common(5))
    story = f"{len(failures)} of {format_count(len(outcomes), 'completion')} have no score ({dict(kinds)}): {listed}"
    # Failures that occur again on the same text are not worth another attempt.
    lasting = [failure for failure in failures if not may_pass(failure)]
    if len(lasting) <= budget * len(outcomes) and len(lasting) < len(outcomes):
        remedy = "If it happens again, correct the reward"
        raise Retryable(f"{stage}: {story}; the budget is {budget:.0%}. {remedy}")
    raise UserError(f"{stage}.error_budget", budget, f"{story}; {_find_remedy(kinds, causes)}")


def _find_remedy(kinds: Mapping[Kind, int], causes: Counter[str]) -> str:
    if kinds.get("escape"):
        return "read what the policy tries; escape_score teaches it not to"
    # The remedy is for the cause of most failures.
    common = " ".join(cause for cause, _ in causes.most_common(1))
    for mark, remedy in REMEDIES.items():
        if mark in common:
            return remedy
    return "correct the data or the rewards"
