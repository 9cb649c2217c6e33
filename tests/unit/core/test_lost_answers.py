"""A store that answers with an error though it did as it was told, or refuses for a writer beside; and a loss of power.

Each is what `python -m tests.certify` found.
"""

import errno
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.certify.bucket import NAME, Plan, Served, serve
from tuneloop.core.artifacts import MANIFEST, Artifact, Draft
from tuneloop.core.component import Results, Stage, component
from tuneloop.core.errors import EXIT_RETRY, Unavailable
from tuneloop.core.store import Conflict, Store

AGAIN = {
    "max_retries": 3,
    "backoff": {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(seconds=1)},
}
URL = f"s3://{NAME}/a"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A bucket that is asked again at once, and three times."""
    monkeypatch.setattr("tuneloop.core.store.build_retries", lambda: AGAIN)
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with serve() as served:
        yield served


def draft() -> Draft:
    made = Draft(URL)
    (made.path / "x").write_text("x")
    return made


def test_an_artifact_stands_though_the_answer_to_its_manifest_was_lost(bucket: Served) -> None:
    """Asked again, the store has the manifest already: it is ours, and not that of a duplicate."""
    bucket.begin(Plan("error after", on="PUT if"))
    made = draft().commit(stage="test")
    assert bucket.end_plan()["met"] == f"PUT if a/{MANIFEST}"
    assert (Artifact(f"{URL}@{made.digest}").path / "x").read_text() == "x"


def test_a_manifest_refused_for_another_that_is_not_there_is_tried_again(
    bucket: Served, tmp_path: Path
) -> None:
    bucket.begin(Plan("conflict 409", length=20, on="PUT if"))
    with pytest.raises(Unavailable, match="a write beside ours"):
        draft().commit(stage="test")
    bucket.end_plan()
    draft().commit(stage="test")
    assert (Artifact(URL).path / "x").read_text() == "x"


@pytest.mark.parametrize("late", range(4))
def test_a_stage_that_stands_is_looked_up_once(bucket: Served, late: int) -> None:
    """Had it been found at first and not again, the stage would have been done anew, and at no place of its own."""

    @component("thing", results={})
    def write(stage: Stage) -> Results:
        """Write a file."""
        (stage.out / "x").write_text("x")
        return {}

    bucket.begin(Plan("stale read", late, on=f"GET a/{MANIFEST}"))
    assert write(out=URL).digest == write(out=URL).digest
    bucket.end_plan()
    assert (Artifact(URL).path / "x").read_text() == "x"


def test_a_swap_that_another_writer_got_in_the_way_of_is_a_conflict(bucket: Served) -> None:
    bucket.begin(Plan("conflict 409", at=1, length=20, on="PUT if"))
    store = Store(URL)
    store.create("key", b"1")
    with pytest.raises(Conflict):
        store.swap("key", b"1", b"2")
    bucket.end_plan()
    store.swap("key", b"1", b"2")
    assert store.get("key") == b"2"


@component("thing")
def unpublished(stage: Stage) -> Results:
    """Leave a resume point, and a state for later."""
    stage.save_resume(1, lambda path: (path / "x").write_text("x") and None)
    (stage.out / "x").write_text("x")
    stage.commit_later("state", lambda path: (path / "state").write_text("1") and None)
    return {}


def _be_away(stage: Stage, manifest: object) -> None:
    raise Unavailable("gone")


def test_a_stage_whose_store_goes_away_leaves_no_temporary_files(
    bucket: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.begin(Plan("error before", length=20, on=f"GET a/{MANIFEST}"))
    with pytest.raises(Unavailable):
        unpublished(out=URL)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tuneloop-")] == []
    bucket.begin(Plan("dead", length=20, on="PUT if a/resume"))
    with pytest.raises(Unavailable):
        unpublished(out=URL)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tuneloop-")] == []
    bucket.end_plan()
    monkeypatch.setattr(unpublished, "after", _be_away)
    with pytest.raises(Unavailable, match="gone"):
        unpublished(out=URL)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tuneloop-")] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_where_a_directory_is_made_is_no_mistake(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as a store that cannot be written, which ends a stage for good."""
    make = os.mkdir

    def refuse(path: str, *more: int) -> None:
        if "data-" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        make(path, *more)

    monkeypatch.setattr(os, "mkdir", refuse)
    words = ["--thing", str(tmp_path / "a")]
    assert local.run(words) == EXIT_RETRY
    monkeypatch.setattr(os, "mkdir", make)
    assert local.run(words) == 0


def test_names_are_durable_before_the_manifest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the files and of the directories between them and the artifact's own."""
    synced, linked = list[str](), list[list[str]]()
    sync, link = os.fsync, os.link
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd))[1]
    )
    monkeypatch.setattr(os, "link", lambda *paths: (linked.append([*synced]), link(*paths))[1])
    made = Draft(str(tmp_path / "a"), attempt="data-1")
    (made.path / "deep").mkdir()
    (made.path / "deep" / "x").write_text("x")
    made.commit(stage="test")
    assert {
        str(tmp_path / "a" / name) for name in ("", "data-1", "data-1/deep", "data-1/deep/x")
    } <= {*linked[0]}


@component("thing")
def local(stage: Stage) -> Results:
    """Write a file."""
    (stage.out / "x").write_text("x")
    return {}


def test_an_artifact_stands_whose_name_could_not_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files were deleted below a manifest that stood."""
    sync, place = os.fsync, tmp_path / "a"

    def refuse(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(place) and (place / MANIFEST).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(Unavailable, match="disk full"):
        local(out=str(place))
    monkeypatch.setattr(os, "fsync", sync)
    made = local(out=str(place))
    assert (Artifact(f"{place}@{made.digest}").path / "x").read_text() == "x"
