"""Whether a run has room: in the ResourceQuotas and LimitRanges of its namespace, and on nodes."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.unit.argo.backend import describe_backend
from tests.unit.cluster.api import Cluster, connected, kubeconfig, serve_cluster
from tuneloop.cli import run_cli
from tuneloop.cluster.capacity import find_capacity_problems, find_capacity_warnings
from tuneloop.cluster.node_room import NodeRoom, pack_pods
from tuneloop.cluster.pod_shapes import KINDS, PodShape, list_pod_shapes
from tuneloop.config.loading import find_pipeline
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import RUN_LABEL

GPU = "nvidia.com/gpu"
INSIDE = "/api/v1/namespaces/tuneloop"
QUOTAS = f"{INSIDE}/resourcequotas"
LIMITS = f"{INSIDE}/limitranges"
PRESETS = Path(__file__).parents[3] / "manifests" / "presets"
Output = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Cluster]:
    with serve_cluster() as server:
        yield server


def build(pipeline: str = "grpo", *sets: str) -> dict[str, Any]:
    definition = find_pipeline(pipeline)
    return definition.build(definition.configure(None, sets))


def quota(used: dict[str, str] | None = None, **hard: str) -> dict[str, Any]:
    keys = {key.replace("__", "."): value for key, value in hard.items()}
    return {"metadata": {"name": "team"}, "spec": {"hard": keys}, "status": {"used": used or {}}}


def limit_range(**limits: dict[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": "defaults"},
        "spec": {"limits": [{"type": "Container", **limits}]},
    }


def node(name: str, cpu: str, memory: str = "64Gi", **more: Any) -> dict[str, Any]:
    allocatable = {"cpu": cpu, "memory": memory, "pods": "110"}
    spec = more.pop("spec", {})
    return {
        "metadata": {"name": name, "labels": more.pop("labels", {})},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def pod(name: str, node_name: str, cpu: str, **labels: str) -> dict[str, Any]:
    container = {"name": "main", "image": "i", "resources": {"requests": {"cpu": cpu}}}
    metadata = {"name": name, "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": node_name, "containers": [container]}}


def find_problems(server: Cluster, workflow: dict[str, Any]) -> list[str]:
    return [str(each) for each in find_capacity_problems(connected(server.url), workflow)]


def find_warnings(server: Cluster, workflow: dict[str, Any]) -> list[str]:
    return [str(each) for each in find_capacity_warnings(connected(server.url), workflow)]


@pytest.mark.parametrize(
    ("pipeline", "sets"),
    [
        ("sft_then_grpo", ()),
        ("dpo", ()),
        ("grpo", ("engine.kind=transformers", "loop.iterations_per_pod=0")),
        ("sft", ("nodes=2", "processes=2")),
    ],
)
def test_one_setting_gives_every_container_the_limits_that_a_quota_asks_for(
    pipeline: str, sets: tuple[str, ...]
) -> None:
    """Argo's own, too, and those of a job of several pods."""
    shapes = list_pod_shapes(build(pipeline, "cluster.limits=true", *sets))
    assert len(shapes) >= 4
    for shape in shapes:
        for kind in KINDS:
            for resource in ("cpu", "memory"):
                assert not shape.list_lacking(kind, resource), shape.template
    without = list_pod_shapes(build(pipeline, *sets))
    assert all("main" in each.list_lacking("limits", "cpu") for each in without if each.count == 1)


def test_a_cpu_limit_of_a_role(capsys: Output) -> None:
    shapes = {
        shape.template: shape
        for shape in list_pod_shapes(build("sft", "cluster.trainer.cpu_limit=3"))
    }
    assert str(shapes["sft"].sum("limits")["cpu"]) == "3"
    assert "cpu" not in shapes["data-prep"].sum("limits")
    low = ["render", "sft", "--set", "cluster.trainer.cpu_limit=100m"]
    assert run_cli(low) == 2
    assert "cpu_limit 100m is below cpu 500m: raise it" in capsys.readouterr().err


def test_a_quota_of_limits_that_no_container_has(server: Cluster) -> None:
    """Argo would say so, and try again for ever."""
    server.objects[QUOTAS] = [quota(limits__cpu="40", limits__memory="80Gi")]
    cpu, memory = find_problems(server, build("sft"))
    assert "quota: 'team': asks every container for limits.cpu, and some have none:" in cpu
    assert "data-prep (main, wait, init)" in cpu
    assert "--set cluster.limits=true" in cpu
    assert "limits.memory" in memory and "sft (wait, init)" in memory, "its memory is estimated"
    assert not find_problems(server, build("sft", "cluster.limits=true"))
    preset = [PRESETS / "quota.yaml"]
    grpo = find_pipeline("grpo")
    workflow = grpo.build(
        grpo.configure(preset, ["cluster.cpu={memory: 2Gi, memory_on_retry: 5Gi}"])
    )
    assert not find_problems(server, workflow), "the preset is for it"
    defaults = {"cpu": "1", "memory": "2Gi"}
    server.objects[LIMITS] = [limit_range(default=defaults)]
    assert not find_problems(server, build("sft")), "a LimitRange gives them"


def test_what_the_settings_patch_into_pods_counts(server: Cluster) -> None:
    sidecar = (
        "{name: proxy, image: i, restartPolicy: Always, resources: {limits: {cpu: 2, memory: 1Gi}}}"
    )
    sets = [
        "cluster.pod.spec={containers: [{name: main, resources: {limits: {cpu: 3}}},"
        " {name: wait, resources: {limits: {cpu: 1}}}],"
        f" initContainers: [{{name: init, resources: {{limits: {{cpu: 1}}}}}}, {sidecar}],"
        " nodeSelector: {pool: fast}, tolerations: [{operator: Exists}]}"
    ]
    workflow = build("sft", "cluster.cpu.memory=1Gi", "cluster.cpu.memory_on_retry=2Gi", *sets)
    shapes = {shape.template: shape for shape in list_pod_shapes(workflow)}
    shape = shapes["data-prep"]
    assert shape.node_selector == {"pool": "fast"}
    assert list(shape.tolerations) == [{"operator": "Exists"}]
    limits = shape.sum("limits")
    assert str(limits["cpu"]) == "6", "main, wait and the sidecar"
    assert limits["memory"] == 3 * 2**30, "a retry's, and the sidecar's"
    assert not shape.list_lacking("limits", "cpu")
    assert shape.list_lacking("limits", "memory") == ["wait", "init"]
    server.objects[QUOTAS] = [quota(limits__cpu="5")]
    (problem,) = find_problems(server, workflow)
    assert "allows limits.cpu 5, and the run asks for limits.cpu 6" in problem


def test_pods_are_packed_by_what_is_scarce() -> None:
    """The pod with the most CPUs, first, would take the node with the two GPUs."""

    def shape(template: str, cpu: str, **more: str) -> PodShape:
        container = {"name": "main", "resources": {"requests": {"cpu": cpu} | more}}
        return PodShape(template, [container])

    def room(name: str, cpu: int, gpus: int) -> NodeRoom:
        free = {"cpu": Decimal(cpu), GPU: Decimal(gpus)}
        return NodeRoom(name=name, labels={}, taints=[], free=free)

    shapes = [shape("score", "4"), shape("train", "2", **{GPU: "2"})]
    rooms = [room("first", 4, 2), room("second", 8, 1)]
    assert pack_pods(shapes, rooms)
    assert not pack_pods(shapes, rooms[:1])


@pytest.mark.parametrize(
    ("first", "retry"), [("2.5Gi", "4.5Gi"), ("1.5Gi", "4.5Gi"), ("1Gi", "5Gi")]
)
def test_the_memory_of_a_retry_counts_with_a_point_too(first: str, retry: str) -> None:
    sets = [f"cluster.cpu.memory={first}", f"cluster.cpu.memory_on_retry={retry}"]
    shapes = {shape.template: shape for shape in list_pod_shapes(build("sft", *sets))}
    limits = shapes["data-prep"].sum("limits")
    assert limits["memory"] == parse_resource_quantity(retry)


def test_a_quota_that_the_run_exceeds_at_any_time(server: Cluster) -> None:
    workflow = build("grpo", "cluster.limits=true")
    server.objects[QUOTAS] = [quota(pods="1")]
    (problem,) = find_problems(server, workflow)
    assert "quota: 'team': allows pods 1, and the run asks for pods 2 at a time" in problem
    assert "(serve beside its largest stage)" in problem
    server.objects[QUOTAS] = [quota({"pods": "9"}, pods="10")]
    assert not find_problems(server, workflow)
    (warning,) = find_warnings(server, workflow)
    assert "has pods 1 of pods 10 left, and the run asks for pods 2 at a time" in warning
    server.objects[QUOTAS][0]["spec"]["scopes"] = ["BestEffort"]
    assert not find_warnings(server, workflow), "no pod of a run is that"


def test_servers_that_fill_a_quota(server: Cluster) -> None:
    """16Gi of limits and 6400Mi a server: both servers are up, and no stage can start."""
    workflow = build("grpo", "cluster.limits=true", "cluster.sampler.memory=6144Mi")
    server.objects[QUOTAS] = [quota(limits__memory="15Gi")]
    assert not find_problems(server, workflow)
    (warning,) = find_warnings(server, workflow)
    assert "has room for 1 at a time of runs like this one, and for the servers of 2" in warning
    assert "limits.memory 15Gi; of a run, its servers limits.memory 6.25Gi" in warning
    assert not find_warnings(server, build("sft", "cluster.limits=true")), "it has no server"


def test_a_limit_range_that_contradicts_the_run(server: Cluster) -> None:
    server.objects[LIMITS] = [limit_range(default={"cpu": "300m"})]
    problems = find_problems(server, build("sft"))
    assert any(
        "sft, container main: 'cpu 0.5': is requested, and LimitRange defaults gives it a limit of"
        " cpu 0.3" in problem
        for problem in problems
    )
    assert not find_problems(server, build("sft", "cluster.limits=true"))
    server.objects[LIMITS] = [limit_range(max={"memory": "1Gi"})]
    problems = find_problems(server, build("sft"))
    assert any("allows a container (memory 1Gi)" in problem for problem in problems)


def test_a_node_that_holds_the_server_and_not_a_stage_beside_it(server: Cluster) -> None:
    """A server of 510m, a stage of 510m, and controllers of 1.1 CPU on a node of two."""
    server.objects["/api/v1/nodes"] = [node("n", "2")]
    server.objects["/api/v1/pods"] = [
        pod("controllers", "n", "1100m"),
        pod("d1-serve", "n", "510m", **{RUN_LABEL: "d1"}),
    ]
    (warning,) = find_warnings(server, build("grpo"))
    assert "run at a time and ask for cpu 1.02" in warning
    assert "nodes do not have beside other pods (cpu 0.9" in warning
    server.objects["/api/v1/pods"] = [pod("controllers", "n", "400m")]
    (warning,) = find_warnings(server, build("grpo"))
    assert "nodes: 1: has room for 2 at a time of runs like this one, and for the servers of 3" in (
        warning
    )
    server.objects["/api/v1/nodes"] = [node("n", "32")]
    assert not find_warnings(server, build("grpo"))


def test_pods_that_fit_on_no_node(server: Cluster) -> None:
    tainted = {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}
    server.objects["/api/v1/nodes"] = [
        node("small", "4"),
        node("large", "64", spec=tainted, labels={"pool": "large"}),
        node("cordoned", "64", spec={"unschedulable": True}),
    ]
    workflow = build("sft", "cluster.trainer.cpu=8")
    (warning,) = find_warnings(server, workflow)
    assert (
        "sft: 'cpu 8.01, memory" in warning and "fits on none of 2 nodes (at most cpu 64" in warning
    )
    tolerations = "cluster.trainer.tolerations=[{key: gpu, operator: Exists}]"
    assert not find_warnings(server, build("sft", "cluster.trainer.cpu=8", tolerations))
    (warning,) = find_warnings(server, build("sft", "cluster.trainer.node_selector={pool: none}"))
    assert "fits on none" in warning


def test_doctor_and_submit_say_it(
    server: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    server.objects = describe_backend("tuneloop")
    server.objects["/api/v1/nodes"][0] |= {"spec": {}}
    server.objects["/api/v1/nodes"][0]["status"]["allocatable"] = {"cpu": "1", "memory": "64Gi"}
    monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert run_cli(["doctor", "grpo"]) == 0
    assert "run at a time and ask for cpu 1.02" in capsys.readouterr().out
    submit = ["submit", "grpo", "--run", "a", "--store", "s3://b/runs", "--check"]
    assert run_cli(submit) == 0
    assert "note: cluster: 'c': serve and" in capsys.readouterr().err
    server.objects[QUOTAS] = [quota(limits__cpu="40")]
    assert run_cli(submit) == 2
    assert "asks every container for limits.cpu" in capsys.readouterr().err
