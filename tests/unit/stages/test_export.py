"""A plain model directory: the checkpoint's bytes, whole or not at all, and nobody else's overwritten."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tuneloop.core.artifacts import Artifact, Draft, hash_files
from tuneloop.core.errors import UserError
from tuneloop.stages.export import count_parameters, export


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    draft = Draft(str(tmp_path / "c"))
    model = draft.path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a": torch.ones(2, 3), "b": torch.ones(5)}, model / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(7)}, model / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    (draft.path / "trainer").mkdir()
    (draft.path / "trainer" / "state.json").write_text("{}")
    draft.commit(stage="sft", facts={"version": 4})
    return str(tmp_path / "c")


def test_artifact_and_copy(checkpoint: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "plain"
    manifest = export(out=str(tmp_path / "m"), policy=checkpoint, directory=str(target))
    assert manifest.results == {"parameters": 18}
    assert manifest.facts["version"] == 4
    model = hash_files(Artifact(checkpoint).path / "model")
    assert manifest.files == model == hash_files(target)
    assert [p.name for p in target.parent.iterdir()] == ["plain"]
    assert oct(target.stat().st_mode)[-3:] == "755"
    again = export(out=str(tmp_path / "m2"), policy=checkpoint, directory=str(target))  # it is one already
    assert again.digest == manifest.digest


def test_an_empty_directory_is_filled(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    export(out=str(tmp_path / "m"), policy=checkpoint, directory=str(tmp_path / "plain"))
    assert (tmp_path / "plain" / "config.json").exists()


@pytest.mark.parametrize("what", ["file", "other", "changed"])
def test_what_is_somebody_elses_stays(checkpoint: str, tmp_path: Path, what: str) -> None:
    target = tmp_path / "plain"
    if what == "file":
        target.write_text("mine")
    elif what == "other":
        target.mkdir()
        (target / "thesis.tex").write_text("mine")
    else:
        export(out=str(tmp_path / "m0"), policy=checkpoint, directory=str(target))
        (target / "config.json").write_text('{"mine": 1}')
    before = target.read_bytes() if what == "file" else hash_files(target)
    with pytest.raises(UserError, match=r"export.directory: .*exists and holds something else"):
        export(out=str(tmp_path / "m"), policy=checkpoint, directory=str(target))
    assert before == (target.read_bytes() if what == "file" else hash_files(target))
    assert not list(tmp_path.glob(".plain*"))


def test_a_copy_is_made_even_where_the_artifact_stands(checkpoint: str, tmp_path: Path) -> None:
    export(out=str(tmp_path / "m"), policy=checkpoint)
    export(out=str(tmp_path / "m"), policy=checkpoint, directory=str(tmp_path / "plain"))
    assert (tmp_path / "plain" / "config.json").exists()


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
