"""One HTML page that shows a run: readable offline and without scripts, everything inside."""

import string
import time
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tuneloop.runs import summary
from tuneloop.runs.alarms import find_alarms
from tuneloop.runs.charts import STYLE, Series, render_chart
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.run_record import Curve, Run

SAMPLES, ROWS, CHARACTERS = 12, 100, 2000
"""Most prompts, rows of a table and characters of a cell: 1,000 iterations, or long completions, fit into 1 MB."""
LABELS = {"step": "optimizer step"}
FIRST = ("mean_reward", "kl", "entropy", "loss", "mean_length")
"""Quantities whose curves come first, in this order; any other quantity that a stage recorded follows."""


def render_page(run: Run) -> str:
    """Return the report of `run` as a self-contained HTML page."""
    template = string.Template((Path(__file__).parent / "report.html").read_text("utf-8"))
    return template.substitute(title=escape(run.name), style=STYLE, body=_render_body(run))


def _render_body(run: Run) -> str:
    alarms = find_alarms(curves := run.curves())
    parts = [
        f'<h1>{escape(run.name)}</h1><p class="verdict">{escape(summary.judge_run(run, curves, alarms))}</p>',
        "".join(f'<p class="alarm" role="alert">{escape(alarm)}</p>' for alarm in alarms),
        _facts(run),
        f'<div class="figures">{"".join([*_draw_curves(curves), _draw_phases(run)])}</div>',
        _samples(run),
        _provenance(run),
        _efficiency(run),
        _weights(run),
        _packages(run),
    ]
    if run.record:
        config = escape(yaml.safe_dump(run.record.config, sort_keys=False))
        parts.append(f"<details><summary>Configuration</summary><pre>{config}</pre></details>")
    return "\n".join(part for part in parts if part)


def _facts(run: Run) -> str:
    work = summary.format_duration(sum(entry.seconds for entry in run.entries))
    facts = {
        "pipeline": run.record.pipeline if run.record else "not known here: the run was started elsewhere",
        "state": "as its artifacts tell; its executor is elsewhere" if run.phase == "elsewhere" else run.phase,
        "failed": "; ".join(f"{task}: {message}" for task, message in run.read_failures().items()),
        "iterations": summary.iterations_line(run),
        "ran on": ", ".join(summary.list_devices(run.entries)),
        "work": f"{work} in stages" if run.entries else "no stage has committed anything yet",
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.record.created)) if run.record else "",
        "artifacts": run.url.removeprefix("file://"),
    }
    return _table((), ([name, value] for name, value in facts.items() if value), kind="facts")


def _draw_curves(curves: list[Curve]) -> Iterator[str]:
    """Draw a chart for each quantity and axis; reward in training and on held-out prompts share one."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        # SFT's loss is no GRPO loss: only quantities over the same axis share a chart.
        groups.setdefault((curve.name, curve.axis), []).append(curve)
    rank = {name: index for index, name in enumerate(FIRST)}
    constant = []
    for name, axis in sorted(groups, key=lambda group: (rank.get(group[0], len(rank)), group[1] == "step")):
        group = groups[name, axis]
        series = [Series(f"{c.stage}: {c.how}", [*zip(c.x, c.y)], c.role != "evaluator") for c in group]
        title = f"{name.replace('_', ' ')} ({' and '.join(each.stage for each in group)})"
        if all(each.is_constant for each in series):
            constant.append(f"{title} {series[0].points[0][1]:g}")
        else:
            yield render_chart(title, series, LABELS.get(axis, axis))
    if constant:
        yield f"<p>The same throughout: {escape(', '.join(constant))}.</p>"


def _draw_phases(run: Run) -> str:
    """Draw the seconds of the loop's stages over its iterations, and list those of the others."""
    loop, once = [], list[list[str]]()
    for stage, points in run.phase_seconds().items():
        if inside := [point for point in points if point[0]]:
            loop.append(Series(stage, inside))
        once += [[stage, f"{seconds:.1f}"] for iteration, seconds in points if not iteration]
    table = _table(("stage outside the loop", "seconds"), once, kind="once") if once else ""
    return render_chart("seconds by phase", loop, "iteration") + table


def _samples(run: Run) -> str:
    """Show completions of the same prompts by the first and the last policy that was evaluated."""
    scores = run.evaluations() or run.training_rewards()
    if not scores:
        return ""
    first, last = scores[0], scores[-1]
    before = {row["id"]: row for row in run.samples(first.entry)}
    rows = []
    for row in run.samples(last.entry)[: SAMPLES if before else 0]:
        was = before.get(row["id"], {})
        cells = [row["prompt"], was.get("completion", "–"), _mark(was), row["completion"], _mark(row), row["answer"]]
        rows.append([str(cell) for cell in cells])
    before_after = [f"{when} (version {score.version})" for when, score in (("before", first), ("after", last))]
    head = ["prompt", before_after[0], "score", before_after[1], "score", "answer"]
    if first is last:
        rows, head = [[row[0], *row[3:]] for row in rows], [head[0], *head[3:]]
    note = f"The first of the completions that the mean rewards are taken over: {summary.describe_score(run, last)}."
    return f"<h2>Samples</h2><p>{escape(note)}</p>" + _table(head, rows, kind="samples")


def _provenance(run: Run) -> str:
    """Show which rollouts made which version, on what device, by which code."""
    rows = [
        [
            f"{entry.manifest.facts['version']}",
            entry.key,
            _short(entry.manifest.digest),
            "; ".join(_origin(run, name, ref) for name, ref in sorted(entry.manifest.inputs.items())),
            *(str(entry.manifest.provenance.get(name, "not stated")) for name in ("device", "world_size", "code")),
            summary.format_size(sum(f.size for f in entry.manifest.files.values())),
            f"{entry.seconds:.1f}",
        ]
        for entry in run.checkpoints
    ]
    head = ("version", "made by", "digest", "from", "device", "ranks", "code", "bytes", "seconds")
    return _section("Where every version came from", head, rows)


def _efficiency(run: Run) -> str:
    """Show how well the stages that train used their devices: over all runs of a stage, medians and the most memory."""
    made, rows = [entry.manifest for entry in run.entries], []
    made = [each for each in made if "efficiency" in each.notes and "tokens_per_s" in each.timings]
    for stage in dict.fromkeys(each.stage for each in made):
        entries = [each for each in made if each.stage == stage]
        figures = [entry.notes["efficiency"] for entry in entries]
        speed, flops = (median(e.timings["tokens_per_s"] for e in entries), median(f["flops_per_s"] for f in figures))
        mfu = [each["mfu"] for each in figures if each["mfu"] is not None]
        waits = [each["communication_s"] / each["step_s"] for each in figures if "step_s" in each]
        times = f"{stage}, {len(entries)} times" if len(entries) > 1 else stage
        memory = summary.format_size(max(each["peak_memory_bytes"] for each in figures))
        used = f"{median(mfu):.1%}" if mfu else "the device's peak is not known"
        waited = f"{median(waits):.1%} of a step" if waits else "one process, or not measured"
        rows.append([times, f"{speed:.4g}", f"{flops / 1e12:.3g}", used, memory, waited])
    head = ("stage", "tokens/s", "TFLOP/s", "MFU", "peak memory of a rank", "in collectives")
    return _section("Efficiency", head, rows)


def _weights(run: Run) -> str:
    """Show what each version took, from the trainer to the engine: `tuneloop.runs.delivery`."""
    rows = [
        [
            f"{d.version}",
            d.way + (f" by {d.replicas}" if d.replicas else ""),
            f"{d.encoding or 'full'}, {summary.format_size(d.sent_bytes or 0)} of {summary.format_size(d.full_bytes)}"
            if d.full_bytes
            else "",
            "" if d.density is None else f"{d.density:.2%}",
            *("" if s is None else f"{s * 1e3:.0f}" for s in (d.encode_s, d.publish_s, d.materialize_s)),
            *("" if s is None else f"{s * 1e3:.0f}" for s in (d.pause_s, d.converged_s, d.waited_s)),
            "" if d.behind is None else f"{d.behind:.2f}",
            d.proved,
        ]
        for d in list_deliveries(run)
    ]
    head = [
        *("version", "way", "sent", "elements changed", "encode ms", "publish ms", "materialize ms", "pause ms"),
        *("converged ms", "waited for ms", "versions behind, mean", "read back"),
    ]
    return _section("Weight versions", head, rows)


def _origin(run: Run, name: str, ref: str) -> str:
    """Name an input artifact by its place in the run; rewards by the rollouts that they score."""
    maker, digest = run.maker(ref), _short(ref)
    if maker is None:
        return f"{name} {digest} (outside this run)"
    inside = maker.manifest.inputs.get("rollouts")
    return f"{name} {maker.key} {digest}" + (f" ({_origin(run, 'rollouts', inside)})" if inside else "")


def _packages(run: Run) -> str:
    versions: dict[str, set[str]] = {}
    for entry in run.entries:
        provenance = entry.manifest.provenance
        own = {name: provenance.get(name) for name in ("tuneloop", "python", "image")}
        for name, version in {**own, **provenance.get("packages", {})}.items():
            versions.setdefault(name, set()).add(str(version))
    return _section("Packages", (), [[k, ", ".join(sorted(v))] for k, v in versions.items()], kind="facts")


def _section(title: str, head: Iterable[str], rows: list[list[str]], kind: str = "provenance") -> str:
    return f"<h2>{title}</h2>{_table(head, rows, kind)}" if rows else ""


def _table(head: Iterable[str], rows: Iterable[list[str]], kind: str) -> str:
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if names else ""
    cut = [[c if len(c) <= CHARACTERS else f"{c[:CHARACTERS]} … (cut)" for c in row] for row in rows]
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cut[-ROWS:])
    left = f"<p>{len(cut) - ROWS} rows before these are left out; tuneloop ui shows all.</p>" if len(cut) > ROWS else ""
    return f'{left}<table class="{kind}">{top}<tbody>{body}</tbody></table>'


def _mark(row: Mapping[str, Any]) -> str:
    score = row.get("score")
    return str(row.get("outcome", "–")) if score is None else f"{score:.2f}"


def _short(digest: str) -> str:
    return digest.rpartition(":")[2][:12]
