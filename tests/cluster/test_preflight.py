"""What is missing on a cluster is said in one line before anything is created."""

import base64
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml

from tests.cluster.conftest import STORE, forwarded, kubectl, sleeper
from tests.cluster.making import submit_workflow
from tests.waiting import LIMIT_S, until
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.preflight import LISTED, find_problems
from tuneloop.cluster.watch import read_status
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import Connection, build_connection, connect_to_cluster

pytestmark = pytest.mark.cluster


def _queue(workflow: dict[str, Any]) -> None:
    workflow["spec"]["templates"][0]["metadata"]["labels"][run_workflows.QUEUE_LABEL] = "nobody"


def _cpu(workflow: dict[str, Any]) -> None:
    workflow["spec"]["templates"][0]["container"]["resources"]["requests"]["cpu"] = "400"


def _gpu(workflow: dict[str, Any]) -> None:
    workflow["spec"]["templates"][0]["container"]["resources"]["limits"]["nvidia.com/gpu"] = "1"


def _secret(workflow: dict[str, Any]) -> None:
    key = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "no-such-secret", "key": "key"}}}
    workflow["spec"]["templates"][0]["container"]["env"].append(key)


def _account(workflow: dict[str, Any]) -> None:
    workflow["spec"]["serviceAccountName"] = "nobody"


def _path(workflow: dict[str, Any]) -> None:
    next(p for p in workflow["spec"]["arguments"]["parameters"] if p["name"] == "store")[
        "value"
    ] = "file:///data"


@pytest.mark.parametrize(
    ("spoil", "field", "told"),
    [
        (_queue, "queue", "'nobody': is not a LocalQueue"),
        (_cpu, "sleep", "cpu: 400.010': is more than ClusterQueue tuneloop can ever give (4)"),
        (_gpu, "sleep", "nvidia.com/gpu: 1': ClusterQueue tuneloop has no quota"),
        (_secret, "secret", "'no-such-secret': is missing in namespace tuneloop"),
        (_account, "service account", "'nobody': is missing"),
        (_path, "store", "a path that the pods do not share"),
    ],
)
def test_what_is_missing(
    cluster: Connection, run: str, spoil: Callable[[dict[str, Any]], None], field: str, told: str
) -> None:
    made = run_workflows.prepare_workflow(sleeper(1), run=run, store=STORE)
    assert find_problems(cluster, made) == []
    spoil(made)
    (problem,) = find_problems(cluster, made)
    assert problem.field == field and told in str(problem)
    assert "\n" not in str(problem)


def test_a_bucket_that_is_not_there(
    cluster: Connection, run: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked from here, with the keys of this machine's environment."""
    secret = cluster.core.read_namespaced_secret("tuneloop-store", cluster.namespace).data
    for name, value in secret.items():
        monkeypatch.setenv(name, base64.b64decode(value).decode())
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert (
        find_problems(cluster, run_workflows.prepare_workflow(sleeper(1), run=run, store=STORE))
        == []
    )
    (problem,) = find_problems(
        cluster,
        run_workflows.prepare_workflow(sleeper(1), run=run, store="s3://no-such-bucket/runs"),
    )
    assert problem.field == "store" and "correct the URL" in str(problem)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (problem,) = find_problems(
        cluster, run_workflows.prepare_workflow(sleeper(1), run=run, store=STORE)
    )
    assert problem.field == "store"


@pytest.fixture
def endpoint(cluster: Connection) -> Iterator[str]:
    """The store that pods reach inside the cluster, here."""
    url = cluster.core.read_namespaced_config_map("tuneloop-store", cluster.namespace).data[
        "AWS_ENDPOINT_URL"
    ]
    service, namespace = urlparse(url).hostname.split(".")[:2]
    with forwarded(namespace, service, urlparse(url).port) as place:
        yield f"http://{place}"


def test_an_image_that_no_node_has(cluster: Connection, run: str) -> None:
    if any(len(node.status.images or ()) >= LISTED for node in cluster.core.list_node().items):
        pytest.skip("a node has more images than it reports")
    made = run_workflows.prepare_workflow(sleeper(1), run=run, store=STORE)
    container = made["spec"]["templates"][0]["container"]
    container["image"] = "tuneloop/base:forgotten"
    (problem,) = find_problems(cluster, made)
    assert "image: 'tuneloop/base:forgotten': is on no node, and names no registry" in str(problem)
    container["image"] = "registry.example/tuneloop/base:forgotten"  # not ours to ask
    assert find_problems(cluster, made) == []


def test_an_unknown_priority(cluster: Connection, run: str) -> None:
    with pytest.raises(UserError, match="'urgent': is not a WorkloadPriorityClass"):
        submit_workflow(cluster, sleeper(1), run=run, store=STORE, priority="urgent")
    with pytest.raises(UserError, match="no workflow in namespace"):  # nothing was created
        run_workflows.find_workflows(cluster, run)


def test_a_namespace_that_does_not_exist(cluster: Connection, run: str) -> None:
    elsewhere = dataclasses.replace(cluster, namespace="no-such-place")
    with pytest.raises(UserError, match="'no-such-place': does not exist in context"):
        submit_workflow(elsewhere, sleeper(1), run=run, store=STORE)


def test_no_argo(cluster: Connection, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tuneloop.cluster.preflight.WORKFLOWS", ("argoproj.io", "v1alpha1", "nosuchworkflows")
    )
    with pytest.raises(UserError, match="has no Argo Workflows"):
        submit_workflow(cluster, sleeper(1), run=run, store=STORE)


def test_a_context_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"cluster: 'nowhere': no usable cluster configuration"):
        connect_to_cluster(context="nowhere")


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = {"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "dead", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [server],
        "contexts": [context],
        "users": [{"name": "u", "user": {}}],
        "current-context": "dead",
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **config}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    dead = connect_to_cluster()
    with pytest.raises(UserError, match=r"cluster: 'dead': http://127.0.0.1:9 does not answer"):
        run_workflows.find_workflows(dead, "any")


def _as(cluster: Connection, user: str) -> Connection:
    connection = build_connection(
        cluster.core.api_client.configuration, cluster.namespace, cluster.context
    )
    connection.core.api_client.set_default_header("Impersonate-User", user)
    return connection


def test_an_account_that_may_not_create(cluster: Connection, run: str) -> None:
    """The account of the stages has no rights: what it may not see counts as present."""
    stage = _as(cluster, "system:serviceaccount:tuneloop:tuneloop-stage")
    (problem,) = find_problems(
        stage, run_workflows.prepare_workflow(sleeper(1), run=run, store=STORE)
    )
    assert "may not create workflows in namespace tuneloop" in str(problem)


def test_the_role_for_people_suffices(cluster: Connection, run: str) -> None:
    user = f"user-{run}"
    words = ["rolebinding", user, "--role=tuneloop-user", f"--user={user}"]
    kubectl("-n", cluster.namespace, "create", *words)
    try:
        person = _as(cluster, user)
        made = run_workflows.prepare_workflow(sleeper(3600), run=run, store=STORE)
        until(
            lambda: not find_problems(person, made)
        )  # the API server learns of a binding as others do
        submit_workflow(person, sleeper(3600), run=run, store=STORE)
        assert read_status(person, run).phase in ("Pending", "Running")
        assert argo.stop_run(person, run, timeout=LIMIT_S) == 1
    finally:
        kubectl("-n", cluster.namespace, "delete", *words[:2])
