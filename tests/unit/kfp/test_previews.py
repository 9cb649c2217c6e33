"""What the UI is given: curves, tables."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.frozen import read_answers
from tuneloop.core.artifacts import Draft
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task


def write_curves(place: Path, rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    draft = Draft(f"{place}/sft")
    (draft.path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    manifest = draft.commit(stage="sft")
    outputs = {
        "artifacts": {"curves": {"artifacts": [{"uri": f"{place}/curves"}]}},
        "outputFile": "x",
    }
    previews.write_curves(
        Task.read(json.dumps({"outputs": outputs})), "curves", f"file://{place}/sft", manifest
    )
    return list(read_answers((place / "curves").read_text())["/curves"]["curves"])


def test_curves_are_the_quantities_over_the_steps(tmp_path: Path) -> None:
    shown = write_curves(
        tmp_path, [{"step": i, "loss": 1 / i, "grad_norm": 0.5} for i in (1, 2, 4)]
    )
    assert [(each["name"], each["stage"], each["axis"]) for each in shown] == [
        ("grad_norm", "sft", "step"),
        ("loss", "sft", "step"),
    ]
    assert (shown[1]["x"], shown[1]["y"]) == ([1, 2, 4], [1.0, 0.5, 0.25])


def test_of_a_stage_that_took_no_step_there_is_no_curve(tmp_path: Path) -> None:
    assert write_curves(tmp_path, []) == []


def test_a_table_keeps_its_shape_whatever_is_in_it() -> None:
    text = previews.render_markdown_table(("a", "b"), [("x|y\nz", "<script>"), ("w" * 500, None)])
    lines = text.splitlines()
    assert len(lines) == 4
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)
    assert "<script>" not in text and len(lines[3]) < 200


def test_a_preview_reads_the_first_rows_alone(tmp_path: Path) -> None:
    """The middle of the table is lost: who shows eight rows does not notice."""
    draft = Draft(f"{tmp_path}/rewards")
    noise = random.Random(0)
    rows = [
        {"id": f"id-{i}", "answer": noise.randbytes(200).hex(), "other": i} for i in range(20_000)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft.path / "rewards.parquet")
    manifest = draft.commit(
        stage="reward", params={}, inputs={}, results={}, timings={}, provenance={}, facts={}
    )
    path = tmp_path / "rewards" / manifest.root / "rewards.parquet"
    data = bytearray(path.read_bytes())
    data[4 << 20 : -(1 << 20)] = bytes(len(data) - (5 << 20))
    path.write_bytes(data)
    outputs = {
        "artifacts": {"preview": {"artifacts": [{"uri": str(tmp_path / "preview")}]}},
        "outputFile": "x",
    }
    previews.write_artifact_page(
        Task.read(json.dumps({"outputs": outputs})),
        "preview",
        f"file://{tmp_path}/rewards",
        manifest,
    )
    shown = (tmp_path / "preview").read_text()
    assert (
        "| id | answer |" in shown
        and f"| id-7 | {rows[7]['answer'][:100]}" in shown
        and "id-8" not in shown
    )
