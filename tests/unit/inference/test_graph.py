"""What is written of a graph, and when it counts as ready; against a real API in tests/cluster/test_fleet.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.unit.cluster.api import connected, serve_cluster
from tuneloop.cli import run_cli
from tuneloop.core.errors import UserError
from tuneloop.inference.fleet.graph import (
    GROUP,
    KIND,
    PLURAL,
    VERSIONS,
    _ensure,
    _probe,
    find_api_version,
    find_drift,
    frontend_gate,
    operator_gate,
    own_graph,
    pods_gate,
    render_graph,
)
from tuneloop.kube.connection import IN_CLUSTER, ApiRefusal, Connection
from tuneloop.workflow.settings import RUN_LABEL

BETA = """
apiVersion: v1
kind: Secret
metadata: {name: not-this-one}
---
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeployment
metadata: {name: graph, labels: {team: rl}}
spec:
  components:
    - {name: Frontend, type: frontend}
    - name: Worker
      type: worker
      podTemplate:
        spec: {serviceAccountName: theirs, containers: [{name: main, image: own:1}]}
"""
ALPHA = {
    "apiVersion": "nvidia.com/v1alpha1",
    "kind": "DynamoGraphDeployment",
    "metadata": {"name": "graph"},
    "spec": {
        "services": {
            "Worker": {"replicas": 1, "extraPodSpec": {"mainContainer": {"command": ["serve"]}}}
        }
    },
}


def test_a_manifest_is_changed_where_it_is_told_to_and_nowhere_else() -> None:
    documents = list(yaml.safe_load_all(BETA))
    made = render_graph(
        documents,
        name="mine",
        namespace="ns",
        labels={"run": "demo"},
        image="default:2",
        sets=["spec.components.Worker.replicas=3", "spec.env=[{name: A, value: b}]"],
    )
    assert made["metadata"] == {
        "name": "mine",
        "namespace": "ns",
        "labels": {"team": "rl", "run": "demo"},
    }
    frontend, worker = made["spec"]["components"]
    assert frontend["podTemplate"] == {
        "spec": {"containers": [{"name": "main", "image": "default:2"}]}
    }
    assert worker == {**documents[1]["spec"]["components"][1], "replicas": 3}, (
        "its account and image stay"
    )
    assert documents == list(yaml.safe_load_all(BETA))
    assert find_drift(documents[1]["spec"], made["spec"], "spec") == []
    assert find_drift(made["spec"], documents[1]["spec"], "spec") == [
        "spec.components[0].podTemplate.spec.containers",
        "spec.components[1].replicas",
        "spec.env",
    ]
    older = render_graph([ALPHA], image="default:2", sets=["spec.services.Worker.replicas=2"])
    assert older["spec"]["services"]["Worker"] == {
        "replicas": 2,
        "extraPodSpec": {"mainContainer": {"command": ["serve"], "image": "default:2"}},
    }


@pytest.mark.parametrize(
    ("documents", "sets", "said"),
    [
        ([], [], "manifest: '0 of kind DynamoGraphDeployment'"),
        ([ALPHA, ALPHA], [], "'2 of kind"),
        ([{**ALPHA, "metadata": {}}], [], "has no name"),
        ([ALPHA], ["spec.replicas"], "write path=value"),
        ([ALPHA], ["metadata.name.there=1"], "below no mapping"),
        (
            [{**ALPHA, "spec": {"components": []}}],
            ["spec.components.Worker.replicas=1"],
            "nothing named Worker",
        ),
    ],
)
def test_a_manifest_that_can_not_be_meant(documents: list[Any], sets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        render_graph(documents, sets=sets)


@pytest.mark.parametrize(
    ("status", "open_", "why"),
    [
        (None, False, "not seen"),
        ({"state": "pending"}, False, "pending"),
        ({"state": "successful"}, True, "successful"),
        (
            {"state": "successful", "observedGeneration": 1},
            False,
            "successful, of an earlier generation",
        ),
        ({"state": "successful", "observedGeneration": 2}, True, "successful"),
    ],
)
def test_the_operators_gate(status: Any, open_: bool, why: str) -> None:
    gate = operator_gate({"metadata": {"generation": 2}, "status": status})
    assert (gate.open, gate.reason) == (open_, why)


def test_the_pods_gate() -> None:
    def pod(ready: str, leaving: bool = False) -> Any:
        conditions = [SimpleNamespace(type="Ready", status=ready)]
        metadata = SimpleNamespace(deletion_timestamp="now" if leaving else None)
        return SimpleNamespace(metadata=metadata, status=SimpleNamespace(conditions=conditions))

    assert pods_gate([]).reason == "0 of 0 ready" and not pods_gate([]).open
    assert not pods_gate([pod("True"), pod("False")]).open
    assert pods_gate([pod("True"), pod("False", leaving=True)]).open


@pytest.mark.parametrize(
    ("status", "open_"), [(200, True), (404, True), (500, True), (502, False), (503, False)]
)
def test_the_frontends_gate(status: int, open_: bool) -> None:
    assert frontend_gate(status).open is open_
    assert (
        frontend_gate(0, "ConnectionRefused").reason == "ConnectionRefused"
        and not frontend_gate(0).open
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_newest_version_of_the_api_is_taken_and_one_that_may_not_be_looked_at_counts_as_there(
    version: str,
) -> None:
    path, verbs = (
        f"/apis/{GROUP}/{version}",
        {"namespaced": True, "singularName": "", "kind": KIND, "verbs": []},
    )
    with serve_cluster() as api:
        with pytest.raises(
            UserError, match=r"has no DynamoGraphDeployment .*; install Dynamo's operator first"
        ):
            find_api_version(connected(api.url))
        api.objects[path] = {
            "groupVersion": f"{GROUP}/{version}",
            "resources": [{"name": PLURAL, **verbs}],
        }
        assert find_api_version(connected(api.url)) == version
        del api.objects[path]
        api.denied[path] = PLURAL
        assert find_api_version(connected(api.url)) == version


def test_a_frontend_is_asked_by_its_name_in_a_pod_and_through_the_api_elsewhere() -> None:
    with serve_cluster() as api:
        proxied = "/api/v1/namespaces/tuneloop/services/graph-frontend%3A8000/proxy/health"
        assert _probe(connected(api.url), "graph-frontend", 8000) == (404, "")
        api.objects[proxied] = {"status": "ok"}
        assert _probe(connected(api.url), "graph-frontend", 8000) == (200, "")
        pod = Connection(
            "1", IN_CLUSTER, "", None, None, None
        )  # so that service.namespace is 127.0.0.1
        assert _probe(pod, "127.0.0", api.server_port) == (404, ""), "/health of the service itself"


class Keeping:
    """What `_ensure` uses of Kubernetes, with one graph in it."""

    def __init__(self, live: dict[str, Any]) -> None:
        self.live: dict[str, Any] | None = live
        self.calls = list[str]()

    def get_api_resources(self, group: str, version: str) -> Any:
        return SimpleNamespace(resources=[SimpleNamespace(name=PLURAL)])

    def get_namespaced_custom_object(self, *place: str) -> dict[str, Any]:
        if self.live is None:
            raise ApiRefusal("test", 404, "not found")
        return self.live

    def delete_namespaced_custom_object(self, *place: str, **options: str) -> None:
        self.calls.append("delete")
        self.live = None

    def create_namespaced_custom_object(
        self, group: str, version: str, space: str, plural: str, body: Any
    ) -> None:
        self.calls.append("create")
        self.live = body


@pytest.mark.parametrize(
    ("replicas", "recreate", "calls", "said"),
    [
        (1, False, [], "stands already"),
        (1, True, [], "stands already"),
        (2, False, [], "stands already, and differs: spec.services.Worker.replicas"),
        (2, True, ["delete", "create"], "created"),
    ],
)
def test_a_graph_that_differs_is_replaced_where_it_is_asked_for(
    replicas: int, recreate: bool, calls: list[str], said: str
) -> None:
    api, told = Keeping(render_graph([ALPHA])), list[str]()
    wanted = render_graph([ALPHA], sets=[f"spec.services.Worker.replicas={replicas}"])
    assert _ensure(
        Connection("ns", "test", "", None, api, None), wanted, recreate, told.append
    ) is bool(calls)
    assert (api.calls, told) == (calls, [f"graph: {said}"])
    assert api.live == (wanted if calls else render_graph([ALPHA]))


class Api:
    """What `own_graph` uses of Kubernetes: a workflow, and a graph that its operator changes before the first patch."""

    def __init__(self, run: str) -> None:
        self.changes, self.patches, self.run = 0, list[dict[str, Any]](), run

    def get_api_resources(self, group: str, version: str) -> Any:
        return SimpleNamespace(resources=[SimpleNamespace(name=PLURAL)])

    def get_namespaced_custom_object(
        self, group: str, version: str, space: str, plural: str, name: str
    ) -> Any:
        if plural == "workflows":
            about = {"name": name, "uid": "w1", "labels": {RUN_LABEL: "demo"}}
            return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": about}
        about = {
            "name": name,
            "resourceVersion": str(self.changes),
            "labels": {RUN_LABEL: self.run},
        }
        return {"metadata": {**about, "ownerReferences": [{"uid": "other"}]}}

    def patch_namespaced_custom_object(self, *words: Any) -> None:
        self.changes += not self.patches
        self.patches.append(words[-1]["metadata"])
        if words[-1]["metadata"]["resourceVersion"] != str(self.changes):
            raise ApiRefusal("test", 409, "Conflict")


@pytest.mark.parametrize(("run", "patches"), [("demo", 2), ("another", 0)])
def test_the_owner_of_a_graph(run: str, patches: int) -> None:
    """Beside others, after a conflict again, and none of a graph that another run made."""
    api, said = Api(run), list[str]()
    own_graph(
        Connection("ns", "test", "", None, api, None),
        {"metadata": {"name": "graph"}},
        "demo",
        said.append,
    )
    assert len(api.patches) == patches and len(said) == (not patches)
    if api.patches:
        other, mine = api.patches[-1]["ownerReferences"]
        assert (other, mine["uid"], mine["controller"]) == ({"uid": "other"}, "w1", False)


def test_submitting_with_a_graph_sets_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(BETA)
    line = ["submit", "grpo", "--run", "demo", "--store", "s3://b/p", "--fleet", str(path)]
    assert run_cli([*line, "--set", "engine.rollout_endpoint_url=http://a"]) == 2
    assert (
        "a Dynamo graph's name gives its URL: set weights.fleet or rollout_endpoint_url"
        in capsys.readouterr().err
    )
    assert run_cli([*line, "--server", "http://argo"]) == 2
    assert "--fleet" in capsys.readouterr().err
    path.write_text("a: [")
    assert run_cli(line) == 2 and "is not YAML" in capsys.readouterr().err


def test_a_dry_run_prints_what_would_be_created_and_asks_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "graph.yaml").write_text(BETA)
    changed = [
        "--set",
        "spec.components.Worker.replicas=3",
        "--image",
        "default:2",
        "--name",
        "mine",
        "--dry-run",
    ]
    assert run_cli(["fleet", "up", str(tmp_path / "graph.yaml"), *changed]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert made["metadata"] == {"name": "mine", "labels": {"team": "rl"}, "namespace": "tuneloop"}
    assert made["spec"]["components"][1]["replicas"] == 3
    line = ["submit", "grpo", "--run", "demo", "--store", "s3://b/p", "--dry-run"]
    assert run_cli([*line, "--fleet", str(tmp_path / "graph.yaml")]) == 0
    graph, workflow = yaml.safe_load_all(capsys.readouterr().out)
    assert (graph["kind"], graph["metadata"]["labels"][RUN_LABEL]) == (KIND, "demo")
    assert {"name": "run", "value": "demo"}.items() <= workflow["spec"]["arguments"]["parameters"][
        0
    ].items()
    assert (
        "dynamo://graph.tuneloop" in json.dumps(workflow)
        and workflow["spec"]["onExit"] == "end-graph"
    )
    assert run_cli(line) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert made["metadata"]["labels"][RUN_LABEL] == "demo" and "onExit" not in made["spec"]
