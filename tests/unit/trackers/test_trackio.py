"""What of Trackio is its own: ids of runs and rows, times, tables, two directories, and no word to anybody."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tests.unit.runs.test_tracking import started
from tests.unit.trackers.test_trackers import check, here, read_trackio  # noqa: F401
from tuneloop.core.errors import UserError
from tuneloop.runs import tracking
from tuneloop.runs.run_record import Run

pytest.importorskip("trackio")


def read_log(place: Path, run: Run) -> list[dict[str, Any]]:
    """The rows of the run that has this key, with Trackio's own storage."""
    from trackio import sqlite_storage

    assert run.record
    sqlite_storage.TRACKIO_DIR = place
    return list(sqlite_storage.SQLiteStorage.get_logs("toy", run_id=run.record.id))


def test_rows_have_the_times_of_the_artifacts_and_samples_are_tables(tmp_path: Path) -> None:
    from trackio import Table
    from trackio.sqlite_storage import SQLiteStorage

    run, place = started(tmp_path, "mine", 2), tmp_path / "there"
    at = tracking.mirror_run(run, f"trackio+{place}")
    assert at == f"{place}, project toy; `TRACKIO_DIR={place} trackio show` shows it"
    rows = read_log(place, run)
    (scored,) = (entry for entry in run.entries if entry.key == "iterations/2/reward")
    (row,) = (row for row in rows if row["step"] == 2 and "reward/mean_reward" in row)
    assert row["timestamp"] == datetime.fromtimestamp(scored.finished, UTC).isoformat()
    tables = {
        (name, row["step"]): row[name]
        for row in rows
        for name in row
        if name.startswith("samples/")
    }
    assert tables.keys() == {
        ("samples/evaluate-before", 0),
        ("samples/evaluate-after", 0),
        ("samples/reward", 1),
    }
    assert {table["_type"] for table in tables.values()} == {Table.TYPE}
    shown = tables["samples/evaluate-after", 0]["_value"]
    assert [*shown[0].items()][:3] == [
        ("id", "p0"),
        ("prompt", "reverse 0<b>"),
        ("completion", "right"),
    ]
    assert [*shown[0]][3:] == ["answer", "score", "outcome"] and len(
        tables["samples/reward", 1]["_value"]
    ) == 4
    assert SQLiteStorage.get_run_config("toy", "mine") == {
        "seed": 0,
        "loop.iterations": 2,
        "loop.none": None,
    }


@pytest.mark.parametrize("call", ["init_db", "delete_run", "bulk_log"])
def test_a_mirror_that_was_killed_before_any_of_its_calls_is_continued(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    run, place = started(tmp_path, "mine", 1), tmp_path / "there"
    for mirrored in (False, True):
        with monkeypatch.context() as faulty:
            faulty.setattr(SQLiteStorage, call, die)
            with pytest.raises(KeyboardInterrupt):
                tracking.mirror_run(run, f"trackio+{place}")
        if not mirrored:
            tracking.mirror_run(run, f"trackio+{place}")
            check(read_trackio(place), 1)
    toy.make(f"{tmp_path}/mine", 2, whole=False)
    tracking.mirror_run(Run.open("mine", str(tmp_path)), f"trackio+{place}")
    check(read_trackio(place), 2)


def test_two_mirrors_at_a_time_make_one_run(tmp_path: Path) -> None:
    """The later one deletes what the earlier one wrote, which goes on; then both write what is new."""
    run, chosen = started(tmp_path, "mine", 1), f"trackio+{tmp_path}/there"

    def mirror_again() -> bool:
        toy.make(f"{tmp_path}/mine", 2, whole=False)
        tracking.mirror_run(Run.open("mine", str(tmp_path)), chosen)
        return True

    looks = iter([lambda: True, mirror_again, lambda: False])
    tracking.mirror_run(run, chosen, lambda: next(looks)())
    check(read_trackio(tmp_path / "there"), 2)


def test_a_run_of_the_same_name_keeps_its_rows(tmp_path: Path) -> None:
    """Another run, and one that a user of Trackio logged."""
    from trackio.sqlite_storage import SQLiteStorage

    place, runs = tmp_path / "there", [started(tmp_path / store, "mine", 1) for store in ("a", "b")]
    tracking.mirror_run(runs[0], f"trackio+{place}")
    SQLiteStorage.bulk_log("toy", "mine", [{"own": 1.0}], run_id="0" * 32)
    before = len(read_log(place, runs[0]))
    for _ in range(2):
        tracking.mirror_run(runs[1], f"trackio+{place}")
    assert len(read_log(place, runs[0])) == len(read_log(place, runs[1])) == before > 0
    assert read_trackio(place)["own"] == [(0, 1.0)]


def test_one_process_mirrors_into_two_directories_at_once(tmp_path: Path) -> None:
    run, places = started(tmp_path, "mine", 1), [tmp_path / "a", tmp_path / "b"]
    mirrors = [tracking.Mirror(run, f"trackio+{place}") for place in places]
    for mirror, place in zip(mirrors, places):
        mirror.update()
        check(read_trackio(place), 1)


def test_what_a_run_committed_again_takes_the_place_of_what_it_had(tmp_path: Path) -> None:
    run, place = started(tmp_path, "mine", 2), tmp_path / "there"
    tracking.mirror_run(run, f"trackio+{place}")
    shutil.rmtree(tmp_path / "mine" / "iterations" / "2")
    toy.make(f"{tmp_path}/mine", 2, whole=False)
    again = Run.open("mine", str(tmp_path))
    assert again.entries[-1].finished > max(entry.finished for entry in run.entries)
    tracking.mirror_run(again, f"trackio+{place}")
    check(read_trackio(place), 2)


def test_a_mirror_talks_to_nobody_though_the_environment_names_a_space_a_bucket_and_a_token(
    tmp_path: Path,
) -> None:
    """Any address that is looked up or connected to ends the process; ``TRACKIO_DIR`` says where the mirror is."""
    code = """
import os, runpy, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.fork"):
        os.write(2, f"{event}: {args}".encode())
        os._exit(1)
sys.addaudithook(refuse)
runpy.run_module("tuneloop.runs.tracking", run_name="__main__", alter_sys=True)
"""
    run, place = started(tmp_path, "mine", 1), tmp_path / "elsewhere"
    named = {
        "TRACKIO_SPACE_ID": "someone/space",
        "TRACKIO_SERVER_URL": "http://127.0.0.1:1/?write_token=x",
    }
    named |= {"TRACKIO_BUCKET_ID": "someone/bucket", "HF_TOKEN": "hf_x", "TRACKIO_DIR": str(place)}
    command = [sys.executable, "-c", code, "mine", run.store_url, "trackio"]
    done = subprocess.run(
        command, env=os.environ | named, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{place}, project toy; `TRACKIO_DIR={place} trackio show` shows it\n"
    check(read_trackio(place), 1)


def test_a_file_that_is_none_of_trackio_is_one_line(tmp_path: Path) -> None:
    run, place = started(tmp_path, "mine", 1), tmp_path / "there"
    (place / "toy.db").write_text("in the way " * 100)
    with pytest.raises(UserError, match=rf"^trackio: '{place}': file is not a database$"):
        tracking.mirror_run(run, f"trackio+{place}")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=rf"^trackio: '{tmp_path}/file': .*(Not a directory|File exists)"
    ):
        tracking.mirror_run(run, f"trackio+{tmp_path}/file")


def test_a_file_of_an_earlier_release_keeps_its_runs(tmp_path: Path) -> None:
    """One without ids of runs, in which a run has the name of ours."""
    run, place = started(tmp_path, "mine", 1), tmp_path / "there"
    with sqlite3.connect(place / "toy.db") as old:
        columns = (
            "id INTEGER PRIMARY KEY, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT"
        )
        old.execute(f"CREATE TABLE metrics ({columns})")
        row = ("2025-09-01T00:00:00", "mine", 3, json.dumps({"old": 2.0}))
        old.execute(
            "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)", row
        )
    for _ in range(2):
        tracking.mirror_run(run, f"trackio+{place}")
    told = read_trackio(place)
    assert told.pop("old") == [(3, 2.0)]
    check(told, 1)
