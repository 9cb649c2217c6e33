"""One look of the autoscaler: what it reads of pods and of a run, and what it changes. The whole of it runs in
tests/cluster."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.api import Cluster, Reading, kubeconfig
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.extensions.fleets.autoscaler import count_requests, read_iteration, scale_fleet
from tuneloop.extensions.fleets.autoscaling_rule import AutoscalingRule
from tuneloop.inference.fleet.service import Service
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import CLIENT_LABEL, RUN_LABEL

NOBODY = "http://127.0.0.1:9"
OURS = "vllm:num_requests_running 40\nvllm:num_requests_waiting 88\n"
VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5.0
"""
SCALE = "/apis/apps/v1/namespaces/tuneloop/deployments/rollout/scale"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/tuneloop/endpointslices"


@contextlib.contextmanager
def serving(text: str) -> Iterator[str]:
    """A replica that answers with `text`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Scaling(Reading):
    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.objects[self.path]["spec"] |= body["spec"]
        self._answer(200, self.server.objects[self.path])


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster with a Deployment of one replica, which is to be filled in, and a pod of a run that samples."""
    with Cluster() as server:
        server.RequestHandlerClass = Scaling
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
        labels = {RUN_LABEL: "demo", CLIENT_LABEL: "true"}
        client = {
            "metadata": {"name": "demo-rollout", "labels": labels},
            "status": {"phase": "Running"},
        }
        ended = {
            "metadata": {"name": "demo-rollout-0", "labels": labels},
            "status": {"phase": "Succeeded"},
        }
        server.objects["/api/v1/namespaces/tuneloop/pods"] = [client, ended]
        server.objects[SCALE] = {"spec": {"replicas": 1}}
        yield server
        server.shutdown()


def endpoints(*urls: str) -> list[dict[str, Any]]:
    metadata = {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kubernetes.io/service-name": "rollout"},
    }
    made = []
    for url in urls:
        port = int(url.rpartition(":")[2])
        ready = {
            "addresses": ["127.0.0.1"],
            "conditions": {"ready": True},
            "targetRef": {"uid": url},
        }
        slice_ = {"addressType": "IPv4", "ports": [{"port": port}], "endpoints": [ready]}
        made.append({"metadata": metadata, **slice_})
    return made or [{"metadata": metadata, "addressType": "IPv4", "endpoints": []}]


def look(rule: AutoscalingRule) -> str:
    return scale_fleet(Service("rollout", "tuneloop", None), rule)


def test_requests_of_all_pods_are_counted_and_the_deployment_is_scaled(api: Cluster) -> None:
    rule = AutoscalingRule(0, 4, 64)
    with serving(OURS) as url:
        api.objects[SLICES] = endpoints(url)
        assert look(rule) == "rollout: 1 → 2 replicas (1 ready, 128 requests, 1 clients)"
        assert api.objects[SCALE]["spec"] == {"replicas": 2}
        assert look(rule) == "", "that is enough"


def test_without_a_replica_it_goes_by_the_pods_of_runs(api: Cluster) -> None:
    api.objects[SCALE]["spec"] = {}  # an API server leaves a zero out
    api.objects[SLICES] = endpoints()
    assert (
        look(AutoscalingRule(0, 4, 64))
        == "rollout: 0 → 1 replicas (0 ready, 0 requests, 1 clients)"
    )
    assert api.objects[SCALE]["spec"] == {"replicas": 1}


def test_replicas_stay_where_one_cannot_be_asked(api: Cluster) -> None:
    api.objects[SLICES] = endpoints(NOBODY)
    with pytest.raises(Unavailable, match=rf"^{NOBODY}/metrics cannot be reached from here: "):
        look(AutoscalingRule(0, 4, 64))
    with serving("process_cpu_seconds_total 1\n") as url:
        api.objects[SLICES] = endpoints(url)
        with pytest.raises(
            UserError,
            match=r"has no vllm:num_requests_running at /metrics; scale a server that has it$",
        ):
            look(AutoscalingRule(0, 4, 64))
    assert api.objects[SCALE]["spec"] == {"replicas": 1}


def test_vllms_own_server_is_counted_by_engine() -> None:
    with serving(VLLM) as url:
        assert count_requests(url) == 12


def test_an_iteration_is_read_from_what_a_run_committed(tmp_path: Path) -> None:
    def commit(iteration: int, stage: str, role: Any, started: float, seconds: float) -> None:
        draft = Draft(f"{tmp_path}/demo/iterations/{iteration}/{stage}")
        (draft.path / "x").write_text("x")
        how: Any = {"provenance": {"started": started}, "timings": {"total": seconds}}
        draft.commit(stage=stage, role=role, **how)

    commit(1, "rollout", "sampler", 100.0, 40.0)
    commit(1, "policy_update", "trainer", 150.0, 50.0)
    run = Run.open("demo", str(tmp_path))
    assert read_iteration(run) is None, "of the first nobody knows when it began"
    commit(2, "rollout", "sampler", 201.0, 60.0)
    commit(2, "policy_update", "trainer", 265.0, 35.0)
    last = read_iteration(run)
    assert last and (last.began, last.sampling, last.idle) == (200.0, 60.0, 40.0)


def test_a_fleet_that_cannot_be_scaled_is_said_at_once(
    api: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fleet", "autoscale", "service://rollout.tuneloop", "--max", "2"]
    assert run_cli([*command, "--min", "5"]) == 2
    assert "--min: 5: must be at most --max (2)\n" in capsys.readouterr().err
    api.objects[SLICES] = endpoints(NOBODY)
    assert run_cli(command) == 75
    assert f"{NOBODY}/metrics cannot be reached from here" in capsys.readouterr().err
    assert run_cli([*command, "--context", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
