"""What weakens a verdict: a measurement on few rows says little, whichever way it went.

`run` and `status` print it after the verdict (`runs/summary.py`: `judge_run`), and the report shows
both.
"""

from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import find_held_out

FEWEST_ROWS = 20
"""Held-out rows below which a mean is that of single rows: one of them moves it by over 5 %."""


def describe_caution(run: Run) -> str:
    """Describe in one sentence why the verdict on a run says little, and what would help; empty if
    it was measured on enough rows, or not on held-out rows at all."""
    evaluations = run.evaluations()
    if evaluations:
        score = evaluations[-1]
        count = run.count_scored_completions(score.entry)
        if not 0 < count < FEWEST_ROWS:
            return ""
        error = run.estimate_variance(score) ** 0.5
        # Scores that are all equal say nothing of their spread.
        spread = f" (standard error {error:.2g})" if error else ""
        return (
            f"Only {_count(count, 'held-out completion')} scored{spread}: a mean of so few says "
            f"little; hold out at least {FEWEST_ROWS} prompts (data.eval)."
        )
    losses = find_held_out(run)
    if losses is None or losses.demonstrations >= FEWEST_ROWS:
        return ""
    return (
        f"Only {_count(losses.demonstrations, 'held-out demonstration')} measured: a loss of so "
        f"few says little; hold out at least {FEWEST_ROWS} (data.sft_eval)."
    )


def _count(number: int, noun: str) -> str:
    """Count things that something was done to, as in ``1 row was`` and ``2 rows were``."""
    return f"{number} {noun} was" if number == 1 else f"{number} {noun}s were"
