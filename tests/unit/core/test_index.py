"""The index of a run: whatever happens to it, what is read is what lies in the store."""

import json
import threading
from pathlib import Path

import pytest

from benchmarks.run_index import write_run
from tests.objects import serve_bucket
from tests.unit import toy
from tuneloop.core.artifacts import dump_checked_json, parse_manifest
from tuneloop.core.errors import Corrupt
from tuneloop.core.index import FEW, KEY, Index
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Run

LONG = FEW // 3 + 10
"""Iterations of three artifacts: more than are read one by one."""
FILES = 5 + 3 * LONG + 1 + 3 * LONG
"""Manifests, and rows of metrics of all but the five artifacts outside the loop, of which the reports read one's."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run that was read once, and so is indexed."""
    place = tmp_path_factory.mktemp("indexed")
    write_run(f"file://{place}/run", LONG)
    read(place)
    return place


def read(place: Path) -> tuple[object, ...]:
    """All that readers take from a run."""
    run = Run("run", str(place))
    return run.entries, run.curves(), run.evaluations(), run.training_rewards(), run.checkpoints


def test_a_long_run_is_indexed_and_a_short_one_is_not(written: Path, tmp_path: Path) -> None:
    index = Index(Store(f"{written}/run"))
    assert {key.rpartition("/")[2] for key in index.files} == {"manifest.json", "metrics.jsonl"}
    assert len(index.files) == FILES
    toy.make(f"{tmp_path}/run", 1)
    read(tmp_path)
    assert not (tmp_path / "run" / KEY).exists()


def damage(index: Path, how: str) -> None:
    data = bytearray(index.read_bytes())
    if how == "lost":
        index.unlink()
    elif how == "empty":
        index.write_bytes(b"")
    elif how == "cut":
        index.write_bytes(data[: len(data) // 2])
    elif how == "a bad byte":
        data[len(data) // 3] ^= 1
        index.write_bytes(data)
    elif how == "another digest":
        data[3] ^= 1
        index.write_bytes(data)


@pytest.mark.parametrize("how", ["whole", "lost", "empty", "cut", "a bad byte", "another digest"])
def test_a_run_reads_the_same_whatever_became_of_its_index(
    written: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    index = written / "run" / KEY
    index.unlink(missing_ok=True)
    without = read(written)
    assert read(written) == without, "with an index"
    capsys.readouterr()
    damage(index, how)
    assert read(written) == without
    said = capsys.readouterr().err.splitlines()
    expected = [f"file://{index}: is damaged; it is made again from the manifests"]
    assert said == (expected if how in ("empty", "cut", "a bad byte", "another digest") else [])
    assert read(written) == without and not capsys.readouterr().err, "it was made again"


def test_two_readers_that_write_at_once_leave_a_whole_index(written: Path) -> None:
    (written / "run" / KEY).unlink(missing_ok=True)
    found: list[object] = []
    readers = [threading.Thread(target=lambda: found.append(read(written))) for _ in range(4)]
    for each in readers:
        each.start()
    for each in readers:
        each.join()
    assert len(found) == 4 and all(each == found[0] for each in found)
    assert len(Index(Store(f"{written}/run")).files) == FILES


def test_what_was_written_again_is_read_again_and_what_is_gone_is_gone(tmp_path: Path) -> None:
    write_run(f"file://{tmp_path}/run", LONG)
    read(tmp_path)
    first = tmp_path / "run" / "iterations" / "1"
    manifest = first / "reward" / "manifest.json"
    found = parse_manifest("reward", manifest.read_bytes()).model_copy(
        update={"results": {"mean_reward": 1.5}}
    )
    told = json.loads(found.model_copy(update={"digest": found.compute_digest()}).model_dump_json())
    manifest.write_bytes(dump_checked_json(told, manifest.name))
    (first / "rollout" / "manifest.json").unlink()
    entries = {entry.key: entry for entry in Run("run", str(tmp_path)).entries}
    assert entries["iterations/1/reward"].manifest.results["mean_reward"] > 1
    assert "iterations/1/rollout" not in entries and len(entries) == 4 + 3 * LONG


def test_rows_that_differ_from_their_manifest_are_refused_and_never_kept(tmp_path: Path) -> None:
    write_run(f"file://{tmp_path}/run", LONG)
    [rows] = (tmp_path / "run" / "iterations" / "2" / "policy-update").glob("data-*/metrics.jsonl")
    good = rows.read_bytes()
    rows.write_bytes(good.replace(b"0", b"1"))
    with pytest.raises(Corrupt, match=r"policy-update/.*metrics\.jsonl"):
        read(tmp_path)
    rows.write_bytes(good)
    assert read(tmp_path)


def test_who_may_not_write_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(f"file://{tmp_path}/run", LONG)
    expected = read(tmp_path)
    (tmp_path / "run" / KEY).unlink()
    (tmp_path / "run" / KEY).mkdir()  # also root cannot write there
    assert read(tmp_path) == expected


def test_of_an_object_store_only_what_is_new_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(f"file://{tmp_path}/run", LONG + 2)
    files = {
        str(path.relative_to(tmp_path)): path
        for path in sorted(tmp_path.rglob("*"))
        if path.is_file()
    }
    newest = tuple(f"run/iterations/{number}/" for number in (LONG + 1, LONG + 2))
    objects = {key: path.read_bytes() for key, path in files.items() if not key.startswith(newest)}
    with serve_bucket(objects, monkeypatch) as asked:
        Run("run", "s3://bucket").curves()
        assert "run/index.zst" in objects
        asked.clear()
        run = Run("run", "s3://bucket")
        run.curves()
        # Top, `iterations`, the five stages outside, the two newest iterations; the index, and the two
        # evaluations' metrics, which were read behind the trainers', when it was written.
        assert asked == {"LIST": 9, "GET": 3} and len(run.entries) == 5 + 3 * LONG
        objects |= {key: path.read_bytes() for key, path in files.items() if key.startswith(newest)}
        asked.clear()
        run.refresh()
        assert asked == {"LIST": 11, "GET": 6} and len(run.entries) == 5 + 3 * (LONG + 2)
        assert [entry.manifest for entry in run.entries] == [
            e.manifest for e in Run("run", str(tmp_path)).entries
        ]
        for key in [key for key in objects if key.startswith("run/iterations/1/reward")]:
            del objects[key]
        again = Run("run", "s3://bucket")
        assert len(again.entries) == len(run.entries), "it is settled: the index has it"
        again.refresh(all_iterations=True)
        assert len(again.entries) == len(run.entries) - 1
        assert len(Run("run", "s3://bucket").entries) == len(run.entries) - 1, (
            "who looks at all mends the index"
        )
