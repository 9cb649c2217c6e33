"""Describe a run in text, for terminals and reports."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, variance

from tuneloop.formats.held_out import HeldOutFacts
from tuneloop.runs.alarms import find_alarms
from tuneloop.runs.run_record import Curve, Entry, Run, Score

RECENT = 20
"""Iterations whose median is what the next ones are expected to take."""


def format_duration(seconds: float) -> str:
    """Format seconds as ``3.2 s``, ``2 min 05 s`` or ``1 h 02 min``."""
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def format_size(count: float) -> str:
    """Format bytes as ``1.5 MB`` (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def summarize_run(
    run: Run, report: Path | None = None, mirrors: Mapping[str, str] | None = None
) -> str:
    """Summarize the results of a run, one aligned line per fact."""
    model = next((entry for entry in reversed(run.entries) if entry.manifest.kind == "model"), None)
    by_stage = {
        stage: sum(seconds for _, seconds in points)
        for stage, points in run.phase_seconds().items()
    }
    facts = {
        "mean reward": reward_line(run),
        "eval loss": held_out_line(run),
        "alarms": "; ".join(find_alarms(run.curves())),
        "iterations": iterations_line(run),
        "seconds": "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in by_stage.items()),
        "ran on": ", ".join(list_devices(run.entries)),
        "model": f"{run.url}/{model.key}/{model.manifest.root}" if model else "",
        "report": str(
            report
            or (run.directory / "report.html" if (run.directory / "report.html").exists() else "")
        ),
        **(mirrors or {}),
    }
    return format_facts(facts)


def format_facts(facts: Mapping[str, str]) -> str:
    """Format facts as aligned lines, one per fact that is known."""
    return "\n".join(
        f"  {name:<12} {text.replace('file://', '')}" for name, text in facts.items() if text
    )


def reward_line(run: Run, scores: Sequence[Score] = ()) -> str:
    """Say what the reward was before and after, and how it was measured; by default on held-out prompts, if any."""
    scores = scores or run.evaluations() or run.training_rewards()
    if not scores:
        return ""
    first, last = scores[0], scores[-1]
    if first is last:
        return f"{first.value:.3f} ({describe_score(run, first)}, policy version {first.version})"
    about = f"{describe_score(run, last)}; policy version {first.version} → {last.version}"
    return f"{first.value:.3f} → {last.value:.3f} ({about})"


def held_out_line(run: Run) -> str:
    """Say the loss on held-out demonstrations before and after, and how it was measured."""
    losses = find_held_out(run)
    return str(losses) if losses else ""


def find_held_out(run: Run) -> HeldOutFacts | None:
    """Find the newest losses on held-out demonstrations; None where none were measured."""
    facts = [HeldOutFacts.read(entry.manifest.facts) for entry in run.with_role("trainer")]
    return next((losses for losses in reversed(facts) if losses), None)


def judge_run(run: Run, curves: Iterable[Curve], alarms: Sequence[str]) -> str:
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
    beginnings = {
        "failed": "failed, having gone",
        "interrupted": "was interrupted, having gone",
        "running": "is going",
    }
    alarm = " (see the alarms)" if alarms else ""
    return f"The run {beginnings.get(run.phase, 'went')} {course}{alarm}: {measurement}."


def _measure_gain(run: Run, curves: Iterable[Curve]) -> tuple[float | None, float, str]:
    """Return how much a run gained, the noise of that, and the measurement; None: no gain is known."""
    candidates = (run.evaluations(), run.training_rewards())
    scores = next((candidate for candidate in candidates if len(candidate) > 1), [])
    if scores:
        samples = [run.samples(score.entry, ("score",)) for score in (scores[0], scores[-1])]
        values = [
            [row["score"] for row in rows if row.get("score") is not None] for rows in samples
        ]
        errors = [variance(scored) / len(scored) for scored in values if len(scored) > 1]
        measurement = f"mean reward {reward_line(run, scores)}"
        return scores[-1].value - scores[0].value, 2 * sum(errors) ** 0.5, measurement
    if losses := find_held_out(run):
        return losses.loss_before - losses.loss_after, 0.0, f"held-out loss {losses}"
    training = (curve.y for curve in curves if curve.name == "loss" and len(curve.y) > 1)
    loss = next(training, None)
    if loss is None:
        return None, 0.0, ""
    # A nan is neither a gain nor within the noise.
    return loss[0] - loss[-1], 0.0, f"loss {loss[0]:.3g} → {loss[-1]:.3g}"


def describe_score(run: Run, score: Score) -> str:
    """Describe how a mean reward was obtained, with the number of its completions."""
    count = run.count_scored_completions(score.entry)
    return f"{score.how}, {count} completions" if count else score.how


def estimate_loop_end(run: Run, most: int | None) -> float | None:
    """Estimate when the last of `most` iterations will have ended, in Unix seconds; None before two have."""
    ended = {
        entry.iteration: entry.finished for entry in run.with_role("trainer") if entry.iteration
    }
    newest = sorted(ended)[-RECENT - 1 :]
    if len(newest) < 2 or not most or newest[-1] >= most:
        return None
    each = median((ended[b] - ended[a]) / (b - a) for a, b in pairwise(newest))
    return ended[newest[-1]] + each * (most - newest[-1])


def iterations_line(run: Run, most: int | None = None) -> str:
    """Say how many of the requested iterations ran, and for a fork, where it began."""
    state = run.state
    asked = state.workflow.parameters.get("iterations") if state else most
    if not run.iteration and not asked:
        return ""
    began = (
        f", forked from {run.origin['run']} after {run.origin['iteration']}" if run.origin else ""
    )
    return f"{run.iteration}" + (f" of at most {asked}" if asked else "") + began


def list_devices(entries: Iterable[Entry]) -> list[str]:
    """List every device that the stages report to have run on, and the processor features that were not used."""
    provenances = [entry.manifest.provenance for entry in entries]
    devices = sorted({str(device) for each in provenances if (device := each.get("device"))})
    limits = {
        f"AMX not used: {each['processor'].get('why')}"
        for each in provenances
        if "processor" in each
    }
    return [*devices, *sorted(limits)]


def result_line(iteration: int | None, results: Mapping[str, float | str | None]) -> str:
    """Format results in one line, with their iteration."""
    shown = [f"iteration {iteration}"] if iteration is not None else []
    for name, value in results.items():
        # A result that could not be measured is null; in the outputs of a pod it is text.
        if value is not None and value != "null":
            shown.append(f"{name} {format_number(value) or value}")
    return "  ".join(shown)


def format_number(value: float | str) -> str:
    """Format a number, or its text, whole or with four significant digits; return an empty string for other text."""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}"
