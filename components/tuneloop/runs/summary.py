"""Describe a run in text, for terminals and reports.

Commands and the report print these sentences, and the page gets them as text. `summarize_run` is
what `tuneloop run` prints at the end; `status` has a list of facts of its own (`cli/inspect.py:
show_status`), and a run on a cluster another one (`cli/verdict.py: print_verdict`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from tuneloop.core.wording import format_count
from tuneloop.formats.facts import TrainingFacts
from tuneloop.formats.held_out import HeldOutFacts
from tuneloop.runs.alarms import find_alarms
from tuneloop.runs.committed import Entry
from tuneloop.runs.records import REPORT_FILE
from tuneloop.runs.run_record import Curve, Run, Score
from tuneloop.workflow.loop_state import LoopState

RECENT = 20
"""Iterations whose median is what the next ones are expected to take."""
FACT_WIDTH = 12
"""The least width of the names of facts."""
LARGEST_WHOLE = 1e15
"""From here on a float no longer shows every whole number exactly."""


def format_duration(seconds: float) -> str:
    """Format seconds as ``3.2 s``, ``2 min 05 s`` or ``1 h 02 min``."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_size(count: float) -> str:
    """Format bytes as ``1.5 MB`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_facts(facts: Mapping[str, str]) -> str:
    """Format facts as aligned lines, one per fact that is known."""
    width = max([FACT_WIDTH, *(len(name) for name, text in facts.items() if text)])
    lines: list[str] = []
    for name, text in facts.items():
        if text:
            # A path is easier to copy than its URL.
            path = text.replace("file://", "")
            lines.append(f"  {name:<{width}} {path}")
    return "\n".join(lines)


def format_results(
    iteration: int | None,
    results: Mapping[str, float | str | None],
) -> str:
    """Format results in one line, with their iteration."""
    texts: list[str] = []
    if iteration is not None:
        texts.append(f"iteration {iteration}")
    for name, value in results.items():
        # A result that could not be measured is null; in the outputs of a pod it is text.
        if value is not None and value != "null":
            texts.append(f"{name} {format_number(value) or value}")
    return "  ".join(texts)


def format_number(value: float | str) -> str:
    """Format a number, or its text, whole or with four significant digits; return an empty string
    for other text. `runs/stages.py` and `cli/live.py` tell by that which outputs are numbers.
    """
    try:
        number = float(value)
    except ValueError:
        return ""
    if number.is_integer() and abs(number) < LARGEST_WHOLE:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def summarize_run(
    run: Run,
    report: Path | None = None,
    mirrors: Mapping[str, str] | None = None,
) -> str:
    """Summarize the results of a run, one aligned line per fact.

    Args:
        run: the run.
        report: its report, if it was just written; else the one that lies beside the run's state.
        mirrors: tracker → where the run is mirrored, or why it is not.
    """
    # All iterations of a stage together.
    seconds = [
        f"{stage} {sum(seconds for _, seconds in points):.1f}"
        for stage, points in run.phase_seconds().items()
    ]
    models = [entry for entry in run.entries if entry.manifest.kind == "model"]
    last_report = run.directory / REPORT_FILE
    if report is None and last_report.exists():
        report = last_report
    facts = {
        "mean reward": describe_reward(run),
        "held-out loss": str(find_held_out(run) or ""),
        "alarms": "; ".join(find_alarms(run.curves())),
        "iterations": describe_iterations(run),
        "seconds": "  ".join(seconds),
        "ran on": ", ".join(list_devices(run.entries)),
        "model": f"{run.url}/{models[-1].path}" if models else "",
        "report": str(report or ""),
    }
    facts.update(mirrors or {})
    return format_facts(facts)


def describe_reward(
    run: Run,
    scores: Sequence[Score] = (),
) -> str:
    """Describe the first and the last reward of a run, and how they were measured; empty if there
    are none.

    Args:
        run: the run.
        scores: its rewards, oldest first; by default those on held-out prompts, if any, else
            those in training.
    """
    # Rewards on held-out prompts are comparable; those in training are of other prompts each time.
    scores = scores or run.evaluations() or run.training_rewards()
    if not scores:
        return ""
    first = scores[0]
    last = scores[-1]
    # Both were measured alike, over the number of completions that the last one has.
    method = describe_score(run, last)
    if first is last:
        return f"{first.value:.3f} ({method}, policy version {first.version})"
    versions = f"policy version {first.version} → {last.version}"
    return f"{first.value:.3f} → {last.value:.3f} ({method}; {versions})"


def describe_score(
    run: Run,
    score: Score,
) -> str:
    """Describe how a mean reward was obtained, with the number of its completions."""
    count = run.count_scored_completions(score.entry)
    return f"{score.method}, {format_count(count, 'completion')}" if count else score.method


def find_held_out(run: Run) -> HeldOutFacts | None:
    """Find the newest losses on held-out demonstrations; None if none were measured."""
    for entry in reversed(run.with_role("trainer")):
        losses = TrainingFacts.read(entry.manifest).held_out
        if losses:
            return losses
    return None


def judge_run(
    run: Run,
    curves: Iterable[Curve],
    alarms: Sequence[str],
) -> str:
    """Say in one sentence, with the numbers, whether a run improved.

    It goes by the mean reward, else by the loss on held-out demonstrations, else by the training
    loss. A reward within two standard errors may be chance.
    """
    gain, noise, measurement = _measure_gain(run, curves)
    if gain is None:
        return "It is not known whether the run goes well: nothing was measured twice."
    if gain > noise:
        course = "well"
    elif gain >= -noise:
        course = "without a change that is more than chance"
    else:
        course = "badly"
    # By the words of `Run.phase`.
    beginnings = {
        "failed": "failed, having gone",
        "interrupted": "was interrupted, having gone",
        "running": "is going",
    }
    alarm = " (see the alarms)" if alarms else ""
    return f"The run {beginnings.get(run.phase, 'went')} {course}{alarm}: {measurement}."


def _measure_gain(
    run: Run,
    curves: Iterable[Curve],
) -> tuple[float | None, float, str]:
    """Measure how much a run gained.

    Returns:
        The gain, its noise, both in the unit of what was measured, and the measurement in words;
        a gain of None if nothing was measured twice.
    """
    # What was measured on held-out prompts says most.
    for scores in (
        run.evaluations(),
        run.training_rewards(),
    ):
        if len(scores) > 1:
            gain = scores[-1].value - scores[0].value
            variances = [run.estimate_variance(score) for score in (scores[0], scores[-1])]
            noise = 2 * sum(variances) ** 0.5
            return gain, noise, f"mean reward {describe_reward(run, scores)}"
    losses = find_held_out(run)
    if losses:
        return losses.loss_before - losses.loss_after, 0.0, f"held-out loss {losses}"
    for curve in curves:
        if curve.name == "loss" and len(curve.y) > 1:
            # A nan is neither a gain nor within the noise.
            first = curve.y[0]
            last = curve.y[-1]
            return first - last, 0.0, f"loss {first:.3g} → {last:.3g}"
    return None, 0.0, ""


def estimate_loop_end(
    run: Run,
    iterations: int | None,
    target_reward: float = math.inf,
) -> float | None:
    """Estimate when the last iteration of a loop will have ended, in Unix seconds.

    Args:
        run: the run.
        iterations: how many were requested; None: not known.
        target_reward: the mean reward that ends the loop.

    Returns:
        None before two iterations have ended, and where none follows.
    """
    ends = run.iteration_ends()
    # Early iterations may have been slower, as completions get longer or shorter.
    newest = sorted(ends)[-RECENT - 1 :]
    if len(newest) < 2 or not iterations:
        return None
    rewards = {score.entry.iteration: score.value for score in run.training_rewards()}
    start = LoopState(target_reward=target_reward, iterations=iterations)
    if start.after(newest[-1], rewards.get(newest[-1], -math.inf)).is_over:
        return None
    # An iteration that committed nothing here leaves a gap.
    seconds = [(ends[end] - ends[start]) / (end - start) for start, end in pairwise(newest)]
    return ends[newest[-1]] + median(seconds) * (iterations - newest[-1])


def describe_iterations(
    run: Run,
    limit: int | None = None,
) -> str:
    """Describe how many of the requested iterations ran, and for a fork, where it began; empty if
    the run has no loop.

    Args:
        run: the run.
        limit: how many were requested, of a run that is executed elsewhere.
    """
    state = run.state
    requested = state.workflow.parameters.get("iterations") if state else limit
    if not run.iteration and not requested:
        return ""
    text = f"{run.iteration}"
    if requested:
        text += f" of at most {requested}"
    if run.origin:
        text += f", forked from {run.origin['run']} after {run.origin['iteration']}"
    return text


def list_devices(entries: Iterable[Entry]) -> list[str]:
    """List every device that the stages report to have run on, and the processor features that
    were not used.
    """
    devices: set[str] = set()
    limits: set[str] = set()
    for entry in entries:
        provenance = entry.manifest.provenance
        if provenance.get("device"):
            devices.add(str(provenance["device"]))
        if "processor" in provenance:
            limits.add(f"AMX not used: {provenance['processor'].get('why')}")
    return sorted(devices) + sorted(limits)
