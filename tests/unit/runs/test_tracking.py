import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from tests.objects import serve_bucket
from tests.unit import toy
from tests.unit.runs.test_delivery import pulled, rollout
from tests.unit.weights.test_publication import chain
from tests.waiting import LIMIT_S, free_port
from tuneloop import trackers
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.runs import run_record, tracking
from tuneloop.runs.delivery import NUMBERS
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.trackers import mlflow

pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def here(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "TUNELOOP_TRACKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def started(store: Path, name: str, iterations: int) -> Run:
    config = {"seed": 0, "loop": {"iterations": iterations, "none": None}}
    run = run_record.Run.create(
        Record(run=name, pipeline="toy", path="toy.py", config=config, store=f"file://{store}"), ""
    )
    toy.make(f"{store}/{name}", iterations)
    run.refresh()
    return run


def mirrored(client: Any, run: Run, experiment: str = "toy") -> Any:
    key = run.record.id if run.record else xxhash.xxh3_128_hexdigest(run.url.encode())
    at = client.get_experiment_by_name(experiment).experiment_id
    [mirror] = client.search_runs([at], f"tags.tuneloop_key = '{key}'")
    return mirror


def test_a_run_its_iterations_and_every_point_once(client: Any, uri: str, tmp_path: Path) -> None:
    run = started(tmp_path, "a", 2)
    said = tracking.mirror_run(run)
    assert (
        said
        == f"curves: run a of experiment toy in {uri}; `mlflow ui --backend-store-uri {uri}` shows them"
    )
    mirror = mirrored(client, run)
    assert mirror.data.params == {"seed": "0", "loop.iterations": "2", "loop.none": "None"}

    toy.make(
        f"{tmp_path}/a", 3, whole=False
    )  # the run goes on, as a resume would: what stands is found, iteration 3 is new
    tracking.mirror_run(run)
    tracking.mirror_run(Run.open("a", str(tmp_path)))

    mirror = mirrored(client, run)
    assert len(client.search_runs([mirror.info.experiment_id])) == 1
    history = client.get_metric_history(mirror.info.run_id, "policy_update/kl")
    assert [(m.step, m.value) for m in history] == [
        (1, 0.01),
        (2, 0.02),
        (3, 0.01),
        (4, 0.02),
        (5, 0.01),
        (6, 0.02),
    ]
    rewards = client.get_metric_history(mirror.info.run_id, "reward/mean_reward")
    assert [(m.step, m.value) for m in rewards] == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert [m.step for m in client.get_metric_history(mirror.info.run_id, "seconds/rollout")] == [
        1,
        2,
        3,
    ]
    assert "temperature 1, training prompts" in mirror.data.tags["mlflow.note.content"]


def test_a_mirror_that_follows_sends_what_is_new_once(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path, "new", 3)
    sent: list[Any] = []
    log = mlflow.Tracker.log_rows
    monkeypatch.setattr(
        mlflow.Tracker, "log_rows", lambda self, rows: (sent.append(rows), log(self, rows))[1]
    )

    def go_on() -> bool:
        if len(sent) == 2:
            toy.make(f"{tmp_path}/new", 4, whole=False)
        return len(sent) < 3

    tracking.mirror_run(run, "mlflow", go_on)
    first, nothing, new, last = sent
    assert first and not nothing and not last
    assert sorted(
        name for row in new.values() for name in row if name.startswith("policy_update/")
    ) == sorted(
        f"policy_update/{name}"
        for name in ("entropy", "entropy", "kl", "kl", "loss", "loss", "version")
    )
    mirror = mirrored(client, run)
    history = client.get_metric_history(mirror.info.run_id, "policy_update/kl")
    assert [m.step for m in history] == list(range(1, 9)), "each optimizer step once, counted on"
    rewards = client.get_metric_history(mirror.info.run_id, "reward/mean_reward")
    assert [m.step for m in rewards] == [1, 2, 3, 4]


def test_all_runs_of_a_store_are_mirrored_as_they_come_and_end(
    client: Any, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a cluster, of which there is no record here; a tracker that is away is tried again."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "fleet")
    monkeypatch.setenv("no_proxy", "*")
    for name in ("POLL_S", "RETRY_S"):
        monkeypatch.setattr(tracking, name, 0.0)
    store, asked = tmp_path / "store", {"argo": "running"}
    for name in ("argo", "kfp"):
        toy.make(f"{store}/{name}", 1, whole=False)
    failure = dump_checked_json({"message": "no memory", "time": time.time() + 1e6}, "failure.json")

    def read_state() -> dict[str, tuple[str, list[int]]]:
        if not (made := client.get_experiment_by_name("fleet")):
            return {}
        found = client.search_runs([made.experiment_id])
        told = {each.data.tags["tuneloop.run"]: each.info for each in found}
        assert len(told) == len(found), "once each"
        history = {
            n: client.get_metric_history(i.run_id, "reward/mean_reward") for n, i in told.items()
        }
        return {name: (told[name].status, [m.step for m in history[name]]) for name in told}

    def follow() -> Iterator[bool]:
        def wait(**wanted: tuple[str, list[int]]) -> Iterator[bool]:
            end = time.monotonic() + LIMIT_S
            while (state := read_state()) != wanted:
                assert time.monotonic() < end, state
                yield True

        yield from wait(argo=("RUNNING", [1]), kfp=("RUNNING", [1]))
        toy.make(f"{store}/argo", 2)
        yield from wait(
            argo=("RUNNING", [1, 2]), kfp=("RUNNING", [1])
        )  # the cluster knows that it goes on
        asked["argo"] = "succeeded"
        Store(f"{store}/kfp").put("rollout/failure.json", failure)
        yield from wait(argo=("FINISHED", [1, 2]), kfp=("FAILED", [1]))
        Store(f"{store}/kfp").delete("rollout/failure.json")
        toy.make(f"{store}/kfp", 3)  # it is run again, to its end
        toy.make(f"{store}/new", 1)
        yield from wait(
            argo=("FINISHED", [1, 2]), kfp=("FINISHED", [1, 2, 3]), new=("FINISHED", [1])
        )
        yield False

    away = f"mlflow+http://127.0.0.1:{free_port()}"
    looks = follow()
    tracking.mirror_store(
        str(store),
        [away, "mlflow"],
        lambda: next(looks),
        ask_phase=lambda name: asked.get(name, ""),
    )
    shutil.rmtree(store / "new")
    monkeypatch.setattr(tracking, "IDLE_S", 0.0)
    toy.make(f"{store}/old", 1)
    looks = iter([True, False])
    tracking.mirror_store(str(store), ["mlflow"], lambda: next(looks))
    assert "old" not in read_state(), "what has committed nothing for long is left alone"


def test_a_store_that_is_away_and_back_again_is_said_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Away as a whole, then for what is in its runs alone, of which there are two in two trackers."""
    monkeypatch.setattr("tuneloop.core.store.build_retries", lambda: {"max_retries": 0})
    for name in ("one", "two"):
        toy.make(f"{tmp_path}/store/{name}", 1, whole=False)
    files = {
        str(path.relative_to(tmp_path / "store")): path for path in (tmp_path / "store").rglob("*")
    }
    objects = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    faults, said, now = (
        [None, "all", "all", "runs", "runs", None, None],
        list[list[str]](),
        time.time(),
    )
    monkeypatch.setattr(
        tracking, "time", SimpleNamespace(time=lambda: now + 3600 * len(said))
    )  # all are due

    def look() -> Iterator[bool]:
        for _ in faults:
            yield True
            said.append(capsys.readouterr().err.splitlines())
        yield False

    def refuse(place: str) -> bool:
        return faults[len(said)] == "all" or (faults[len(said)] == "runs" and place != "")

    looks = look()
    with serve_bucket(objects, monkeypatch, refuse=refuse):
        tracking.mirror_store(
            "s3://bucket", [f"tensorboard+{tmp_path}/{n}" for n in "ab"], lambda: next(looks)
        )
    assert [len(lines) for lines in said] == [0, 1, 0, 0, 0, 1, 0], said
    assert said[5] == ["s3://bucket: answers again"]


def test_folders_that_are_no_runs_are_listed_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 499 looks, each two seconds after the one before."""
    now, places = [0.0], Counter[str]()
    monkeypatch.setattr(tracking, "time", SimpleNamespace(time=lambda: now[0]))

    def look() -> bool:
        now[0] += 2.0
        return now[0] < 1000

    objects = {
        "data/rows/a.parquet": b"",
        "sessions/team/x/manifest.json": b"{}",
        "models/x/y": b"",
        "Data/a": b"",
        "pins/x/y": b"",
    }
    with serve_bucket(
        objects, monkeypatch, refuse=lambda place: bool(places.update([place.partition("/")[0]]))
    ):
        tracking.mirror_store("s3://bucket", [f"tensorboard+{tmp_path}/logs"], look)
    assert places.keys() == {"", "data", "models", "pins"} and places[""] == 499, (
        "a gateway's sessions are no runs"
    )
    assert max(places[name] for name in ("data", "models", "pins")) < 400


def test_a_run_is_named_or_all_are_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["track"]) == 2
    assert (
        capsys.readouterr().err
        == "error: RUN: None: name one, or let it --follow all runs of the store\n"
    )


def test_the_command_follows_a_run_of_a_store_to_its_end_and_attaches_a_report(
    client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    monkeypatch.setattr(tracking, "POLL_S", 0.0)
    toy.make(f"{tmp_path}/e", 1)
    assert run_cli(["track", "e", "--store", str(tmp_path), "--follow"]) == 0
    assert "run e of experiment" in capsys.readouterr().out
    found = mirrored(client, Run.open("e", str(tmp_path)), "elsewhere")
    assert found.info.status == "FINISHED"
    report = client.download_artifacts(found.info.run_id, "report.html", str(tmp_path))
    assert "mean reward 0.500" in Path(report).read_text()


def test_another_run_of_the_same_name_is_another(client: Any, tmp_path: Path) -> None:
    one, two = (started(tmp_path / place, "same", 1) for place in "xy")
    tracking.mirror_run(one)
    tracking.mirror_run(two)
    assert mirrored(client, one).info.run_id != mirrored(client, two).info.run_id


def test_what_mlflow_refuses_is_said_in_one_line(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.delete_experiment(client.create_experiment("gone"))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "gone")
    with pytest.raises(UserError, match=r"^mlflow: .*'active' state"):
        tracking.mirror_run(started(tmp_path, "b", 1))


@pytest.mark.local
def test_a_follower_mirrors_what_is_committed_while_it_runs_and_ends_with_its_reader(
    client: Any, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "LONGEST_WAIT_S", 3600.0)
    toy.make(f"{tmp_path}/f", 1, whole=False)
    run = run_record.Run.create(
        Record(run="f", pipeline="toy", path="", config={}, store=f"file://{tmp_path}"), ""
    )
    with tracking.mirror_in_background(run) as told:
        toy.make(f"{tmp_path}/f", 2)
        (run.directory / "report.html").write_text("as `tuneloop run` leaves it")
    assert told == {
        "mlflow": f"curves: run f of experiment toy in {uri}; "
        f"`mlflow ui --backend-store-uri {uri}` shows them"
    }
    seconds = client.get_metric_history(mirrored(client, run).info.run_id, "seconds/rollout")
    assert [m.step for m in seconds] == [1, 2]
    report = client.download_artifacts(
        mirrored(client, run).info.run_id, "report.html", str(tmp_path)
    )
    assert Path(report).read_text() == "as `tuneloop run` leaves it"


def test_without_mlflow_a_run_is_mirrored_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tracking, trackers):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    run = started(tmp_path, "c", 1)
    with tracking.mirror_in_background(run) as told:
        pass
    assert told == {}
    with pytest.raises(
        UserError, match=r"^tracker: 'mlflow': is not installed; install tuneloop\[mlflow\]$"
    ):
        tracking.mirror_run(run)
    monkeypatch.setenv("TUNELOOP_TRACKERS", "mlflow")
    with pytest.raises(UserError, match="is not installed"), tracking.mirror_in_background(run):
        pass


def test_what_a_version_took_are_metrics(client: Any, tmp_path: Path) -> None:
    """Over versions, which the x of no other curve is."""
    policy = chain(tmp_path / "w", 2, weights=f"{tmp_path}/w/weights")[1]
    rollout(
        out=f"{tmp_path}/w/iterations/1/rollout",
        policy=policy.ref,
        notes={"pulled": pulled(1, 0.0)},
    )
    run = Run.open("w", str(tmp_path))
    tracking.mirror_run(run)
    metrics = mirrored(client, run, "tuneloop").data.metrics
    assert {
        name.removeprefix("weights/") for name in metrics if name.startswith("weights/")
    } == set(NUMBERS)
    (point,) = client.get_metric_history(
        mirrored(client, run, "tuneloop").info.run_id, "weights/pause_s"
    )
    assert (point.step, point.value) == (1, 0.125)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A server that takes connections once it listens, and never answers; its address has a password."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            "MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        )
        monkeypatch.setenv("no_proxy", "*")
        yield server


@pytest.mark.parametrize("listens", [False, True])
def test_a_server_that_does_not_answer_is_said_at_once_and_ends_no_run(
    listens: bool,
    silent: socket.socket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mlflow, "ANSWER_S", 0.2 if listens else 60.0)
    if listens:
        silent.listen()
    why = "timed out" if listens else "Connection refused"
    run = started(tmp_path, "away", 1)
    with tracking.mirror_in_background(run) as told:
        line = capsys.readouterr().err
        assert (
            line.startswith("mlflow: http://127.0.0.1:")
            and why in line
            and "the run goes on without it" in line
        )
    assert told["mlflow"].startswith("not mirrored: ") and "`tuneloop track away`" in told["mlflow"]
    with pytest.raises(
        UserError, match=rf"127\.0\.0\.1:\d+ does not answer \(.*{why}\)"
    ) as refused:
        tracking.mirror_run(run)
    assert "secret" not in f"{line}{told}{refused.value}"
    assert not (run.directory / "mlflow.log").exists(), "no process was started for it"


class Health(BaseHTTPRequestHandler):
    """Says that it is well, and does nothing; `asked` counts who wanted to know."""

    asked = threading.Semaphore(0)

    def do_GET(self) -> None:
        if self.path != "/health":
            threading.Event().wait()
        self.send_response(200)
        self.end_headers()
        self.asked.release()


def test_a_server_that_went_away_meanwhile_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's own client would go on asking for minutes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(tracking, "LONGEST_WAIT_S", 3600.0)
    monkeypatch.setattr(mlflow, "ANSWER_S", 60.0)
    run = started(tmp_path, "gone", 1)
    with tracking.mirror_in_background(run) as told:
        for _ in range(2):  # the process that follows the run has also found it well
            assert Health.asked.acquire(timeout=LIMIT_S)
        server.shutdown()
        server.server_close()
        assert (run.directory / "mlflow.log").exists()
        monkeypatch.setattr(tracking, "SILENT_WAIT_S", 0.2)
        monkeypatch.setattr(mlflow, "ANSWER_S", 0.2)
    assert "does not answer" in capsys.readouterr().err
    assert told["mlflow"].startswith("not mirrored whole: ")
