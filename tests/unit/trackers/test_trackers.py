"""Each tracker by its own package: what a mirror wrote is read back, and compared with what the run has."""

import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tests.unit.runs.test_tracking import started
from tests.waiting import free_port, until
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.core.plugins import list_shipped_variants
from tuneloop.runs import tracking
from tuneloop.runs.run_record import Run
from tuneloop.stages.data_prep import data_prep
from tuneloop.trackers import find_tracker

ROOT = Path(__file__).parents[3]
NAMES = ("mlflow", "tensorboard", "trackio", "wandb")


@component("checkpoint", role="trainer", results={})
def train_on(stage: Stage, prompts: Input) -> Results:
    """Learn nothing."""
    (stage.out / "seen.json").write_text("{}")
    return {}


Told = dict[str, list[tuple[int, float]]]


def read_mlflow(place: Path) -> Told:
    """With MLflow's client."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    if not (experiment := client.get_experiment_by_name("toy")):
        return {}
    return {
        name: [
            (point.step, point.value)
            for point in client.get_metric_history(found.info.run_id, name)
        ]
        for found in client.search_runs([experiment.experiment_id])
        for name in found.data.metrics
    }


def read_tensorboard(place: Path) -> Told:
    """With TensorBoard's reader of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told: Told = {}
    for directory in place.glob("*/"):
        read = EventAccumulator(
            str(directory), size_guidance={"scalars": 0}, purge_orphaned_data=False
        ).Reload()
        for tag in read.Tags()["scalars"]:
            told.setdefault(tag, []).extend((each.step, each.value) for each in read.Scalars(tag))
    return told


def read_trackio(place: Path) -> Told:
    """With Trackio's own storage, which is one directory's at a time."""
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = place
    storage, told = sqlite_storage.SQLiteStorage, dict[str, list[tuple[int, float]]]()
    for found in storage.get_run_records("toy"):
        for row in storage.get_logs("toy", run_id=found["id"], scalar_only=True):
            for name in row.keys() - {"timestamp", "step"}:
                told.setdefault(name, []).append((row["step"], row[name]))
    return told


def read_rows(place: Path) -> Iterator[dict[str, Any]]:
    """The rows of every offline run: W&B's own messages, in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for log in place.glob("wandb/offline-run-*/*.wandb"):
        data, at, message = log.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # no header is cut by the end of a block
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack_from("<HB", data, at + 4)
            message, at = message + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, message = Record.FromString(message), b""
                if record.WhichOneof("record_type") == "history":
                    yield {
                        i.key or ".".join(i.nested_key): json.loads(i.value_json)
                        for i in record.history.item
                    }


def read_wandb(place: Path) -> Told:
    """Each curve over its own axis."""
    told: Told = {}
    for row in read_rows(place):
        (step,) = (row[axis] for axis in ("iteration", "optimizer_step", "version") if axis in row)
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float):
                told.setdefault(name, []).append((step, value))
    return told


READERS: dict[str, Callable[[Path], Told]] = {
    "mlflow": read_mlflow,
    "tensorboard": read_tensorboard,
    "trackio": read_trackio,
    "wandb": read_wandb,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'components'}:{ROOT}")
    for name in os.environ:
        if name.startswith(("MLFLOW_", "TRACKIO_", "WANDB_", "TUNELOOP_TRACKERS")):
            monkeypatch.delenv(name)


def choose(name: str, place: Path) -> str:
    """The tracker `name` at an address of its own."""
    return f"mlflow+sqlite:///{place}/mlflow.db" if name == "mlflow" else f"{name}+{place}"


def check(told: Told, iterations: int) -> None:
    """Compare with the toy run: every point once, at its step."""
    steps = range(1, iterations + 1)
    skills = [min(step, 3) for step in steps]  # of the policy that each batch is sampled with
    expected: dict[str, list[tuple[int, float]]] = {
        "sft/loss": [(step, 3.0 / step) for step in (1, 2, 3)],
        "policy_update/kl": [
            (step, (0.02, 0.01)[step % 2]) for step in range(1, 2 * iterations + 1)
        ],
        "reward/mean_reward": [(step, toy.SHARES[skill]) for step, skill in zip(steps, skills)],
        "rollout/mean_length": [(step, 8.0 - skill) for step, skill in zip(steps, skills)],
    }
    for name, points in expected.items():
        assert sorted(told[name]) == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in points
        ], name
    assert [step for step, _ in sorted(told["seconds/reward"])] == [*steps]
    every = Counter((name, step) for name, points in told.items() for step, _ in points)
    assert set(every.values()) == {1}, "once each"


def test_all_that_ship_are_tried_here() -> None:
    assert list_shipped_variants("trackers") == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_values_are_those_of_the_run_however_often_it_is_mirrored(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    run, chosen = started(tmp_path, "mine", 2), choose(name, tmp_path / "there")
    assert tracking.mirror_run(run, chosen)
    told = READERS[name](tmp_path / "there")
    check(told, 2)
    assert sorted(told["evaluate/mean_reward"]) == [(0, 0.5), (2, 1.0)]
    toy.make(f"{tmp_path}/mine", 4, whole=False)
    for _ in range(2):
        tracking.mirror_run(Run.open("mine", str(tmp_path)), chosen)
    check(READERS[name](tmp_path / "there"), 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_mirror_that_was_killed_is_continued(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    place, chosen = tmp_path / "there", choose(name, tmp_path / "there")
    run = started(tmp_path, "mine", 2)
    assert READERS[name](place) == {}  # MLflow makes its tables: two processes at a time cannot
    command = [sys.executable, "-m", "tuneloop.runs.tracking", "mine", run.store_url, chosen]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        if name == "wandb":  # which keeps what it has in memory until its block of 32 KiB is full
            until(lambda: [*place.glob("wandb/offline-run-*/*.wandb")], child=child)
        else:
            until(lambda: READERS[name](place).get("policy_update/kl"), child=child, pause=0.5)
        child.kill()
    if name == "tensorboard":  # it was killed inside a record
        (events,) = place.glob("*/events.*")
        events.write_bytes(events.read_bytes()[:-5])
    toy.make(f"{tmp_path}/mine", 3, whole=False)
    tracking.mirror_run(Run.open("mine", str(tmp_path)), chosen)
    check(READERS[name](place), 3)


def test_samples_are_tables(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    from mlflow import MlflowClient
    from mlflow.artifacts import load_dict

    run, place = started(tmp_path, "mine", 2), tmp_path / "there"
    for name in ("mlflow", "wandb", "mlflow"):
        tracking.mirror_run(run, choose(name, place))
    columns = ["id", "prompt", "completion", "answer", "score", "outcome"]
    (at,) = (row[key] for row in read_rows(place) if (key := "samples/evaluate-after.path") in row)
    (file,) = place.glob(f"wandb/offline-run-*/files/{at}")
    kept = json.loads(file.read_text())
    assert kept["columns"] == columns and kept["data"][0][:3] == ["p0", "reverse 0<b>", "right"]
    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    files = {each.path for each in client.list_artifacts(found.info.run_id, "samples")}
    assert files == {
        f"samples/{name}.json"
        for name in ("evaluate-before-000000", "evaluate-after-000000", "reward-000001")
    }
    kept = load_dict(f"{found.info.artifact_uri}/samples/reward-000001.json")
    assert kept["columns"] == columns and len(kept["data"]) == 4


FAULTS = (
    "log_inputs",
    "create_logged_model",
    "finalize_logged_model",
    "log_outputs",
    "create_registered_model",
)
FAULTS += ("create_model_version", "log_text", "set_terminated")


@pytest.mark.parametrize("call", FAULTS)
def test_data_and_model_are_there_once_wherever_a_mirror_was_killed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its calls, in their order. MLflow's client reads them: by reference, with the files of the run."""
    pytest.importorskip("mlflow")
    import mlflow
    from mlflow import MlflowClient

    run, place = started(tmp_path, "mine", 1), tmp_path / "there"
    made = data_prep(out=f"{run.url}/data-prep", source="digits", train=4, eval=2, sft=2)

    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as faulty:
        faulty.setattr(MlflowClient, call, die)
        with pytest.raises(KeyboardInterrupt):
            tracking.mirror_run(run, choose("mlflow", place), render=lambda _: "<p>Ours.")
    for _ in range(2):
        tracking.mirror_run(
            Run.open("mine", str(tmp_path)), choose("mlflow", place), render=lambda _: "<p>Ours."
        )

    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    (given,) = found.inputs.dataset_inputs
    assert (
        made.digest.startswith(f"sha256:{given.dataset.digest}") and len(given.dataset.digest) == 36
    )
    assert json.loads(given.dataset.profile)["source"] == "digits"
    assert {tag.key: tag.value for tag in given.tags} == {
        "mlflow.data.context": "training",
        "tuneloop.artifact": f"{run.url}/data-prep@{made.digest}",
        "tuneloop.run": "mine",
    }
    files = {path.name for path in Path(mlflow.data.get_source(given).load()).iterdir()}
    assert files == {"train.parquet", "eval.parquet", "sft.parquet"}

    (export,) = (entry for entry in run.entries if entry.stage == "export")
    (version,) = client.search_model_versions("name = 'toy'")
    about = {
        "artifact": f"{run.url}/export@{export.manifest.digest}",
        "run": "mine",
        "version": "2",
    }
    about |= {"policy": export.manifest.inputs["policy"]}
    assert version.tags == {f"tuneloop.{name}": value for name, value in about.items()}
    assert (version.run_id, version.source) == (
        found.info.run_id,
        f"{run.url}/export/{export.manifest.root}",
    )
    mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
    model = Path(mlflow.artifacts.download_artifacts("models:/toy/1"))
    assert json.loads((model / "weights.json").read_text()) == {"skill": 2}
    (output,) = found.outputs.model_outputs
    (logged,) = client.search_logged_models([found.info.experiment_id])
    assert (output.model_id, logged.source_run_id, logged.status) == (
        logged.model_id,
        found.info.run_id,
        "READY",
    )
    assert version.tags.items() <= logged.tags.items()
    report = client.download_artifacts(found.info.run_id, "report.html", str(tmp_path))
    assert Path(report).read_text() == "<p>Ours."


def test_a_fork_has_the_data_of_the_run_that_it_left(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    made, place = (
        data_prep(out=f"{tmp_path}/mine/data-prep", source="digits", train=4, eval=2, sft=2),
        tmp_path / "there",
    )
    ref = f"{tmp_path}/mine/data-prep@{made.digest}"
    for i in (1, 2):
        train_on(out=f"{tmp_path}/fork/iterations/{i}/train-on", prompts=ref)
    tracking.mirror_run(Run.open("fork", str(tmp_path)), choose("mlflow", place))
    client = MlflowClient(f"sqlite:///{place}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("tuneloop").experiment_id])
    (given,) = found.inputs.dataset_inputs
    assert {tag.key: tag.value for tag in given.tags}["tuneloop.artifact"] == f"file://{ref}"


def test_where_mlflow_keeps_no_files_the_curves_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    place = tmp_path / "there"
    MlflowClient(f"sqlite:///{place}/mlflow.db").create_experiment(
        "toy", artifact_location="/proc/nowhere"
    )
    tracking.mirror_run(started(tmp_path, "mine", 2), choose("mlflow", place))
    check(read_mlflow(place), 2)
    assert "mlflow: samples/reward-000001.json: " in capsys.readouterr().err


@pytest.mark.local
def test_trackers_that_are_away_or_fail_hold_up_neither_the_run_nor_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "tensorboard", "wandb"):
        pytest.importorskip(name)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(tracking, "LONGEST_WAIT_S", 3600.0)
    away, broken, well = (
        f"mlflow+http://127.0.0.1:{free_port()}",
        f"wandb+{tmp_path}/file",
        "tensorboard",
    )
    monkeypatch.setenv("TUNELOOP_TRACKERS", f"{away} {broken} {well}")
    monkeypatch.setenv("no_proxy", "*")
    run = started(tmp_path, "mine", 1)
    capsys.readouterr()
    with tracking.mirror_in_background(run) as told:
        (line,) = capsys.readouterr().err.splitlines()
        toy.make(f"{tmp_path}/mine", 2, whole=False)
    assert re.fullmatch(
        r"mlflow: http://\S+ does not answer \(.*Connection refused\): the run goes on without it",
        line,
    )
    assert told["mlflow"].startswith("not mirrored: http://127.0.0.1:")
    assert told["wandb"].startswith("not mirrored whole: see ")
    assert "tuneloop.core.errors.UserError: wandb: " in (run.directory / "wandb.log").read_text()
    assert told["tensorboard"].startswith(f"{tmp_path}/there/tensorboard/mine-")
    check(read_tensorboard(tmp_path / "there" / "tensorboard"), 2)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=rf"^tensorboard: '{tmp_path}/file': .*(Not a directory|File exists)"
    ):
        tracking.mirror_run(started(tmp_path, "mine", 1), f"tensorboard+{tmp_path}/file")


def test_a_later_mirror_of_the_same_run_ends_the_earlier_one(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run, chosen = started(tmp_path, "mine", 1), choose("tensorboard", tmp_path / "there")

    def mirror_again() -> bool:
        tracking.mirror_run(Run.open("mine", str(tmp_path)), chosen)
        return True

    looks = iter([lambda: True, mirror_again])
    with pytest.raises(UserError, match="another mirror of this run has begun"):
        tracking.mirror_run(run, chosen, lambda: next(looks)())
    check(read_tensorboard(tmp_path / "there"), 1)


def test_what_is_no_tracker_or_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError,
        match=r"^trackers: 'nonsense': unknown; known: mlflow, tensorboard, trackio, wandb, or a dotted",
    ):
        find_tracker("nonsense+/tmp")
    # What W&B writes is a folder of its name, as one of Trackio's may be: of that alone Python would make a package.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "there")])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in ("trackio", "wandb"):
        (tmp_path / "there" / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(
            UserError, match=rf"^tracker: '{name}': is not installed; install tuneloop\[{name}\]$"
        ):
            find_tracker(name)


def test_a_mirror_imports_only_the_tracker_that_was_chosen(tmp_path: Path) -> None:
    installed = [name for name in NAMES if find_spec(name)]
    code = f"""
import sys
from tuneloop import trackers
from tuneloop.runs import tracking
for name in {installed}:
    trackers.find_tracker(name)
print({{*{installed}}} & {{*sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_tracker_in_the_docs_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/tracking.md").read_text()
    (shown,) = re.findall(r"^```python\n(# my_tracker\.py\n.*?)^```", text, re.M | re.S)
    (tmp_path / "my_tracker.py").write_text(shown)
    monkeypatch.syspath_prepend(tmp_path)
    at = tracking.mirror_run(started(tmp_path, "mine", 1), f"my_tracker:Tracker+{tmp_path}")
    assert at == f"{tmp_path}/mine.jsonl"
    rows = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [row["reward/mean_reward"] for row in rows if "reward/mean_reward" in row] == [0.5]


def test_a_tracker_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELOOP_TRACKERS", "wandb+here mlflow wandb+there")
    with pytest.raises(UserError, match="names wandb twice"):
        tracking.list_trackers()
