"""The report of a run: the live page with all data that it would request, in one file that opens offline."""

import base64
import hashlib
import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic_core import to_json

from tuneloop.core.errors import print_diagnostic
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.run_record import Curve, Entry, Run
from tuneloop.runs.summary import judge_run
from tuneloop.ui.describe import describe_run, describe_state
from tuneloop.ui.samples import COMPLETIONS, FILES, TOKENS, read_page
from tuneloop.weights.inspect import list_versions

STATIC = Path(__file__).parent / "static"
SCRIPTS = [
    f"{name}.js" for name in ("frozen", "dom", "chart", "run", "runs", "weights", "samples", "app")
]
"""The page's modules, each after those that it imports."""
POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-{}'; style-src "
    "'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'\">"
)
POINTS, FEWEST, MOST = 10_000, 20, 460
"""The number of points of all curves together, and the minimum and maximum of one curve: two for each two pixels."""
ARTIFACTS, VERSIONS, ROWS, CHARACTERS, IDS, PAGE_BYTES = 240, 100, 12, 2000, 200, 80_000
"""Limits that keep a report below 1 MB; ROWS is completions of a page, CHARACTERS and IDS text and tokens of one."""


def render_page(run: Run) -> str:
    """Render the report of `run` as an HTML page of at most 1 MB. Raises Corrupt if an artifact in it was changed."""
    at, found = f"/runs/{quote(run.name, safe='')}", describe_run(run)
    verdict = judge_run(run, found["curves"], found["alarms"])
    left = {
        *[each["key"] for each in found["artifacts"] if each["iteration"] is not None][:-ARTIFACTS]
    }
    found |= {
        "artifacts": [each for each in found["artifacts"] if each["key"] not in left],
        "left_out": len(left),
    }
    found |= {
        "phases": [{**each, "points": _thin(each["points"], MOST)} for each in found["phases"]]
    }
    found |= {"curves": _thin_curves(found["curves"]), "verdict": verdict}
    weights = {
        "published": list_versions(run.weights_url, VERSIONS),
        "deliveries": list_deliveries(run)[-VERSIONS:],
    }
    samples = {f"{at}/samples/{place}": page for place, page in _read_samples(run)}
    notes = {found["note"]} | {page["note"] for page in samples.values()}
    for note in sorted(notes - {""}):
        print_diagnostic(f"report: {note}", 0)
    # A server keeps files open, but a report needs them once.
    COMPLETIONS.clear()
    answers = {
        at: found,
        f"{at}/now": describe_state(run, None),
        f"{at}/weights": {**weights, "served": {}},
        **samples,
    }
    return freeze_page(run.name, at, answers, verdict)


def render_metrics(stage: str, rows: Sequence[Mapping[str, Any]], over: str) -> str:
    """Render an HTML page with a chart for each quantity that `stage` recorded over the one named `over`."""
    curves: dict[str, Curve] = {}
    for row in rows:
        for name in row.keys() - {over}:
            curve = curves.setdefault(
                name, Curve(name, stage, None, f"as {stage} recorded it", over)
            )
            curve.add(row[over], row[name], 0.0)
    shown = _thin_curves(sorted(curves.values(), key=lambda curve: curve.name))
    return freeze_page(stage, "/curves", {"/curves": {"title": stage, "curves": shown}})


def freeze_page(title: str, start: str, answers: Mapping[str, Any], first: str = "") -> str:
    """Freeze the live page, opened at the address `start`, into one file that needs no server: `answers` maps a path to
    the server's answer. `first` is a sentence that is shown without scripts."""
    style, page, *modules = (
        (STATIC / name).read_text("utf-8") for name in ("style.css", "index.html", *SCRIPTS)
    )
    script = re.sub(r"^import [^;]*;\n|^export ", "", "".join(modules), flags=re.MULTILINE)
    ours = (
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (script, style)
    )
    data, title = _encode({"start": start, "answers": answers}).decode(), html.escape(title)
    inside = {
        "<title>tuneloop</title>": f"{POLICY.format(*ours)}\n<title>{title}</title>",
        '<link rel="stylesheet" href="/static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/static/app.js"></script>': (
            f'<script type="application/json" id="frozen">{data}</script>\n<script type="module">{script}</script>'
        ),
        "<p>Reading …</p>": f"<h1>{title}</h1><p>{html.escape(first)}</p><noscript>A script draws the rest.</noscript>",
    }
    return re.sub("|".join(map(re.escape, inside)), lambda found: inside[found[0]], page)


def _encode(value: Any) -> bytes:
    """Encode as JSON that cannot contain the start of markup."""
    return to_json(value, inf_nan_mode="null").replace(b"<", rb"\u003c")


def _thin_curves(curves: Sequence[Curve]) -> list[Curve]:
    most = max(FEWEST, min(MOST, POINTS // max(len(curves), 1)))
    thinned = [(curve, _thin([*zip(curve.x, curve.y)], most)) for curve in curves]
    return [
        replace(curve, x=[x for x, _ in kept], y=[y for _, y in kept], at=[])
        for curve, kept in thinned
    ]


def _thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Keep the first and the last point, and the minimum and maximum of each part; round numbers to six digits."""
    points = [point for point in points if math.isfinite(point[1])]
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    parts = [
        sorted(points[i : i + size], key=lambda point: point[1])
        for i in range(0, len(points), size)
    ]
    kept = {*points[:1], *points[-1:], *(part[end] for part in parts for end in (0, -1))}
    return [(float(f"{x:.9g}"), float(f"{y:.6g}")) for x, y in sorted(kept)]


def _read_samples(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path, and the first completions, of the first and the last evaluation and iteration."""
    # An evaluation of data without rewards has completions and no mean reward.
    evaluations = [entry.key for entry in _with_samples(run.with_role("evaluator"))]
    scored = [score.entry for score in run.training_rewards()]
    iterations = [str(entry.iteration) for entry in _with_samples(scored)]
    for places in (evaluations, iterations):
        for place in dict.fromkeys(places[:1] + places[-1:]):
            yield place, _shorten_page(read_page(run, place, {}))


def _with_samples(entries: Sequence[Entry]) -> list[Entry]:
    """Return the artifacts that hold completions."""
    return [entry for entry in entries if {*FILES} & entry.manifest.files.keys()]


def _shorten_page(page: dict[str, Any]) -> dict[str, Any]:
    rows = [{name: _cut(name, value) for name, value in row.items()} for row in page["rows"][:ROWS]]
    while rows and len(_encode(rows)) > PAGE_BYTES:
        rows.pop()
    used = {number for row in rows for number in row.get("completion_ids", ())}
    return {
        **page,
        "rows": rows,
        "held": len(rows),
        "pieces": {number: page["pieces"][number] for number in used},
    }


def _cut(name: str, value: Any) -> Any:
    if name in TOKENS:
        return [round(each, 4) for each in value[:IDS]]
    return (
        f"{value[:CHARACTERS]} … (cut)"
        if isinstance(value, str) and len(value) > CHARACTERS
        else value
    )
