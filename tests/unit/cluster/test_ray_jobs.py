"""What is said of RayJobs that do not run yet, and what is done about one that nobody submits to its Ray cluster.

Statuses are as KubeRay 1.5 writes them, without what nobody here reads.
"""

import json
import threading
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.unit.cluster.api import Answering, connected, serving
from tests.waiting import LIMIT_S, free_port
from tuneloop.cluster.launch import launch_job
from tuneloop.cluster.watch import read_status
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "demo-rows"},
    "spec": {"entrypoint": "python -m tuneloop.stages.data_prep --preparation ray"},
}
STARTING = {
    "jobDeploymentStatus": "Initializing",
    "jobId": "demo-rows-x7k2p",
    "rayClusterName": "demo-rows-fg5hk",
}
STARTING |= {"rayClusterStatus": {"desiredWorkerReplicas": 1}}
READY = {
    **STARTING,
    "jobDeploymentStatus": "Running",
}  # rayClusterStatus stays as it was, until the job is known
RUNNING = {**READY, "jobStatus": "RUNNING"}
ENDED = {**READY, "jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
FAILED = {**READY, "jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}


def pod(name: str, group: str, status: dict[str, Any]) -> dict[str, Any]:
    labels = {"ray.io/cluster": "demo-rows-fg5hk", "ray.io/node-type": group, RUN_LABEL: "demo"}
    return {
        "metadata": {"name": name, "uid": name, "labels": labels},
        "spec": {"containers": []},
        "status": status,
    }


def test_status_follows_a_rayjob_to_the_pods_of_its_ray_cluster() -> None:
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/3 nodes are available: 3 Insufficient cpu.",
    }
    with serving() as (server, cluster):
        labels = {RUN_LABEL: "demo", QUEUE_LABEL: "tuneloop"}
        about = {"name": "demo", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
        server.objects["workflows", "demo"] = {
            "metadata": about,
            "spec": {},
            "status": {"phase": "Running"},
        }
        job: dict[str, Any] = {
            **JOB,
            "metadata": {**about, "name": "demo-rows"},
            "spec": {"suspend": True},
        }
        server.objects["rayjobs", "demo-rows"] = job
        queue = "queue tuneloop: not seen by Kueue yet; is the queue there?"
        assert read_status(cluster, "demo").waiting == {"demo-rows": queue}
        job |= {"spec": {}, "status": {}}
        assert read_status(cluster, "demo").waiting == {"demo-rows": "RayCluster is not made yet"}
        job["status"] = STARTING
        waits = {"phase": "Pending", "conditions": [unschedulable]}
        server.pods = [pod("w", "worker", waits), pod("h", "head", {"phase": "Running"})]
        waiting = read_status(cluster, "demo").waiting
        said = "worker not scheduled: 0/3 nodes are available: 3 Insufficient cpu."
        assert waiting["demo-rows"] == f"RayCluster demo-rows-fg5hk; head running; {said}"
        assert waiting["w"].startswith("not scheduled: 0/3 nodes")
        server.pods = []
        for status in (RUNNING, ENDED, FAILED):
            job["status"] = status
            assert not read_status(cluster, "demo").waiting


class Rays(ThreadingHTTPServer):
    """An API server with one RayJob, of which each look finds the next status; and the job server of its Ray cluster,
    which takes an id once, as Ray does.

    Attributes:
        submitted: what was, with the status that the RayJob has from then on.
    """

    def __init__(self, *statuses: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), RayHandler)
        self.statuses, self.submitted = list(statuses), list[dict[str, Any]]()
        self.head = f"127.0.0.1:{self.server_port}"

    def see(self) -> dict[str, Any]:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return {**JOB, "status": {**status, "dashboardURL": self.head}}


class RayHandler(Answering):
    server: Rays

    def do_GET(self) -> None:
        empty = {"apiVersion": "v1", "kind": "PodList", "items": [], "metadata": {}}
        self._answer(200, empty if "/pods" in self.path else self.server.see())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/api/jobs/":
            return self._answer(409, {"message": "already exists"})
        if any(each["submission_id"] == body["submission_id"] for each in self.server.submitted):
            return self._answer(
                500, f"Job with submission_id {body['submission_id']} already exists."
            )
        self.server.submitted.append(body)
        self.server.statuses = [READY, RUNNING, ENDED]
        self._answer(200, {"submission_id": body["submission_id"]})


def launched(server: Rays, grace: float) -> int:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            return launch_job(
                connected(f"http://127.0.0.1:{server.server_port}"), JOB, poll=0.01, grace=grace
            )
        finally:
            server.shutdown()


def test_what_nobody_submits_is_submitted_once_under_its_own_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Rays(STARTING, READY)
    assert launched(server, 0.05) == 0
    assert server.submitted == [
        {"entrypoint": JOB["spec"]["entrypoint"], "submission_id": "demo-rows-x7k2p"}
    ]  # type: ignore[index]
    assert (
        "demo-rows: its submitter did not start, so it was submitted here: HTTP 200"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("statuses", "grace"),
    [([READY, READY, RUNNING, ENDED], LIMIT_S), ([*[STARTING] * 20, RUNNING, ENDED], 0.0)],
    ids=["its submitter comes in time", "its Ray cluster is not ready"],
)
def test_what_is_submitted_or_can_not_be_yet_is_left_alone(
    statuses: list[dict[str, Any]], grace: float
) -> None:
    server = Rays(*statuses)
    assert launched(server, grace) == 0 and not server.submitted


def test_one_that_was_submitted_meanwhile_is_not_run_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """KubeRay looks at its cluster every few seconds: the job is there, and its status does not say so yet."""
    server = Rays(*[READY] * 20, RUNNING, ENDED)
    server.submitted = [{"submission_id": "demo-rows-x7k2p"}]
    assert launched(server, 0.0) == 0 and len(server.submitted) == 1
    assert (
        "HTTP 500, Job with submission_id demo-rows-x7k2p already exists."
        in capsys.readouterr().out
    )


def test_a_head_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    server = Rays(*[READY] * 20, FAILED)
    server.head = f"127.0.0.1:{free_port()}"
    assert launched(server, 0.0) == 1
    assert (
        "demo-rows: it was not submitted, and the request to its head failed: Connect"
        in capsys.readouterr().out
    )


def test_one_that_only_its_submitter_can_submit_in_full_is_left_to_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(JOB, "spec", {**JOB["spec"], "entrypointNumGpus": 1})  # type: ignore[dict-item]
    server = Rays(*[READY] * 20, FAILED)
    assert launched(server, 0.0) == 1 and not server.submitted
    said = "demo-rows: it was not submitted; with spec.entrypointNumGpus only KubeRay's pod can do so: see why"
    assert said in capsys.readouterr().out
