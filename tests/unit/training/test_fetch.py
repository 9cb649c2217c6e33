"""What stands in the directory is ours, or stays."""

import os
from pathlib import Path

import pytest

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.training.fetch import fetch_artifact, main


def commit(url: str, text: str) -> str:
    draft = Draft(url)
    (draft.path / "x").write_text(text)
    draft.commit(stage="test")
    return Artifact(url).ref


def test_a_directory_of_somebody_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ref, mine = commit(f"{tmp_path}/a", "1"), tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    for into in (mine, mine / "thesis.tex"):
        assert main(["--into", str(into), ref]) == 2
        said = capsys.readouterr().err
        assert (
            said
            == f"error: --into: '{into}': holds files that no fetch has written; choose another directory\n"
        )
    assert [p.name for p in mine.iterdir()] == ["thesis.tex"] and (
        mine / "thesis.tex"
    ).read_text() == "mine"


def test_an_empty_directory_and_ones_own_are_filled(tmp_path: Path) -> None:
    one, two, into = commit(f"{tmp_path}/a", "1"), commit(f"{tmp_path}/b", "2"), tmp_path / "into"
    into.mkdir()
    for ref, text in ((one, "1"), (two, "2"), (f"{one}#x", "1")):
        fetch_artifact(ref, into)
        assert (into / "x").read_text() == text
    (into / "x").write_text("not looked at again")
    fetch_artifact(f"{one}#x", into)
    assert (into / "x").read_text() == "not looked at again"


def test_an_attempt_that_ended_at_its_worst_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is the directory taken for somebody else's, nor for what it held before."""
    one, two, into = commit(f"{tmp_path}/a", "1"), commit(f"{tmp_path}/b", "2"), tmp_path / "into"
    fetch_artifact(one, into)
    real = os.rename

    def rename_and_die(*names: str) -> None:
        real(*names)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", rename_and_die)
        fetch_artifact(two, into)
    for ref, text in ((one, "1"), (two, "2")):
        fetch_artifact(ref, into)
        assert (into / "x").read_text() == text
