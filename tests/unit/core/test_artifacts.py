"""Commit, read, verify; every kind of damage is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.objects import served
from tuneloop.core.artifacts import (
    CHECKSUM,
    MANIFEST,
    Artifact,
    Draft,
    delete_draft,
    dump_checked_json,
    find_manifest,
    split_ref,
)
from tuneloop.core.errors import Corrupt, UserError


def commit(url: str, **files: str) -> str:
    draft = Draft(url)
    for name, text in files.items():
        (draft.path / name).write_text(text)
    draft.commit(stage="test")
    return Artifact(url).ref


def test_equal_bytes_have_equal_digests_wherever_they_lie(tmp_path: Path) -> None:
    one, two = commit(f"{tmp_path}/1", a="x", b="y"), commit(f"{tmp_path}/2", b="y", a="x")
    assert split_ref(one)[1] == split_ref(two)[1]
    assert split_ref(one)[1] != split_ref(commit(f"{tmp_path}/3", a="y", b="x"))[1]
    assert (Artifact(one).path / "a").read_text() == "x"


def test_nothing_without_a_manifest_is_read(tmp_path: Path) -> None:
    (Draft(f"{tmp_path}/a").path / "x").write_text("half")
    with pytest.raises(UserError, match=r"has no manifest.json; run the stage"):
        Artifact(f"{tmp_path}/a")


def test_the_second_commit_yields_to_the_first(tmp_path: Path) -> None:
    url = f"{tmp_path}/a"
    late, early = Draft(url), Draft(url)
    (late.path / "x").write_text("late")
    (early.path / "x").write_text("early")
    first = early.commit(stage="test")
    assert late.commit(stage="test") == first
    assert (Artifact(url).path / "x").read_text() == "early"
    assert len(list(tmp_path.glob("a/*"))) == 2, "the loser's files are gone"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    url = f"{tmp_path}/a"
    ref = commit(url, x="hello")
    victim = Artifact(ref).path / "x"
    match damage:
        case "flip":
            victim.write_bytes(b"hellp")
        case "truncate":
            victim.write_bytes(b"hell")
        case "remove":
            victim.unlink()
        case "manifest":
            (tmp_path / "a/manifest.json").write_text("{")
    with pytest.raises(Corrupt, match="restore it from a copy"):
        _ = Artifact(ref).path


def test_a_reference_to_other_bytes_is_refused(tmp_path: Path) -> None:
    url, other = f"{tmp_path}/a", f"{tmp_path}/b"
    commit(url, x="1")
    digest = split_ref(commit(other, x="2"))[1]
    with pytest.raises(Corrupt, match="was asked for"):
        Artifact(f"{url}@{digest}")


def test_a_part_is_proved_and_nothing_else_is_read(tmp_path: Path) -> None:
    draft = Draft(f"{tmp_path}/a")
    for name in ("model", "model-2", "trainer"):
        (draft.path / name).mkdir()
        (draft.path / name / "x").write_text(name)
    draft.commit(stage="test")
    ref = Artifact(f"{tmp_path}/a").ref
    for name in ("model-2", "trainer"):
        (draft.path / name / "x").write_text("damaged")
    artifact = Artifact(ref)
    assert (
        (artifact.part("model") / "x").read_text()
        == artifact.part("model/x").read_text()
        == "model"
    )
    for name in ("trainer", "trainer/x"):
        with pytest.raises(Corrupt, match=r"trainer/x': differs from its manifest"):
            artifact.part(name)
    with pytest.raises(UserError, match=r"a': holds no mod$"):
        artifact.part("mod")


def test_a_list_of_files_that_is_not_the_one_referred_to_is_refused(tmp_path: Path) -> None:
    """Else a part would be proved against whatever the manifest says now."""
    ref, other = commit(f"{tmp_path}/a", x="1"), commit(f"{tmp_path}/b", x="2")
    url = f"{tmp_path}/a"
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    manifest["files"] = json.loads((tmp_path / "b/manifest.json").read_text())["files"]
    manifest.pop(CHECKSUM)
    (tmp_path / "a/manifest.json").write_bytes(dump_checked_json(manifest, MANIFEST))
    for asked in (ref, url):
        with pytest.raises(
            Corrupt, match=f"it states {split_ref(other)[1]}, {split_ref(ref)[1]} was committed"
        ):
            Artifact(asked)
    manifest["digest"] = split_ref(other)[1]
    (tmp_path / "a/manifest.json").write_bytes(dump_checked_json(manifest, MANIFEST))
    with pytest.raises(
        Corrupt, match=f"holds {split_ref(other)[1]}, but {split_ref(ref)[1]} was asked for"
    ):
        Artifact(ref)
    assert Artifact(url).ref != ref


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    commit(f"{tmp_path}/a", x="1")
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest["files"]["x"]["size"] == 1
    assert find_manifest(f"{tmp_path}/nothing") is None


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "../../precious.txt"},
        {"name": "/{}/precious.txt"},
        {"name": "a//b"},
        {"root": ".."},
        {"digest": "../x"},
    ],
    ids=str,
)
def test_a_manifest_names_nothing_outside_its_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    """Whoever may write to a bucket must not write to the disks of those who read it."""
    (precious := tmp_path / "precious.txt").write_text("mine")
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "below" / "cache"))
    commit(f"{tmp_path}/a", x="theirs")
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    name = changed.get("name", "x").format(tmp_path)
    manifest |= {"files": {name: manifest["files"]["x"]}, **changed}
    manifest.pop(CHECKSUM)
    objects = {
        "b/a/manifest.json": dump_checked_json(manifest, MANIFEST),
        f"b/a/{manifest['root']}/x": b"theirs",
    }
    with (
        served(objects, monkeypatch),
        pytest.raises(Corrupt, match=r"manifest\.json.*is not a manifest \("),
    ):
        _ = Artifact("s3://b/a").path
    assert precious.read_text() == "mine" and sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        "precious.txt",
    ]


def test_what_could_not_be_fetched_leaves_nothing_half_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    commit(f"{tmp_path}/a", x="1", y="2")
    manifest = (tmp_path / "a/manifest.json").read_bytes()
    root = json.loads(manifest)["root"]
    objects = {"b/a/manifest.json": manifest, f"b/a/{root}/x": b"1"}
    with served(objects, monkeypatch):
        with pytest.raises(UserError, match=f"s3://b/a/{root}/y': is missing"):
            _ = Artifact("s3://b/a").path
        assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == ["x"]
        objects[f"b/a/{root}/y"] = b"2"
        assert sorted(p.read_text() for p in Artifact("s3://b/a").path.iterdir()) == ["1", "2"]


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(f"{tmp_path}/a", x="1")
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "a/manifest.json"))
    with served({"b/a/manifest.json": (tmp_path / "a/manifest.json").read_bytes()}, monkeypatch):
        with pytest.raises(
            UserError, match=r"^TUNELOOP_CACHE: '.*manifest\.json': File exists; name a directory"
        ):
            _ = Artifact("s3://b/a").path
        monkeypatch.setenv("TUNELOOP_CACHE", "/proc")  # which takes no files, whoever asks
        with pytest.raises(
            UserError,
            match=r"^TUNELOOP_CACHE: '/proc': No such file or directory; name a directory",
        ):
            _ = Artifact("s3://b/a").path


def test_the_drafts_of_one_attempt_lie_apart() -> None:
    """A resume point that is committed must not take the unfinished output with it."""
    output, resume = (
        Draft(f"s3://bucket/run/sft{below}", attempt="data-a") for below in ("", "/resume/00000020")
    )
    (output.path / "metrics.jsonl").touch()
    delete_draft(resume.path)
    assert (output.path / "metrics.jsonl").exists()
    delete_draft(output.path)


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"facts": {"version": "4"}}, "cannot be committed: facts.version cannot be '4'"),
        ({"facts": {"staleness": 1}}, "facts.staleness cannot be 1"),
        ({"provenance": {"packages": []}}, r"provenance.packages cannot be \[\]"),
        ({"results": {"loss": (1.0, 2.0)}}, r"results.loss cannot be \(1.0, 2.0\)"),
    ],
)
def test_what_no_reader_could_read_is_not_committed(
    tmp_path: Path, about: dict[str, Any], says: str
) -> None:
    draft = Draft(f"{tmp_path}/a")
    with pytest.raises(UserError, match=says):
        draft.commit(stage="test", **about)
    assert find_manifest(f"{tmp_path}/a") is None
    assert draft.commit(
        stage="test", facts={"version": None}, results={"loss": 1.0, "done": True, "how": None}
    )
    assert Artifact(f"{tmp_path}/a").manifest.facts == {"version": None}
