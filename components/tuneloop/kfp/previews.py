"""What the UI of Kubeflow Pipelines shows of a committed artifact: a page of facts and rows, and
curves.

`ui_outputs.py` says which tasks have these pages. It runs in a task's pod, after the stage.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from tuneloop.core.artifacts import Manifest
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store
from tuneloop.core.wording import format_count
from tuneloop.kfp.io import Task
from tuneloop.ui.report import render_metrics

ROWS = 8
"""Rows of a table that a page shows."""
WIDTH = 160
"""Characters of a cell."""
BATCH = 64
"""Rows that are decoded at a time. A page shows fewer, `ROWS`."""
BUFFER = 1 << 16
"""Bytes of a table that one request to the store reads."""
COLUMNS = (
    "id",
    "request_id",
    "prompt",
    "completion",
    "answer",
    "score",
    "outcome",
    "finish_reason",
    "policy_versions",
)
"""Columns of a table that a page shows, in this order: a choice of those in `formats/rollouts.py`.

A table of another kind (prompts, pairs) shows those of its columns that have one of these names. A
column that is not listed is never shown.
"""


def write_artifact_page(task: Task, name: str, url: str, manifest: Manifest) -> None:
    """Write a Markdown page: the reference, results, device and time, and the first rows of each
    table.
    """
    facts: JsonObject = {"reference": f"{url}@{manifest.digest}"}
    facts.update(manifest.results)
    size = sum(file.size for file in manifest.files.values())
    facts["files"] = f"{len(manifest.files)}, {format_count(size, 'byte')}"
    facts["seconds"] = round(manifest.timings.get("total", 0.0), 2)
    facts["device"] = manifest.provenance.get("device")
    facts["image"] = manifest.provenance.get("image")
    parts = [f"## {manifest.stage}", render_markdown_table(("", ""), facts.items())]
    for file in sorted(manifest.files):
        if file.endswith(".parquet"):
            rows = list(islice(_read_rows(url, manifest, file), ROWS))
            columns = list(rows[0]) if rows else []
            parts.append(f"### {file}")
            parts.append(render_markdown_table(columns, [row.values() for row in rows]))
    task.write(name, "\n\n".join(parts) + "\n")


def write_curves(task: Task, name: str, url: str, manifest: Manifest) -> None:
    """Write an HTML page with one line chart per quantity of ``metrics.jsonl`` over the optimizer
    steps.
    """
    data = Store(url).get(f"{manifest.root}/metrics.jsonl") or b""
    rows = [json.loads(line) for line in data.splitlines()]
    task.write(name, render_metrics(manifest.stage, rows, "step"))


def render_markdown_table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Render a Markdown table; a cell is cut after `WIDTH` characters.

    `tests/component_pages.py` renders docs/components with it, too: after a change `make golden`.
    """
    lines = [_render_row(head), _render_row(["---"] * len(head))]
    lines += map(_render_row, rows)
    return "\n".join(lines)


def _render_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(_render_cell, cells)) + " |"


def _render_cell(value: object) -> str:
    text = " ".join(str(value).split())
    # A bar would end the cell, and the UI would show a tag as HTML.
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def _read_rows(url: str, manifest: Manifest, file: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, read a few at a time, with its columns among `COLUMNS`, in that
    order.
    """
    import pyarrow.parquet

    with Store(url).open(f"{manifest.root}/{file}") as source:
        # pyarrow would otherwise read whole row groups ahead.
        table = pyarrow.parquet.ParquetFile(source, buffer_size=BUFFER, pre_buffer=False)
        columns = [column for column in COLUMNS if column in table.schema_arrow.names]
        for batch in table.iter_batches(BATCH, columns=columns):
            # `iter_batches` keeps the order of the file.
            yield from batch.select(columns).to_pylist()
