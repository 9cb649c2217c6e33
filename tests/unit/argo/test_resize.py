"""What is rendered for a server whose pod requests less while it sleeps, and what is refused before it is."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import Configuration

from tests.unit.cluster.api import Answering
from tuneloop.argo.resize import ACCOUNT
from tuneloop.cluster.preflight import _find_resize_problems
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import Connection, build_connection
from tuneloop.kube.resize import ACCOUNT_FILES
from tuneloop.workflow.manifest import check_workflow

ASLEEP = "engine.asleep={cpu: 100m, memory: 1Gi}"
RIGHTS = Path(__file__).parents[3] / "manifests" / "components" / "resize"


def render(*sets: str) -> dict[str, Any]:
    pipeline = find_pipeline("grpo")
    made: dict[str, Any] = pipeline.build(pipeline.configure(sets=["engine.colocate=true", *sets]))
    return made


def split(workflow: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The server's template, and the others."""
    (serve,) = [each for each in workflow["spec"]["templates"] if each["name"] == "serve"]
    return serve, [each for each in workflow["spec"]["templates"] if each is not serve]


def test_the_server_alone_has_a_token_and_is_resized_in_place() -> None:
    made = render(ASLEEP)
    serve, others = split(made)
    assert serve["serviceAccountName"] == ACCOUNT and ACCOUNT not in json.dumps(others)
    assert "serviceAccountToken" not in json.dumps(others)
    assert not made["spec"]["automountServiceAccountToken"]
    (volume,) = [each["name"] for each in serve["volumes"] if "projected" in each]
    mounts = {each["name"]: each["mountPath"] for each in serve["container"]["volumeMounts"]}
    assert mounts[volume] == ACCOUNT_FILES
    (patched,) = json.loads(serve["podSpecPatch"])["containers"]
    policy = {each["resourceName"]: each["restartPolicy"] for each in patched["resizePolicy"]}
    assert policy == {"cpu": "NotRequired", "memory": "NotRequired"}
    check_workflow(made["spec"])  # `tuneloop run` takes it
    assert split(render())[0].keys() - serve.keys() == set(), (
        "and without the key nothing of it is there"
    )
    assert "account" not in json.dumps(split(render())[0])


def test_a_queued_server_is_a_group_of_one() -> None:
    """Of Kueue, which else deletes a pod whose requests are no longer those that it admitted."""
    about = split(render(ASLEEP))[0]["metadata"]
    assert about["labels"]["kueue.x-k8s.io/pod-group-name"] == "serve-{{workflow.uid}}-{{retries}}"
    assert about["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "1"
    free = split(render(ASLEEP, "cluster.sampler.queue=''"))[0]["metadata"]
    assert "pod-group" not in json.dumps(free)


def test_no_server_requests_more_asleep_than_awake() -> None:
    serve = split(render(ASLEEP))[0]
    awake = serve["container"]["resources"]["requests"]
    same = {name: json.dumps(amount) for name, amount in awake.items()}
    render(f"engine.asleep={{cpu: {same['cpu']}, memory: {same['memory']}}}")
    for asked, field in ((["{cpu: 501m}"], "cpu"), (["{memory: 64Gi}"], "memory")):
        with pytest.raises(UserError, match="is more than the server requests awake") as refusal:
            render(f"engine.asleep={asked[0]}")
        assert refusal.value.field == f"engine.asleep.{field}"
    shared = ["cluster.share.group=g", "cluster.share.request=512Mi"]
    with pytest.raises(UserError, match=r"requests awake \(512Mi\)"):
        render(ASLEEP, *shared)


@pytest.mark.parametrize(
    "sets",
    [
        ["engine.colocate=false"],
        ["engine=transformers", ASLEEP],
        ["engine.colocate=true", "engine.asleep={gpu: 1}"],
    ],
)
def test_what_never_sleeps_is_refused(sets: list[str]) -> None:
    with pytest.raises(UserError, match=r"asleep"):
        find_pipeline("grpo").configure(sets=[ASLEEP, *sets])


@contextmanager
def api_of(*resources: str) -> Iterator[Connection]:
    class Core(Answering):
        def do_GET(self) -> None:
            kinds = [
                {"name": each, "kind": "Pod", "namespaced": True, "singularName": "", "verbs": []}
                for each in resources
            ]
            self._answer(200, {"groupVersion": "v1", "resources": kinds})

    with ThreadingHTTPServer(("127.0.0.1", 0), Core) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield build_connection(
            Configuration(host=f"http://127.0.0.1:{server.server_port}"), "tuneloop", "rig"
        )
        server.shutdown()


def test_a_cluster_that_resizes_no_pods_is_refused() -> None:
    with api_of("pods", "pods/resize") as cluster:
        assert [*_find_resize_problems(cluster, render(ASLEEP))] == []
    with api_of("pods", "pods/status") as cluster:
        (problem,) = _find_resize_problems(cluster, render(ASLEEP))
        assert "Kubernetes 1.33" in str(problem)
        assert [*_find_resize_problems(cluster, render())] == []


def test_the_account_may_resize_pods_and_a_policy_leaves_it_its_own_requests() -> None:
    """tests/cluster has what the API server makes of the policy."""
    account, role, binding = yaml.safe_load_all((RIGHTS / "rights.yaml").read_text())
    assert (
        account["metadata"]["name"] == ACCOUNT and account["automountServiceAccountToken"] is False
    )
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]}]
    assert [each["name"] for each in binding["subjects"]] == [ACCOUNT]
    policy, bound = yaml.safe_load_all((RIGHTS / "policy.yaml").read_text())
    assert policy["spec"]["failurePolicy"] == "Fail" and bound["spec"]["validationActions"] == [
        "Deny"
    ]
    assert bound["spec"]["policyName"] == policy["metadata"]["name"]
