"""What weakens a verdict: a measurement on few rows says little, whichever way it went.

`tuneloop run` prints it below the summary, and `status` among the facts of a run. The report shows
it after its verdict (`runs/summary.py: judge_run`).
"""

from tuneloop.core.wording import format_count
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import find_held_out

FEWEST_ROWS = 20
"""Held-out rows below which a mean is that of single rows: one of them moves it by over 5 %.

`runs/gain.py` refuses to compare two policies on fewer, so a change of it also changes which models
KFP's gate registers (`kfp/register.py`). `data/sizes.py: FEWEST_ROWS` is independent of it: the
rows that a file must have for some of them to be held out.
"""


FEWEST_STEPS = 20
"""Optimizer steps of a run in epochs below which more of them are worth a try."""


def describe_caution(run: Run) -> str:
    """Describe why the verdict on a run says little, and what would help, in a sentence for each
    reason; empty where there is none."""
    return " ".join(filter(None, [_describe_few_rows(run), _describe_few_steps(run)]))


def _describe_few_steps(run: Run) -> str:
    """Say which setting trains longer, where a short file gave few optimizer steps."""
    for entry in run.with_role("trainer"):
        epochs = entry.manifest.params.get("epochs")
        steps = entry.manifest.facts.get("step")
        # The message names a setting, ``<stage>.epochs``. Only of these two stages it is known that
        # the section of the settings has the stage's name.
        if not epochs or entry.stage not in ("sft", "preference"):
            continue
        if isinstance(steps, int) and 0 < steps < FEWEST_STEPS:
            # An epoch may be a part of one: as a whole number it would be none.
            passes = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
            return (
                f"{entry.stage} took {format_count(steps, 'optimizer step')} in {passes}: if the "
                f"loss still falls, train longer in another run, --set "
                f"{entry.stage}.epochs={3 * epochs:g}."
            )
    return ""


def _describe_few_rows(run: Run) -> str:
    """Say how many rows would be enough, where a run was measured on few."""
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
    return f"{format_count(number, noun)} {'was' if number == 1 else 'were'}"
