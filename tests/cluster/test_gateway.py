"""The gateway in a cluster: callers with Kubernetes tokens, sessions as Jobs, and a gateway that dies meanwhile."""

import concurrent.futures
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
import yaml

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.test_queue import until
from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TAG = os.environ.get("TAG", "dev")
PORT = 18480
LIMIT = 20
LABEL = "tuneloop.dev/session"
DEPLOYMENT = "deployment/tuneloop-gateway"
ACCOUNTS = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: gateway-user, namespace: tuneloop}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: gateway-user, namespace: tuneloop}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: tuneloop-user}
subjects: [{kind: ServiceAccount, name: gateway-user, namespace: tuneloop}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: gateway-stranger, namespace: default}
"""


def apply(text: str, verb: str = "apply") -> None:
    flags = ["--ignore-not-found", "--wait=false"] if verb == "delete" else []
    subprocess.run(
        ["kubectl", verb, *flags, "-f", "-"], input=text, text=True, check=True, capture_output=True
    )


def token(account: str, namespace: str, audience: str = "tuneloop-gateway") -> str:
    return kubectl(
        "-n", namespace, "create", "token", account, "--audience", audience, "--duration", "1h"
    ).strip()


def left() -> list[str]:
    return kubectl("-n", "tuneloop", "get", "jobs,pods", "-l", LABEL, "-o", "name").split()


def forward(stopping: threading.Event) -> None:
    """Keep a way to the service open: kubectl gives up when the pod behind it goes."""
    while not stopping.is_set():
        command = [
            "kubectl",
            "-n",
            "tuneloop",
            "port-forward",
            "svc/tuneloop-gateway",
            f"{PORT}:8080",
        ]
        way = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while way.poll() is None and not stopping.wait(0.2):
            pass
        way.terminate()
        way.wait()


class Retrying(httpx.HTTPTransport):
    """Sends again what kubectl's forwarding lost: every request here may be sent twice."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(20):
            try:
                return super().handle_request(request)
            except httpx.TransportError:
                time.sleep(0.5)
        return super().handle_request(request)


@contextlib.contextmanager
def serve_gateway(
    home: Path, components: Sequence[str] = (), **settings: Any
) -> Iterator[SimpleNamespace]:
    """The component of manifests/ and others, with a quota of `LIMIT` and small pods."""
    worker = {
        "image": f"tuneloop/rollout:{TAG}",
        "cpu": "10m",
        "memory": "3Gi",
        "request": "96Mi",
        "queue": "",
        "idle": 900,
    }
    config = {
        "namespaces": {"tuneloop": {"sessions": LIMIT}},
        "default": {"sessions": 0},
        "worker": worker,
    } | settings
    data = {"STORE": STORE, "gateway.yaml": yaml.safe_dump(config)}
    patch = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "tuneloop-gateway", "namespace": "tuneloop"},
    }
    kustomization = {
        "components": [
            os.path.relpath(ROOT / "manifests/components" / each, home)
            for each in ("gateway", *components)
        ],
        "images": [{"name": f"tuneloop/{name}", "newTag": TAG} for name in ("gateway", "rollout")],
        "patches": [{"patch": yaml.safe_dump({**patch, "data": data})}],
    }
    (home / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    made = kubectl("kustomize", str(home))
    apply(made)
    apply(ACCOUNTS)
    stopping = threading.Event()
    way = threading.Thread(target=forward, args=(stopping,))
    way.start()
    try:
        kubectl("-n", "tuneloop", "rollout", "status", DEPLOYMENT, "--timeout=600s")
        user = token("gateway-user", "tuneloop")
        headers = {"Authorization": f"Bearer {user}"}
        url = f"http://127.0.0.1:{PORT}"
        with httpx.Client(base_url=url, headers=headers, timeout=60, transport=Retrying()) as http:
            until(lambda: answers(http))
            yield SimpleNamespace(http=http, token=user, url=str(http.base_url))
    finally:
        stopping.set()
        way.join()
        kubectl("-n", "tuneloop", "delete", "jobs", "-l", LABEL)
        apply(made, "delete")
        apply(ACCOUNTS, "delete")


@pytest.fixture(scope="module")
def gateway(
    cluster: Connection, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    with serve_gateway(tmp_path_factory.mktemp("gateway")) as served:
        yield served


@pytest.fixture(autouse=True)
def clean(cluster: Connection) -> Iterator[None]:
    yield
    kubectl("-n", "tuneloop", "delete", "jobs", "-l", LABEL)


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def test_who_may_have_sessions(gateway: SimpleNamespace) -> None:
    """The API server says whose a token is, that it was meant for the gateway, and what its owner may do."""

    def status(secret: str | None, path: str = "/v1/sessions") -> int:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return httpx.get(gateway.url + path, headers=headers).status_code

    stranger = token("gateway-stranger", "default")
    assert status(None) == 401
    assert status("eyJhbGciOiJSUzI1NiJ9.e30.x") == 401
    assert status(token("gateway-user", "tuneloop", "somebody-else")) == 401
    assert status(gateway.token) == 200
    assert status(stranger, "/v1/sessions?namespace=tuneloop") == 403
    assert gateway.http.post("/v1/sessions", json={"namespace": "kube-system"}).status_code == 403
    made = gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "mine"}).json()
    assert (
        made["creator"] == "system:serviceaccount:tuneloop:gateway-user"
        and made["namespace"] == "tuneloop"
    )
    assert status(gateway.token, f"/v1/sessions/{made['id']}") == 200
    assert status(stranger, f"/v1/sessions/{made['id']}") == 404
    headers = {"Authorization": f"Bearer {stranger}"}
    assert (
        httpx.delete(f"{gateway.url}/v1/sessions/{made['id']}", headers=headers).status_code == 404
    )
    assert gateway.http.delete("/v1/sessions/tuneloop.session-0000000000").status_code == 204
    gateway.http.delete(f"/v1/sessions/{made['id']}")
    until(lambda: not left())


def test_a_load_of_sessions_at_once(gateway: SimpleNamespace) -> None:
    """As many as the quota has, each asked for three times; one more is refused; all are ended, and nothing stays."""

    def make(n: int) -> httpx.Response:
        return gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": f"load-{n}"})

    def running() -> bool:
        sessions = gateway.http.get("/v1/sessions").json()["sessions"]
        assert not [each for each in sessions if each["phase"] in ("ended", "failed")]
        return len(sessions) == LIMIT and all(each["phase"] == "running" for each in sessions)

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(LIMIT) as pool:
        answers = list(pool.map(make, [n for n in range(LIMIT) for _ in range(3)]))
        assert {answer.status_code for answer in answers} == {200, 201}
        ids = {answer.json()["id"] for answer in answers}
        assert len(ids) == LIMIT
        created = time.monotonic() - began
        over = make(LIMIT)
        assert over.status_code == 429
        assert over.json()["error"].startswith(
            f"quota: namespace 'tuneloop' has {LIMIT} of {LIMIT} sessions"
        )
        assert gateway.http.get("/v1/sessions?namespace=default").status_code == 403
        until(running, 2 * LIMIT_S)
        up = time.monotonic() - began
        beat = lambda id: gateway.http.post("/api/v1/session_heartbeat", json={"session_id": id})  # noqa: E731
        assert {answer.status_code for answer in pool.map(beat, ids)} == {200}
        ended = list(pool.map(lambda id: gateway.http.delete(f"/v1/sessions/{id}"), [*ids, *ids]))
    assert {answer.status_code for answer in ended} == {204}
    assert gateway.http.get("/v1/sessions").json() == {"sessions": []}
    until(lambda: not left())
    total = time.monotonic() - began
    print(
        f"{LIMIT} sessions: created in {created:.1f} s, all running after {up:.1f} s, all gone after {total:.1f} s"
    )


def test_a_session_goes_on_while_its_gateway_dies(gateway: SimpleNamespace, root: str) -> None:
    """Tinker's own client drives a loop; in the middle the gateway is killed. Nothing is lost or done twice."""
    base = checkpoint_artifact(f"{root}/base")
    service = tinker.ServiceClient(base_url=gateway.url, api_key=gateway.token)
    model = service.create_lora_training_client(base_model=base.ref, rank=0).result()
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},  # type: ignore[dict-item]
    )
    losses = []
    for step in range(8):
        gradient = model.forward_backward([datum], "cross_entropy")
        if step == 4:
            kubectl(
                "-n",
                "tuneloop",
                "delete",
                "pod",
                "-l",
                "app.kubernetes.io/name=tuneloop-gateway",
                "--grace-period=0",
                "--force",
            )
        taken = model.optim_step(tinker.AdamParams(learning_rate=1e-2))
        losses.append(gradient.result().metrics["loss:sum"])
        assert taken.result().metrics["weight_version:max"] == step + 1
    assert losses == sorted(losses, reverse=True)
    sampler = model.save_weights_and_get_sampling_client().result()
    said = sampler.sample(
        tinker.ModelInput.from_ints([5]), 4, tinker.SamplingParams(max_tokens=3, temperature=0.0)
    ).result()
    assert [each.tokens for each in said.sequences] == [[6, 7, 8]] * 4
    path = model.save_state("after").result().path
    session = service.holder.get_session_id()
    own = f"{STORE}/sessions/tuneloop/{session.partition('.')[2]}"
    saved = Artifact(f"{own}/train-0/weights/after")
    assert (
        path.endswith(":train:0/weights/after")
        and saved.manifest.facts["version"] == 8
        and saved.path
    )
    service.close("success").result()
    until(lambda: not left())
    Store(own).delete("")
