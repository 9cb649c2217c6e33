"""A plain model directory: the checkpoint's bytes, and nothing around them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tuneloop.core.artifacts import Artifact, Draft, hash_files
from tuneloop.core.errors import UserError
from tuneloop.runs.run_record import Run
from tuneloop.stages.export import count_parameters, export


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    draft = Draft(str(tmp_path / "c"))
    model = draft.path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file(
        {"a": torch.ones(2, 3), "b": torch.ones(5)}, model / "model-00001-of-00002.safetensors"
    )
    save_file(
        {"c": torch.ones(7)}, model / "model-00002-of-00002.safetensors", metadata={"format": "pt"}
    )
    (draft.path / "trainer").mkdir()
    (draft.path / "trainer" / "state.json").write_text("{}")
    draft.commit(stage="sft", facts={"version": 4})
    return str(tmp_path / "c")


def test_the_artifact_is_the_model_directory(checkpoint: str, tmp_path: Path) -> None:
    manifest = export(out=str(tmp_path / "m"), policy=checkpoint)
    assert manifest.results == {"parameters": 18}
    assert manifest.facts["version"] == 4
    assert manifest.files == hash_files(Artifact(checkpoint).path / "model")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    Draft(str(tmp_path / "p")).commit(stage="data_prep")
    with pytest.raises(UserError, match=r"holds no model/config\.json"):
        export(out=str(tmp_path / "m"), policy=str(tmp_path / "p"))


@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=5))
def test_parameters_are_counted_from_the_header(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    tensors = {str(i): torch.zeros(shape, dtype=torch.bfloat16) for i, shape in enumerate(shapes)}
    save_file(tensors, path)
    assert count_parameters(path) == sum(tensor.numel() for tensor in tensors.values())


def test_a_checkpoint_without_a_version_is_exported_and_is_none_of_the_policy(
    tmp_path: Path,
) -> None:
    """As a reward model is."""
    draft = Draft(f"{tmp_path}/r/iterations/1/rm")
    (draft.path / "model").mkdir()
    (draft.path / "model" / "config.json").write_text("{}")
    draft.commit(stage="reward_model")
    made = export(out=f"{tmp_path}/r/export", policy=draft.url)
    assert made.facts["version"] is None
    assert Run.open("r", str(tmp_path)).checkpoints == []
