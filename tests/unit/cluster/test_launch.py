"""What a launcher does with a job that stands already, and with an API server that is away."""

import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cluster.api import Answering, connected, kubeconfig
from tuneloop.cluster import continue_run, reservations, schedule
from tuneloop.cluster.launch import launch_job
from tuneloop.cluster.run_workflows import find_workflows
from tuneloop.cluster.schedule import delete_schedule
from tuneloop.core.errors import Retryable, UserError
from tuneloop.kube.connection import IN_CLUSTER, Connection, retry_until_available

JOB = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tune"}, "spec": {}}


class Jobs(ThreadingHTTPServer):
    """As much of an API server as keeps one job, which is seen `looks` times before it ends.

    Attributes:
        ends: conditions that the jobs end with, in the order they are made.
        made: how many were.
        faults: so many looks are answered with 503 yet.
    """

    def __init__(self, *ends: str, looks: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ends, self.looks, self.made, self.faults = ends, looks, 0, 0
        self.job: dict[str, Any] | None = None
        self.leaving = False

    def see(self) -> dict[str, Any] | None:
        if self.job and self.leaving:
            job, self.job, self.leaving = self.job, None, False
            return {**job, "metadata": {**job["metadata"], "deletionTimestamp": "now"}}
        if self.job:
            self.job["looks"] += 1
            if self.job["looks"] > self.looks:
                self.job["status"] = {
                    "conditions": [{"type": self.ends[self.made - 1], "status": "True"}]
                }
        return self.job


class Handler(Answering):
    server: Jobs

    def do_GET(self) -> None:
        if "/pods" in self.path:
            return self._answer(
                200, {"apiVersion": "v1", "kind": "PodList", "items": [], "metadata": {}}
            )
        if self.server.faults:
            self.server.faults -= 1
            return self._answer(503, {"message": "etcdserver: leader changed"})
        found = self.server.see()
        self._answer(200 if found else 404, found or {"message": "not found"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.job:
            return self._answer(409, {"message": "already exists"})
        self.server.made += 1
        self.server.job = {**JOB, "looks": 0}
        self._answer(201, self.server.job)

    def do_DELETE(self) -> None:
        assert "propagationPolicy=Foreground" in self.path
        self.server.leaving = self.server.job is not None
        self._answer(200 if self.server.job else 404, {})


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[Jobs] = []

    def start(server: Jobs) -> Connection:
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return connected(f"http://127.0.0.1:{server.server_port}")

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_job_that_has_failed_is_replaced(serve: Any) -> None:
    server = Jobs("Failed", "Complete")
    cluster = serve(server)
    assert launch_job(cluster, JOB, poll=0.01) == 1
    assert launch_job(cluster, JOB, poll=0.01) == 0
    assert server.made == 2


def test_a_job_that_is_under_way_is_followed(serve: Any) -> None:
    server = Jobs("Complete", looks=3)
    cluster = serve(server)
    server.made, server.job = 1, {**JOB, "looks": 0}
    assert launch_job(cluster, JOB, poll=0.01) == 0
    assert launch_job(cluster, JOB, poll=0.01) == 0, "and one that has succeeded is left"
    assert server.made == 1


def test_a_job_that_is_being_deleted_is_waited_for_and_made_anew(serve: Any) -> None:
    server = Jobs("Complete", "Complete")
    cluster = serve(server)
    server.made, server.job, server.leaving = 1, {**JOB, "looks": 0}, True
    assert launch_job(cluster, JOB, poll=0.01) == 0
    assert server.made == 2


def test_a_server_in_trouble_does_not_end_what_follows(serve: Any) -> None:
    server = Jobs("Complete", looks=3)
    cluster = serve(server)
    server.faults = 1
    assert launch_job(cluster, JOB, poll=0.01) == 0
    assert (server.made, server.faults) == (1, 0)


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, slept = [], list[float]()
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("tuneloop.kube.connection.time", clock)

    def look() -> None:
        asked.append(1)
        raise Retryable("503")

    with pytest.raises(Retryable):
        retry_until_available(look, patience=100, pause=10)
    assert slept == [10, 20, 30, 30] and len(asked) == 5, (
        "twice as long each time, and 30 s at most"
    )


@pytest.mark.parametrize(("context", "kind"), [(IN_CLUSTER, Retryable), ("mine", UserError)])
@pytest.mark.parametrize("ask", [find_workflows, delete_schedule])
def test_a_server_that_is_away(
    ask: Callable[[Connection, str], Any], context: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="does not answer"):
        ask(connected("http://127.0.0.1:1", context), "demo")


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        (continue_run, ["--workflow", "demo", "--namespace", "tuneloop", "--entrypoint", "main"]),
        (
            schedule,
            [
                "--name",
                "nightly",
                "--namespace",
                "tuneloop",
                "--store",
                "s3://b",
                "--prompts",
                "s3://p@sha256:0",
            ],
        ),
        (
            reservations,
            [
                "take-claim",
                "--workflow",
                "demo",
                "--namespace",
                "tuneloop",
                "--share",
                '{"group": "g"}',
                "--claims",
                "claim",
            ],
        ),
    ],
)
def test_steps_that_an_api_server_in_trouble_ends_say_that_they_may_run_again(
    program: Any,
    flags: list[str],
    serve: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    troubled = Jobs()
    troubled.faults = 10**9
    monkeypatch.setenv("KUBECONFIG", kubeconfig(serve(troubled).host, tmp_path))
    assert program.main(flags) == 75
    assert capsys.readouterr().err.startswith("unavailable: cluster: http://127.0.0.1:")
