"""Models and data by their names on a hub: the real clients, against a small server on this machine."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.provenance.test_push import call
from tests.making import demonstrations
from tests.models import write_model
from tests.unit.hub import Repos, open_hub
from tests.waiting import free_port

ROWS = [{"question": f"{n} + 1", "answer": f"It is so. #### {n + 1}"} for n in range(30)]
REFUSALS = {
    "me/gated": (403, "GatedRepo"),
    "me/locked": (401, ""),
    "datasets/me/gated": (403, "GatedRepo"),
    "datasets/me/locked": (401, ""),
}
TOKEN = "set HF_TOKEN to a token that may read it"
REASONS = {
    "me/gated": f"is gated on the hub: ask for access on its page, and {TOKEN}",
    "me/locked": f"is refused by the hub: {TOKEN}",
    "me/lost": f"is not on the hub, or private: check the name, or {TOKEN}",
    "hf://me/tiny@9": "has no such revision on the hub: check it",
}
"""What is not given → why, and the remedy."""
LOAD_MODELS = """
import json, sys
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable, UserError
from tuneloop.stages.base_model import base_model

outcomes = {}
for name in sys.argv[1:]:
    out = f"models/{len(outcomes)}"
    try:
        base_model(out=out, model=name)
        outcomes[name] = Artifact(out).manifest.facts
    except (UserError, Retryable) as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print("OUTCOMES", json.dumps(outcomes))
"""
LOAD_DATA = """
import json, sys
from tuneloop.core.errors import Retryable, UserError
from tuneloop.data.sources import load_source

outcomes = {}
for name in sys.argv[1:]:
    for streaming in (False, True):
        key = f"{name} {streaming}"
        try:
            splits = load_source("files", {"path": name, "streaming": streaming}, 10, 0)
            rows = sorted((row.row, row.prompt, row.answer) for row in splits.train)
            outcomes[key] = [list(splits.lines), rows]
        except (UserError, Retryable) as error:
            outcomes[key] = f"{type(error).__name__}: {error}"
print("OUTCOMES", json.dumps(outcomes))
"""


def read_outcomes(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert process.returncode == 0, process.stderr
    (line,) = [line for line in process.stdout.splitlines() if line.startswith("OUTCOMES ")]
    outcomes: dict[str, Any] = json.loads(line.removeprefix("OUTCOMES "))
    return outcomes


def add_model(repos: Repos, name: str, directory: Path) -> None:
    """Put the files of a directory into a repository."""
    repos[name] = [{path.name: path.read_bytes() for path in directory.iterdir()}]


def test_a_model_by_its_name(tmp_path: Path) -> None:
    """Whole, as adapters over another name, and each way in which a hub does not give it."""
    model = write_model("qwen3", tmp_path / "model")
    (model / "preprocessor_config.json").write_text('{"size": 224}')
    with open_hub(REFUSALS) as (address, repos):
        for name in ("me/tiny", "me/gated", "me/locked"):
            add_model(repos, name, model)
        adapter = write_adapter(model, tmp_path / "adapter", "me/tiny")
        add_model(repos, "me/adapter", adapter)
        add_model(repos, "me/orphan", write_adapter(model, tmp_path / "orphan", "me/lost"))
        names = ["me/tiny", f"hf://me/tiny@{0:040}", "me/adapter", "me/orphan", *REASONS]
        outcomes = read_outcomes(call(address, tmp_path / "home", "-c", LOAD_MODELS, *names))
        (tmp_path / "away").mkdir()
        away = f"http://127.0.0.1:{free_port()}"
        process = call(away, tmp_path / "away/home", "-c", LOAD_MODELS, "me/tiny")
        unreachable = read_outcomes(process)
    for name in names[:3]:
        assert outcomes[name]["architecture"] == "Qwen3ForCausalLM", outcomes[name]
    kept = {path.name for path in (tmp_path / "models/0").rglob("*.json")}
    assert "preprocessor_config.json" in kept
    assert outcomes["me/adapter"]["adapter_base"] == "me/tiny"
    orphan = "is an adapter (peft), and its base model me/lost is not on the hub, or private"
    assert orphan in outcomes["me/orphan"] and "set model.adapter_base" in outcomes["me/orphan"]
    for name, reason in REASONS.items():
        shown = name.removeprefix("hf://").partition("@")[0]
        assert outcomes[name] == f"UserError: base_model.model: {shown!r}: {reason}"
    assert unreachable["me/tiny"].startswith("Retryable: base_model: me/tiny: the hub does not")


def write_adapter(model: Path, directory: Path, base: str) -> Path:
    """Write adapters over `model`, which they name `base`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))
    return directory


def test_a_data_set_by_its_name(tmp_path: Path) -> None:
    """Kept here and streamed, and each way in which a hub does not give it."""
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    with open_hub(REFUSALS) as (address, repos):
        for name in ("rows", "gated", "locked"):
            repos[f"datasets/me/{name}"] = [{"README.md": b"# Rows", "data/train.jsonl": lines}]
        refused = ["me/gated", "me/locked", "me/lost"]
        names = ["me/rows", f"hf://datasets/me/rows@{0:040}", *refused]
        outcomes = read_outcomes(call(address, tmp_path / "home", "-c", LOAD_DATA, *names))
        away = f"http://127.0.0.1:{free_port()}"
        unreachable = read_outcomes(call(away, tmp_path / "other", "-c", LOAD_DATA, "me/rows"))
    for name in names[:2]:
        for streaming in (False, True):
            (line, *_), rows = outcomes[f"{name} {streaming}"]
            assert line.startswith("recognised: GSM8K"), line
            expected = [
                [f"{name}[train] row {number}", f"{number - 1} + 1", str(number)]
                for number in range(1, 31)
            ]
            assert sorted(expected) == rows
    for name in refused:
        for streaming in (False, True):
            line = outcomes[f"{name} {streaming}"]
            assert line == f"UserError: data.source: {name!r}: {REASONS[name]}"
    assert all(line.startswith("Retryable: data: me/rows: ") for line in unreachable.values())


def test_rows_of_the_hub_are_prepared(tmp_path: Path) -> None:
    """The stage itself: demonstrations in the form of chats, by one setting."""
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]},
                      {"role": "assistant", "content": row["completion"]}]}
        for row in demonstrations(24)
    ]  # fmt: skip
    command = ["-m", "tuneloop.stages.data_prep", "--source", "me/chats"]
    command += ["--prompts", tmp_path / "prompts", "--train", "0", "--eval", "0"]
    with open_hub() as (address, repos):
        repos["datasets/me/chats"] = [{"train.jsonl": "\n".join(map(json.dumps, rows)).encode()}]
        process = call(address, tmp_path / "home", *command)
    assert process.returncode == 0, process.stderr
    assert "rows in me/chats" in process.stderr


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "part-*.jsonl", "rows.jsonl.gz"])
def test_streaming_of_files_here_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """They are read in place in any case."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tuneloop.data.sources import load_source

    text = ["\n".join(map(json.dumps, part)) for part in (ROWS, ROWS[:10], ROWS[10:])]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name)
    elif name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(text[0].encode()))
    elif "*" in name:
        for number in (1, 2):
            (tmp_path / f"part-{number}.jsonl").write_text(text[number])
    else:
        (tmp_path / name).write_text(text[0])
    path = str(tmp_path / name)
    streamed, kept = (
        load_source("files", {"path": path, "streaming": streaming}, 10, 0)
        for streaming in (True, False)
    )
    rows = list(streamed.train)
    assert rows == list(kept.train)
    assert {row.prompt for row in rows} == {row["question"] for row in ROWS}
    assert streamed.lines == kept.lines
