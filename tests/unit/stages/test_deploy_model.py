"""What can go wrong when a model is to be served: its gate, its rollout, its answers, and an attempt that is cut off.

The API server and the pods are of this file. Real ones: tests/cluster/test_serving.py.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.cluster.api import Answering, Cluster, Reading, kubeconfig
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.component import find_component
from tuneloop.core.errors import EXIT_NOT_PROMOTED, EXIT_RETRY, EXIT_USER

PLACE = "/apis/apps/v1/namespaces/tuneloop/deployments/tuneloop-model"


class Kubernetes(Reading):
    """An API server with one Deployment, whose pods of the newest template are ready unless their model is broken."""

    server: Pods

    def do_PATCH(self) -> None:
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        body, found = (
            json.loads(self.rfile.read(int(self.headers["Content-Length"]))),
            self.server.objects[self.path],
        )
        if self.server.faults and (fault := self.server.faults.pop(0)):
            return self._answer(fault, {"message": "not now"})
        if body["metadata"].pop("resourceVersion") != found["metadata"]["resourceVersion"]:
            return self._answer(409, {"message": "the object has been modified"})
        found["metadata"]["annotations"] = {
            **found["metadata"].get("annotations", {}),
            **body["metadata"]["annotations"],
        }
        found["spec"]["template"]["spec"] |= body["spec"]["template"]["spec"]
        found["metadata"]["resourceVersion"] += "0"
        self.server.settle()
        if self.server.hurried:  # as by a run that promotes another model meanwhile
            self.server.set_model(self.server.hurried)
        self._answer(200, found)


class Pods(Cluster):
    """The cluster; `faults` are the statuses that changes get which are refused, `broken` models that do not start."""

    faults: list[int]
    broken: set[str]
    hurried = ""
    served = ""

    def settle(self) -> None:
        """Do what Kubernetes' controller does, and the pods."""
        deployment = self.objects[PLACE]
        deployment["metadata"]["generation"] += 1
        good = self.model not in self.broken
        counts = (
            dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 2)
            if good
            else {"replicas": 3}
        )
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            **counts,
        }
        self.served = self.model or "s3://artifacts/first" if good else self.served

    @property
    def model(self) -> str | None:
        """What the pods' template says; both containers say the same."""
        spec = self.objects[PLACE]["spec"]["template"]["spec"]
        said = [
            [e["value"] for e in each.get("env", ()) if e["name"] == "MODEL"]
            for each in spec["containers"]
        ]
        assert said == [
            [e["value"] for e in each.get("env", ()) if e["name"] == "MODEL"]
            for each in spec["initContainers"]
        ]
        return said[0][0] if said[0] else None

    def set_model(self, model: str) -> None:
        for each in (spec := self.objects[PLACE]["spec"]["template"]["spec"])["containers"] + spec[
            "initContainers"
        ]:
            each["env"] = [{"name": "MODEL", "value": model}]
        self.settle()


class Endpoint(Answering):
    """A Service with OpenAI's API."""

    pods: Pods
    answers = 200

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tuneloop"}, {"id": self.pods.served}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] == "reverse 12 ="
        status = self.answers if asked["model"] == self.pods.served else 404
        self._answer(
            status, {"usage": {"completion_tokens": 2}} if status == 200 else {"message": "no"}
        )


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pods]:
    with Pods() as server:
        server.RequestHandlerClass, server.faults, server.broken = Kubernetes, [], set()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
        container = {"name": "vllm", "env": [{"name": "OTHER", "value": "kept"}]}
        spec = {
            "initContainers": [{"name": "fetch"}],
            "containers": [container],
            "volumes": ["kept"],
        }
        about = {"name": "tuneloop-model", "generation": 1, "resourceVersion": "1"}
        server.objects[PLACE] = {
            "metadata": about,
            "spec": {"replicas": 2, "template": {"spec": spec}},
        }
        server.settle()
        yield server
        server.shutdown()


@pytest.fixture
def endpoint(pods: Pods) -> Iterator[str]:
    handler = type("Own", (Endpoint,), {"pods": pods})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def commit(place: Path, name: str, score: float, policy: str | None = None) -> tuple[str, str, str]:
    """References of an exported model and of its evaluation, and where its promotion is committed."""
    digest = f"sha256:{name.encode().hex():0<64}"
    Draft(str(place / name / "export")).commit(
        stage="export", inputs={"policy": f"{place}/p@{digest}"}
    )
    draft = Draft(str(place / name / "metrics"))
    draft.path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": ["reverse 12 ="]}), draft.path / "samples.parquet")
    of = {"policy": f"{place}/p@{policy or digest}"}
    draft.commit(stage="evaluate", inputs=of, results={"mean_reward": score})
    model, metrics = (Artifact(str(place / name / each)).ref for each in ("export", "metrics"))
    return model, metrics, str(place / name / "promotion")


def deploy(promoted: tuple[str, str, str], endpoint: str, *more: str) -> int:
    component = find_component("tuneloop.stages.deploy_model")
    assert component
    model, metrics, out = promoted
    words = [
        "--model",
        model,
        "--metrics",
        metrics,
        "--promotion",
        out,
        "--url",
        endpoint,
        "--ready-s",
        "1",
        *more,
    ]
    return component.run(words)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().split("\n")[-1]


def test_a_gate_is_passed_or_nothing_changes(
    pods: Pods, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = commit(tmp_path, "first", 0.5)
    untouched = copy.deepcopy(pods.objects[PLACE])
    assert deploy(first, endpoint, "--at-least", "0.6") == EXIT_NOT_PROMOTED
    known = "tuneloop-model still serves its own model"
    assert said(capsys) == f"not promoted: mean_reward: 0.5: is below 0.6: {known}"
    assert pods.objects[PLACE] == untouched

    assert deploy(first, endpoint, "--at-least", "0.5") == 0
    assert (
        pods.model == first[0] and said(capsys) == f"deploy_model: {endpoint} answers as {first[0]}"
    )
    spec = pods.objects[PLACE]["spec"]["template"]["spec"]
    assert spec["containers"][0]["env"][1] == {"name": "OTHER", "value": "kept"} and spec[
        "volumes"
    ] == ["kept"]
    worse, equal = commit(tmp_path, "worse", 0.4), commit(tmp_path, "equal", 0.5)
    assert deploy(worse, endpoint) == EXIT_NOT_PROMOTED, "what is served is better"
    assert (
        said(capsys)
        == f"not promoted: mean_reward: 0.4: is below 0.5: tuneloop-model still serves {first[0]}"
    )
    assert deploy(equal, endpoint) == 0 and pods.model == equal[0]
    assert Artifact(equal[2]).manifest.notes["former"] == first[0]
    generation = pods.objects[PLACE]["metadata"]["generation"]
    assert (
        deploy(equal, endpoint) == 0
        and said(capsys) == "deploy_model: committed already, nothing to do"
    )
    assert pods.objects[PLACE]["metadata"]["generation"] == generation


@pytest.mark.parametrize("before", [True, False], ids=["a model", "what a ConfigMap names"])
def test_what_does_not_start_or_answer_is_taken_back(
    pods: Pods, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: bool
) -> None:
    good, bad = commit(tmp_path, "good", 0.5), commit(tmp_path, "bad", 0.9)
    assert not before or deploy(good, endpoint) == 0
    stood = pods.model
    pods.broken.add(bad[0])
    back = f"tuneloop-model serves {stood or 'its own model'} again"
    assert deploy(bad, endpoint) == EXIT_NOT_PROMOTED
    unready = "the pods of tuneloop-model are not all ready after 1 s"
    assert said(capsys) == f"not promoted: --model: '{bad[0]}': {unready}; {back}"
    assert pods.model == stood

    pods.broken.clear()
    Endpoint.answers = 500
    try:
        assert deploy(bad, endpoint) == EXIT_NOT_PROMOTED, "it is asked anew, not remembered"
    finally:
        Endpoint.answers = 200
    assert f"{endpoint} answers 500: " in (line := said(capsys)) and line.endswith(
        f"after 1 s; {back}"
    )
    assert deploy(bad, "http://127.0.0.1:9") == EXIT_NOT_PROMOTED
    assert "http://127.0.0.1:9 does not answer (Unanswered: " in said(capsys)
    assert pods.model == stood
    assert deploy(bad, endpoint) == 0, "nothing of it stays"


def test_pods_that_serve_another_model_are_no_proof(
    pods: Pods,
    endpoint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pods, "served", property(lambda _: "other", lambda *_: None))
    assert deploy(commit(tmp_path, "good", 0.5), endpoint) == EXIT_NOT_PROMOTED
    assert f"{endpoint} serves tuneloop, other instead after 1 s; " in said(capsys)


@pytest.mark.parametrize(
    "cut", [0, 1, 2], ids=["before it is set", "before it is proved", "before it is taken back"]
)
def test_an_attempt_that_is_cut_off_is_followed_by_one_that_goes_on(
    pods: Pods, endpoint: str, tmp_path: Path, cut: int
) -> None:
    """The API server is away at one change; and was changed by others at another (409)."""
    good, better = commit(tmp_path, "good", 0.5), commit(tmp_path, "better", 0.7)
    assert deploy(good, endpoint) == 0
    pods.broken |= {better[0]} if cut == 2 else set()
    pods.faults = [0] * min(cut, 1) + [409, 503]
    assert deploy(better, endpoint) == EXIT_RETRY
    assert pods.model == (better if cut else good)[0]
    assert deploy(better, endpoint) == (EXIT_NOT_PROMOTED if cut == 2 else 0)
    assert pods.model == (good if cut == 2 else better)[0], (
        "what was served before is known to every attempt"
    )
    assert deploy(commit(tmp_path, "worse", 0.6), endpoint) == (
        0 if cut == 2 else EXIT_NOT_PROMOTED
    )


def test_one_run_does_not_undo_what_another_does(
    pods: Pods, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods.hurried, good = "s3://artifacts/other@sha256:1", commit(tmp_path, "good", 0.5)
    assert deploy(good, endpoint) == EXIT_NOT_PROMOTED
    assert said(capsys).endswith(f"was replaced at tuneloop-model meanwhile by {pods.hurried}")
    assert pods.model == pods.hurried


def test_what_is_the_users_to_mend(
    pods: Pods, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy(commit(tmp_path, "a", 0.5, policy=f"sha256:{'0' * 64}"), endpoint) == EXIT_USER
    assert "does not evaluate the policy that " in said(capsys)
    assert (
        deploy(good := commit(tmp_path, "b", 0.5), endpoint, "--deployment", "missing") == EXIT_USER
    )
    assert said(capsys).startswith("error: cluster: 'c': refused (404): ")
    pods.denied[PLACE] = "deployments"
    assert deploy(good, endpoint) == EXIT_USER
    assert "refused (403): deployments is forbidden" in said(capsys)
