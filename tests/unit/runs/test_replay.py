"""A stage that is computed again comes to the same digest; else the first difference is named."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.policies import commit_policy
from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.runs.replay import _compare_lines, _compare_tensors
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.tokenize_data import tokenize_data

ROWS = {"source": "digits", "source_args": {"digits": 2}, "train": 8, "eval": 4, "sft": 0}


def prepare(store: Path, run: str, **params: Any) -> Artifact:
    data_prep(out=f"{store}/{run}/data-prep", **{**ROWS, **params})
    return Artifact(f"{store}/{run}/data-prep")


def test_rows_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = prepare(tmp_path, "a")
    assert run_cli(["replay", "a", "0", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"data-prep: equal, {made.manifest.digest}\n"


def test_what_comes_out_otherwise_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A committed artifact that holds what its stage does not make."""
    made = prepare(tmp_path, "a")
    draft = Draft(f"{tmp_path}/b/data-prep")
    shutil.copytree(made.path, draft.path, dirs_exist_ok=True)
    (draft.path / "eval.parquet").write_bytes((draft.path / "train.parquet").read_bytes())
    fields = ("stage", "role", "kind", "params", "inputs", "results", "facts", "provenance")
    draft.commit(**{field: getattr(made.manifest, field) for field in fields})
    assert run_cli(["replay", "b", "0", "--stage", "data-prep", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().out == "data-prep: file eval.parquet: the bytes differ\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["7"], "iteration: 7: has no artifact in toy; known: none"),
        (
            ["1", "--stage", "sft"],
            "iteration: 1: has no sft in toy; known: policy-update, reward, rollout",
        ),
    ],
)
def test_what_is_not_there_is_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], message: str
) -> None:
    toy.make(f"{tmp_path}/toy")
    assert run_cli(["replay", "toy", *asked, "--store", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_what_several_processes_made_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Draft(f"{tmp_path}/r/sft").commit(stage="sft", notes={"world_size": 2})
    assert run_cli(["replay", "r", "0", "--store", str(tmp_path)]) == 2
    assert "was made by 2 processes, and another number gives other bits" in capsys.readouterr().err
    Draft(f"{tmp_path}/mine/judge").commit(stage="judge")
    assert run_cli(["replay", "mine", "0", "--store", str(tmp_path)]) == 2
    assert (
        "stage: 'judge': is neither a stage of tuneloop nor of an extension"
        in capsys.readouterr().err
    )


def commit(url: str, weight: float, loss: float) -> None:
    draft = Draft(url)
    (draft.path / "model").mkdir()
    save_file(
        {"a": torch.zeros(2), "b": torch.tensor([[1.0, 2.0], [3.0, weight]])},
        draft.path / "model/w.safetensors",
    )
    (draft.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"loss": {loss}}}\n')
    draft.commit(stage="policy_update", facts={"version": 1})


@pytest.mark.parametrize(
    ("weight", "loss", "found"),
    [
        (4.0, 0.5, "equal in all artifacts that both have"),
        (5.0, 0.5, "file model/w.safetensors: tensor b, element [1, 1]: 4, 5 (1 differ)"),
        (math.nan, 0.5, "file model/w.safetensors: tensor b, element [1, 1]: 4, nan (1 differ)"),
        (4.0, 0.25, 'file metrics.jsonl: line 2: {"loss": 0.5}, {"loss": 0.25}'),
    ],
)
def test_two_runs_depart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weight: float, loss: float, found: str
) -> None:
    for run, values in {"a": (4.0, 0.5), "b": (weight, loss)}.items():
        commit(f"{tmp_path}/{run}/iterations/1/policy-update", 4.0, 0.5)
        commit(f"{tmp_path}/{run}/iterations/2/policy-update", *values)
        commit(f"{tmp_path}/{run}/iterations/{3 if run == 'a' else 4}/policy-update", 4.0, 0.5)
    code = run_cli(["bisect", "a", "--against", "b", "--store", str(tmp_path)])
    assert capsys.readouterr().out.removeprefix("iterations/2/policy-update: ") == f"{found}\n"
    assert code == (0 if found.startswith("equal") else 2)


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (math.nan, 0.0, "tensor a, element [0]: nan, 0 (1 differ)"),
        (math.inf, torch.finfo(torch.float32).max, "element [0]: inf, 3.40282e+38 (1 differ)"),
        (math.nan, math.nan, "None"),
    ],
)
def test_a_nan_equals_only_a_nan(tmp_path: Path, first: float, second: float, line: str) -> None:
    save_file({"a": torch.tensor([first, 1.0])}, tmp_path / "first.safetensors")
    save_file({"a": torch.tensor([second, 1.0])}, tmp_path / "second.safetensors")
    difference = _compare_tensors(tmp_path / "first.safetensors", tmp_path / "second.safetensors")
    assert str(difference).endswith(line)


def test_a_line_that_only_goes_on_is_shown_from_its_end() -> None:
    short = b"x" * 500
    shown = _compare_lines(short, short + b"more").removeprefix("line 1: ").split(", ")
    assert shown[1] == shown[0] + "more"


def test_files_that_are_gone_are_compared_by_what_is_said_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, weight in {"a": 4.0, "b": 5.0}.items():
        commit(f"{tmp_path}/{run}/iterations/1/policy-update", weight, 0.5)
    made = Artifact(f"{tmp_path}/a/iterations/1/policy-update")
    (made.path / "model/w.safetensors").unlink()
    assert run_cli(["bisect", "a", "--against", "b", "--store", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "file model/w.safetensors: SHA-256 " in said and said.endswith("; its bytes are gone\n")


def test_a_run_that_was_moved_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = prepare(tmp_path / "old", "a", sft=4)
    policy = commit_policy(tmp_path / "old/a/base-model")
    tokenize_data(out=f"{tmp_path}/old/a/tokenize-data", policy=policy.ref, prompts=prompts.ref)
    (tmp_path / "old").rename(tmp_path / "new")
    line = ["replay", "a", "0", "--stage", "tokenize-data", "--store", f"{tmp_path}/new"]
    assert run_cli(line) == 0, capsys.readouterr().err


def test_other_parameters_are_named_before_what_they_led_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, "a")
    prepare(tmp_path, "b", seed=1)
    assert run_cli(["bisect", "a", "--against", "b", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().out == "data-prep: params seed: 0, 1\n"
