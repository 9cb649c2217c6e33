"""The layouts of public data sets: the samples of docs/data.md, through `data_prep`."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.data.layouts import find_layout, list_layouts, recognise_layout
from tuneloop.data.sources import load_source
from tuneloop.stages.data_prep import data_prep

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
HELD_OUT = {"eval": 0, "sft_eval": 0, "preference_eval": 0}


def read_samples() -> dict[str, list[dict[str, Any]]]:
    """Return the sample of each layout that the page has."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        name = section.partition("\n")[0]
        body = section.partition("```json\n")[2].partition("\n```")[0]
        samples[name] = [json.loads(line) for line in body.splitlines()]
    return samples


def read_splits() -> dict[str, list[str]]:
    """Return the parts that the rows of each layout go to, by the table of the page."""
    rows = re.findall(r"^\| \[`(\S+)`\].* \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", splits) for name, splits in rows}


SAMPLES = read_samples()


def prepare(path: Path, rows: list[dict[str, Any]], **params: Any) -> Artifact:
    """Prepare rows as a file of JSON Lines, without held-out parts."""
    path.mkdir(exist_ok=True)
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data_prep(out=str(path / "out"), source=str(file), **{**HELD_OUT, **params})
    return Artifact(str(path / "out"))


def read_rows(artifact: Artifact, split: str) -> list[dict[str, Any]]:
    """Read the rows of a split; none where it has no file."""
    file = artifact.path / f"{split}.parquet"
    return pq.read_table(file).to_pylist() if file.exists() else []


def test_the_page_has_every_layout() -> None:
    names = {layout.name for layout in list_layouts()}
    assert names == set(SAMPLES) == set(read_splits())
    assert all(len(rows) == 5 for rows in SAMPLES.values())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_sample_is_recognised_and_prepared(name: str, tmp_path: Path) -> None:
    rows = SAMPLES[name]
    assert recognise_layout(rows) == find_layout(name)
    # Prompts without answers need a reward that the user chose.
    rewards = {"exact": 1.0} if name == "prompt-only" else None
    artifact = prepare(tmp_path, rows, rewards=rewards)
    facts = artifact.manifest.facts
    assert facts["recognised"][0].startswith(f"recognised: {find_layout(name).title}; ")
    assert "dropped" not in facts and "unused" not in facts
    counts = {split: number for split, number in facts["rows"].items() if number}
    wanted = read_splits()[name]
    if name == "unpaired-preference":
        assert counts == {"preference": 2, "sft": 1}
    else:
        assert counts == dict.fromkeys(wanted, 5)
    for split in counts:
        for row in read_rows(artifact, split):
            assert re.fullmatch(rf"{tmp_path}/rows.jsonl:\d( with .*:\d)?", row["row"])
    if "train" in counts:
        spec = json.loads(read_rows(artifact, "train")[0]["reward"])
        assert spec == dict(find_layout(name).rewards or {"exact": 1.0})


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_parquet_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """Nested columns of Parquet have all fields in all rows, and give the same rows all the same."""
    columns = list(dict.fromkeys(column for row in SAMPLES[name] for column in row))
    whole_rows = [{column: row.get(column) for column in columns} for row in SAMPLES[name]]
    try:
        table = pa.Table.from_pylist(whole_rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        pytest.skip("a column has values of several types, which Parquet has not")
    layout = find_layout(name)
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, SAMPLES[name])))
    examples = []
    for suffix in ("jsonl", "parquet"):
        arguments = {"path": f"{tmp_path}/rows.{suffix}", "layout": layout.name, "shuffle": False}
        examples.append(
            [
                vars(e) | {"row": None, "nulls": 0}
                for e in load_source("files", arguments, 0, 0).train
            ]
        )
    assert examples[0] == examples[1]


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.layout: 'gsm8k': does not fit .*needs question"):
        prepare(tmp_path, [{"text": "a b"}], layout="gsm8k")
    with pytest.raises(UserError, match=r"layout: 'gsm': unknown; known: alpaca"):
        prepare(tmp_path, [{"text": "a b"}], layout="gsm")
