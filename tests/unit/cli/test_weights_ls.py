"""`tuneloop weights ls` says what is stored of each version: model and trainer's state."""

from pathlib import Path

import pytest

from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Draft
from tuneloop.core.store import Store


def commit_checkpoint(url: str, version: int, model: int, state: int) -> str:
    """Commit a policy with so many bytes of each, and return its reference."""
    draft = Draft(url)
    for folder, size in (("model", model), ("trainer", state)):
        if size:
            (draft.path / folder).mkdir()
            (draft.path / folder / "w.safetensors").write_bytes(b"x" * size)
    (draft.path / "metrics.jsonl").write_text("{}\n")
    manifest = draft.commit(
        stage="sft", role="trainer", kind="checkpoint", facts={"version": version}
    )
    return f"{url}@{manifest.digest}"


def test_both_sizes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = f"{tmp_path}/r"
    commit_checkpoint(f"{run}/base-model", 0, 500, 0)
    commit_checkpoint(f"{run}/sft", 1, 500, 3000)
    looped = commit_checkpoint(f"{run}/iterations/1/policy-update", 2, 600, 0)
    # The loop writes the trainer's state as an artifact of its own, below the checkpoint.
    draft = Draft(f"{run}/iterations/1/policy-update/state")
    (draft.path / "trainer").mkdir()
    (draft.path / "trainer" / "rank-00000.safetensors").write_bytes(b"x" * 7000)
    draft.commit(stage="policy_update", kind="state", inputs={"checkpoint": looped})
    capsys.readouterr()
    assert run_cli(["weights", "ls", "r", "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "whole" not in out
    base, sft, update = (line for line in out.splitlines() if line.strip()[:1].isdigit())
    assert " 500 B " in base and base.endswith(" none")
    assert " 500 B " in sft and sft.endswith(" 3 kB")
    assert " 600 B " in update and update.endswith(" 7 kB")
    assert "models 1.6 kB in all; trainer state 10" in out


def test_a_model_that_retention_deleted_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{tmp_path}/r"
    commit_checkpoint(f"{run}/iterations/1/policy-update", 2, 600, 0)
    commit_checkpoint(f"{run}/iterations/2/policy-update", 3, 600, 0)
    store = Store(run)
    for key in store.stat():
        if key.startswith("iterations/1/") and "/model/" in key:
            store.delete(key)
    assert run_cli(["weights", "ls", "r", "--store", str(tmp_path)]) == 0
    first, second = (
        line for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()
    )
    assert " deleted " in first and " deleted " not in second
