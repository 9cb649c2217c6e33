"""The report of a run: the live page with all data that it would request, in one file that opens
offline.

`run` writes it when it ends, `tuneloop report` anew, trackers attach it (`runs/tracking.py`), and
KFP shows it as a task's output (`kfp/report.py`). It has the same scripts as the page, and answers
in place of their requests.
"""

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
from tuneloop.runs.cautions import describe_caution
from tuneloop.runs.committed import Entry
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.run_record import Curve, Run
from tuneloop.runs.summary import judge_run
from tuneloop.ui.describe import RunDescription, describe_run, describe_state
from tuneloop.ui.samples import COMPLETIONS, FILES, TOKENS, read_page
from tuneloop.weights.inspect import list_versions

STATIC = Path(__file__).parent / "static"
MODULES = (
    "frozen.js",
    "dom.js",
    "chart.js",
    "run.js",
    "runs.js",
    "weights.js",
    "samples.js",
    "app.js",
)
"""The page's scripts, each after those that it imports.

They become one script in a report, so that a script that is added has to be listed here, and no two
may define a name in common at their top level (`tests/unit/ui/test_report.py` notices both). An
import has to be one statement that begins a line and ends with a semicolon.
"""
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'\">"
)
"""Content security policy of a report: only the script and the style with these digests. The live
page has its own, `ui/app.py: POLICY`."""
POINTS = 10_000
"""The number of points of all curves together."""
FEWEST_POINTS = 20
MOST_POINTS = 460
"""The minimum and maximum of one curve: two points for each two pixels."""
# Limits that keep a report below 1 MB.
ARTIFACTS = 240
"""Artifacts of the loop: the newest. The page says how many are left out."""
VERSIONS = 100
"""Published versions."""
ROWS = 12
"""Completions of an iteration or evaluation."""
CHARACTERS = 2000
"""Characters of a completion."""
IDS = 200
"""Tokens of a completion."""
PAGE_BYTES = 80_000
"""Bytes of the completions of an iteration or evaluation."""


def render_page(run: Run) -> str:
    """Render the report of a run as an HTML page of at most 1 MB.

    Raises:
        Corrupt: an artifact in it was changed.
    """
    address = f"/runs/{quote(run.name, safe='')}"
    description = describe_run(run)
    verdict = judge_run(run, description["curves"], description["alarms"])
    caution = describe_caution(run)
    if caution:
        verdict += f" {caution}"
    description["verdict"] = verdict
    _shorten_description(description)
    samples = {f"{address}/samples/{subject}": page for subject, page in _read_samples(run)}
    notes = {description["note"]}
    notes.update(page["note"] for page in samples.values())
    for note in sorted(notes - {""}):
        print_diagnostic(f"report: {note}", 0)
    # A server keeps files open, but a report needs them once.
    COMPLETIONS.clear()
    answers: dict[str, Any] = {
        address: description,
        f"{address}/now": describe_state(run, None),
        f"{address}/weights": {
            "published": list_versions(run.weights_url, VERSIONS),
            "deliveries": list_deliveries(run)[-VERSIONS:],
            # Nobody can tell who will serve what when the report is read.
            "served": {},
        },
    }
    return freeze_page(
        run.name,
        address,
        answers | samples,
        verdict,
    )


def _shorten_description(description: RunDescription) -> None:
    """Reduce what `describe_run` returned to what a report has room for."""
    looped = [
        artifact["key"]
        for artifact in description["artifacts"]
        if artifact["iteration"] is not None
    ]
    omitted = set(looped[:-ARTIFACTS])
    description["left_out"] = len(omitted)
    description["artifacts"] = [
        artifact for artifact in description["artifacts"] if artifact["key"] not in omitted
    ]
    for phase in description["phases"]:
        phase["points"] = _thin_points(phase["points"], MOST_POINTS)
    description["curves"] = _thin_curves(description["curves"])


def render_metrics(
    stage: str,
    rows: Sequence[Mapping[str, Any]],
    axis: str,
) -> str:
    """Render an HTML page with a chart for each quantity that a stage recorded.

    Args:
        stage: its name.
        rows: what it recorded, name → value.
        axis: the name of the quantity over which the others are drawn.
    """
    curves: dict[str, Curve] = {}
    for row in rows:
        for name in row.keys() - {axis}:
            if name not in curves:
                curves[name] = Curve(
                    name,
                    stage,
                    None,
                    f"as {stage} recorded it",
                    axis,
                )
            curves[name].add(row[axis], row[name], 0.0)
    thinned = _thin_curves([curves[name] for name in sorted(curves)])
    answer = {"title": stage, "curves": thinned}
    return freeze_page(stage, "/curves", {"/curves": answer})


def freeze_page(
    title: str,
    address: str,
    answers: Mapping[str, Any],
    sentence: str = "",
) -> str:
    """Freeze the live page into one file that needs no server.

    Four texts of `static/index.html` are replaced as they stand there: one that is edited in the
    page alone stays as it is in a report, without an error.

    Args:
        title: the page's.
        address: where the page is opened, a path.
        answers: path → what the server would answer.
        sentence: what is shown without scripts.
    """
    style = (STATIC / "style.css").read_text("utf-8")
    modules = [(STATIC / name).read_text("utf-8") for name in MODULES]
    # All modules become one, so that the policy can name it by its digest.
    script = re.sub(
        r"^import [^;]*;\n|^export ",
        "",
        "".join(modules),
        flags=re.MULTILINE,
    )
    policy = POLICY.format(
        script=_hash_source(script),
        style=_hash_source(style),
    )
    data = _encode_json({"start": address, "answers": answers}).decode()
    heading = html.escape(title)
    replacements = {
        "<title>tuneloop</title>": f"{policy}\n<title>{heading}</title>",
        '<link rel="stylesheet" href="/static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/static/app.js"></script>': (
            f'<script type="application/json" id="frozen">{data}</script>\n'
            f'<script type="module">{script}</script>'
        ),
        "<p>Reading …</p>": (
            f"<h1>{heading}</h1><p>{html.escape(sentence)}</p>"
            "<noscript>A script draws the rest.</noscript>"
        ),
    }
    page = (STATIC / "index.html").read_text("utf-8")
    # In one pass: what is inserted may contain any text.
    pattern = "|".join(re.escape(text) for text in replacements)
    return re.sub(pattern, lambda match: replacements[match[0]], page)


def _hash_source(text: str) -> str:
    """Return the SHA-256 of an inline script or style as a content security policy names it."""
    digest = hashlib.sha256(text.encode()).digest()
    return base64.b64encode(digest).decode()


def _encode_json(value: Any) -> bytes:
    """Encode as JSON that cannot contain the start of markup."""
    return to_json(value, inf_nan_mode="null").replace(b"<", rb"\u003c")


def _thin_curves(curves: Sequence[Curve]) -> list[Curve]:
    """Return curves with fewer points, which share the limit of all of them, and without times."""
    fair_share = POINTS // max(len(curves), 1)
    limit = max(FEWEST_POINTS, min(MOST_POINTS, fair_share))
    thinned: list[Curve] = []
    for curve in curves:
        points = _thin_points(list(zip(curve.x, curve.y)), limit)
        x = [point[0] for point in points]
        y = [point[1] for point in points]
        thinned.append(
            replace(
                curve,
                x=x,
                y=y,
                at=[],
            )
        )
    return thinned


def _thin_points(
    points: Sequence[tuple[float, float]],
    limit: int,
) -> list[tuple[float, float]]:
    """Keep the first and the last point, and the minimum and maximum of each part; round numbers
    to six digits.

    Args:
        points: x and y.
        limit: about how many are kept.
    """
    finite = [point for point in points if math.isfinite(point[1])]
    # Each part keeps two of its points.
    size = math.ceil(2 * len(finite) / limit) if len(finite) > limit else 1
    selected = set(finite[:1] + finite[-1:])
    for start in range(0, len(finite), size):
        part = sorted(
            finite[start : start + size],
            key=lambda point: point[1],
        )
        selected.update((part[0], part[-1]))
    return [(float(f"{x:.9g}"), float(f"{y:.6g}")) for x, y in sorted(selected)]


def _read_samples(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the first completions of the first and the last evaluation and iteration, after their
    path.
    """
    # An evaluation of data without rewards has completions and no mean reward.
    evaluations = [entry.key for entry in run.with_role("evaluator") if _has_samples(entry)]
    scored = [score.entry for score in run.training_rewards()]
    iterations = [str(entry.iteration) for entry in scored if _has_samples(entry)]
    for subjects in (evaluations, iterations):
        # A single one is both the first and the last.
        for subject in dict.fromkeys(subjects[:1] + subjects[-1:]):
            yield subject, _shorten_page(read_page(run, subject, {}))


def _has_samples(entry: Entry) -> bool:
    """Return whether an artifact holds completions."""
    return not entry.manifest.files.keys().isdisjoint(FILES)


def _shorten_page(page: dict[str, Any]) -> dict[str, Any]:
    """Return a page of completions with fewer and shorter ones, and the pieces of their tokens
    alone.
    """
    # The first rows are those that a reader would see first on the live page, too.
    rows: list[dict[str, Any]] = []
    for row in page["rows"][:ROWS]:
        rows.append({name: _shorten_value(name, value) for name, value in row.items()})
    while rows and len(_encode_json(rows)) > PAGE_BYTES:
        rows.pop()
    ids: set[int] = set()
    for row in rows:
        ids.update(row.get("completion_ids", ()))
    pieces = {number: page["pieces"][number] for number in ids}
    return page | {"rows": rows, "held": len(rows), "pieces": pieces}


def _shorten_value(name: str, value: Any) -> Any:
    """Return the first tokens of a column of tokens, or the first characters of a text; all else
    as it is.
    """
    if name in TOKENS:
        return [round(number, 4) for number in value[:IDS]]
    if isinstance(value, str) and len(value) > CHARACTERS:
        return f"{value[:CHARACTERS]} … (cut)"
    return value
