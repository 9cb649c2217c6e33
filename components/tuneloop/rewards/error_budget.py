"""How many completions may go without a score, and what is said where more do.

`reward` and `evaluate` check it after scoring (`rewards/stage_scoring.py`). A Retryable lets the
workflow engine start the stage again, which keeps the scores that it has.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.wording import format_count
from tuneloop.rewards.outcomes import GARBAGE, OUT_OF_RANGE, Kind, Outcome, may_pass

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
    """See that no more completions than the budget have no score, and that one has.

    Args:
        stage: whose setting ``error_budget`` is `budget`, a share of all completions.

    Raises:
        Retryable: there are more, but not without timeouts, crashes and I/O errors, which may not
            occur in another attempt.
        UserError: more would occur again: a reward raises an error or returns a bad value, or the
            outcomes are `unverifiable` or `escape`.
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
