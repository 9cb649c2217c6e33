"""Describe a run in text, for terminals and reports."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, variance

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


def judge_run(run: Run, curves: Iterable[Curve], alarms: Sequence[str]) -> str:
    """Say in one sentence, with the numbers, whether a run improved; within two standard errors it may be chance."""
    scores = next(
        (each for each in (run.evaluations(), run.training_rewards()) if len(each) > 1), []
    )
    if scores:
        samples = [run.samples(score.entry, ("score",)) for score in (scores[0], scores[-1])]
        known = [[row["score"] for row in rows if row.get("score") is not None] for rows in samples]
        noise = (
            2 * sum(variance(values) / len(values) for values in known if len(values) > 1) ** 0.5
        )
        gain, said = scores[-1].value - scores[0].value, f"mean reward {reward_line(run, scores)}"
    elif loss := next(
        (curve.y for curve in curves if curve.name == "loss" and len(curve.y) > 1), []
    ):
        noise, gain, said = 0.0, loss[0] - loss[-1], f"loss {loss[0]:.3g} → {loss[-1]:.3g}"
    else:
        return "It is not known whether the run goes well: nothing was measured twice."
    well = (
        "well"
        if gain > noise
        else "badly"
        if not gain >= -noise
        else "without a change that is more than chance"
    )
    ended = {
        "failed": "failed, having gone",
        "interrupted": "was interrupted, having gone",
        "running": "is going",
    }
    return f"The run {ended.get(run.phase, 'went')} {well}{' (see the alarms)' if alarms else ''}: {said}."


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


def result_line(iteration: int | None, results: Mapping[str, float | str]) -> str:
    """Format results in one line, with their iteration."""
    shown = [f"iteration {iteration}"] if iteration is not None else []
    for name, value in results.items():
        shown.append(f"{name} {format_number(value) or value}")
    return "  ".join(shown)


def format_number(value: float | str) -> str:
    """Format a number, or its text, whole or with four significant digits; return an empty string for other text."""
    try:
        number = float(value)
    except ValueError:
        return ""
    return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e15 else f"{number:.4g}"
