"""What the UI is given: charts, tables."""

import json
import random
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet

from tuneloop.core.artifacts import Draft
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task


def test_curves_begin_with_the_reward_and_name_what_does_not_change() -> None:
    rows = [{"iteration": i, "completions": 16, "loss": 1 / i, "mean_reward": 0.1 * i} for i in (1, 2, 3)]
    page = previews.render_charts(rows, "iteration")
    assert re.findall(r"<title>(.*?)</title>", page) == ["mean_reward: 0.1 → 0.3", "loss: 1 → 0.3333"]
    assert "The same throughout: completions 16." in page
    assert "nothing to draw" in previews.render_charts([], "step")


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
    rows = [{"id": f"id-{i}", "answer": noise.randbytes(200).hex(), "other": i} for i in range(20_000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), draft.path / "rewards.parquet")
    manifest = draft.commit(stage="reward", params={}, inputs={}, results={}, timings={}, provenance={}, facts={})
    path = tmp_path / "rewards" / manifest.root / "rewards.parquet"
    data = bytearray(path.read_bytes())
    data[4 << 20 : -(1 << 20)] = bytes(len(data) - (5 << 20))
    path.write_bytes(data)
    outputs = {"artifacts": {"preview": {"artifacts": [{"uri": str(tmp_path / "preview")}]}}, "outputFile": "x"}
    previews.write_artifact_page(
        Task.read(json.dumps({"outputs": outputs})), "preview", f"file://{tmp_path}/rewards", manifest
    )
    shown = (tmp_path / "preview").read_text()
    assert "| id | answer |" in shown and f"| id-7 | {rows[7]['answer'][:100]}" in shown and "id-8" not in shown
