"""What the UI of Kubeflow Pipelines shows of a committed artifact: a page of facts and rows, and curves."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tuneloop.core.artifacts import Manifest
from tuneloop.core.store import Store
from tuneloop.kfp.io import Task
from tuneloop.ui.report import render_metrics

ROWS = 8
WIDTH = 160
BATCH = 64
"""Rows of a preview, characters of a cell, and rows read at a time."""
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


def write_artifact_page(task: Task, name: str, url: str, manifest: Manifest) -> None:
    """Write a Markdown page: the reference, results, place and time, and the first rows of each table."""
    facts = {
        "reference": f"{url}@{manifest.digest}",
        **manifest.results,
        "files": f"{len(manifest.files)}, {sum(file.size for file in manifest.files.values())} bytes",
        "seconds": round(manifest.timings.get("total", 0.0), 2),
        "device": manifest.provenance.get("device"),
        "image": manifest.provenance.get("image"),
    }
    parts = [f"## {manifest.stage}", render_markdown_table(("", ""), facts.items())]
    for file in sorted(manifest.files):
        if file.endswith(".parquet"):
            rows = list(islice(_rows(url, manifest, file), ROWS))
            shown = list(rows[0]) if rows else []
            parts += [
                f"### {file}",
                render_markdown_table(shown, ([row[column] for column in shown] for row in rows)),
            ]
    task.write(name, "\n\n".join(parts) + "\n")


def write_curves(task: Task, name: str, url: str, manifest: Manifest) -> None:
    """Write an HTML page with one line chart per quantity of ``metrics.jsonl`` over the optimizer steps."""
    data = Store(url).get(f"{manifest.root}/metrics.jsonl") or b""
    task.write(
        name,
        render_metrics(manifest.stage, [json.loads(line) for line in data.splitlines()], "step"),
    )


def render_markdown_table(head: Sequence[str], rows: Any) -> str:
    """Render a Markdown table; a cell is cut after `WIDTH` characters."""
    return "\n".join(
        "| " + " | ".join(map(_cell, line)) + " |" for line in [head, ["---"] * len(head), *rows]
    )


def _rows(url: str, manifest: Manifest, file: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, read a few at a time, with its columns among `COLUMNS`, in that order."""
    import pyarrow.parquet

    with Store(url).open(f"{manifest.root}/{file}") as opened:
        table = pyarrow.parquet.ParquetFile(opened, buffer_size=1 << 16, pre_buffer=False)
        wanted = [column for column in COLUMNS if column in table.schema_arrow.names]
        for batch in table.iter_batches(BATCH, columns=wanted):
            yield from batch.select(wanted).to_pylist()


def _cell(value: Any) -> str:
    text = " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
