"""What `cluster.pod` says reaches every pod that is rendered, or is refused by name."""

import json
import re
from typing import Any

import pytest
import yaml

from tuneloop.argo.lint import lint_workflow
from tuneloop.cluster.pod_requests import compute_pod_requests
from tuneloop.cluster.preflight import CHECKS, list_references
from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.cluster.serving import render_servers
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.extensions.trainers.trainjob import (
    as_job,
    as_jobset,
    as_rayjob,
    as_trainjob,
    as_workflow,
)
from tuneloop.training.backends.native import Native
from tuneloop.workflow.manifest import check_workflow, parse_applied_object
from tuneloop.workflow.pod_settings import PodSettings
from tuneloop.workflow.settings import Cluster
from tuneloop.workflow.strategic_merge import apply_patch

COMMON: JsonObject = {
    "env": {"HF_ENDPOINT": "https://hub.internal"},
    "image_pull_secrets": ["registry"],
    "service_account": "stages",
    "annotations": {"team": "post-training"},
    "labels": {"cost-center": "7"},
    "volumes": {"/etc/ssl/corporate": "configmap/ca", "/models": "pvc/models"},
    "spec": {"nodeSelector": {"pool": "gpu"}, "affinity": {"nodeAffinity": {}}},
}
"""Settings that all kinds of objects have fields for."""
REST: JsonObject = {
    "env_from": ["secret/hub"],
    "priority_class": "batch",
    "network": {"rdma": {"rdma/hca": 2}, "nccl_env": {"NCCL_IB_HCA": "mlx5"}},
}


ARGUMENTS = {"policy": "p", "prompts": "q", "checkpoint": "c"}


def build_cluster(**pod: Any) -> Cluster:
    return Cluster.model_validate({"pod": pod, "trainer": {"memory": "4Gi"}})


def render(*sets: str, pipeline: str = "grpo", **pod: Any) -> JsonObject:
    all_sets = [f"cluster.pod={json.dumps(pod)}", *sets]
    found = find_pipeline(pipeline)
    return found.build(found.configure(sets=all_sets))


def backend() -> Native:
    return Native(stage="sft", args=ARGUMENTS)


def list_argo_pods(workflow: JsonObject) -> dict[str, JsonObject]:
    """Build the pods of a workflow's containers as Argo's controller does: template → pod."""
    pods: dict[str, JsonObject] = {}
    for template in workflow["spec"]["templates"]:
        if "container" not in template:
            continue
        spec: JsonObject = {
            "serviceAccountName": template.get(
                "serviceAccountName", workflow["spec"]["serviceAccountName"]
            ),
            "securityContext": template.get("securityContext", workflow["spec"]["securityContext"]),
            "volumes": template.get("volumes", []),
            "containers": [template["container"] | {"name": "main"}, {"name": "wait"}],
            "initContainers": [{"name": "init"}],
        }
        for owner in (workflow["spec"], template):
            spec = apply_patch(spec, yaml.safe_load(owner.get("podSpecPatch", "{}")))
        pods[template["name"]] = {"metadata": template.get("metadata", {}), "spec": spec}
    return pods


def check_pod(pod: JsonObject, account: str = "stages") -> JsonObject:
    """Check what `COMMON` says of a pod; return its container."""
    assert pod["metadata"]["annotations"]["team"] == "post-training"
    assert pod["metadata"]["labels"]["cost-center"] == "7"
    spec = pod["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["affinity"] == {"nodeAffinity": {}}
    assert spec["serviceAccountName"] == account
    sources = [volume.get("configMap", {}).get("name") for volume in spec["volumes"]]
    assert "ca" in sources
    container: JsonObject = next(
        item for item in spec["containers"] if item["name"] not in ("wait", "init")
    )
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["HF_ENDPOINT"] == "https://hub.internal"
    assert "TUNELOOP_IMAGE" in variables
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/etc/ssl/corporate", "/models"} <= mounts.keys()
    assert mounts["/models"] in [volume["name"] for volume in spec["volumes"]]
    return container


@pytest.mark.parametrize("grain", ["auto", "0"])
def test_every_argo_pod_has_it(grain: str) -> None:
    workflow = render(f"loop.iterations_per_pod={grain}", **COMMON, **REST)
    assert not lint_workflow(workflow)
    pods = list_argo_pods(workflow)
    assert len(pods) > 4
    for name, pod in pods.items():
        # The step that creates the next workflow keeps the account with that right.
        account = "tuneloop-continue" if name == "continue" else "stages"
        container = check_pod(pod, account)
        assert pod["spec"]["priorityClassName"] == "batch"
        # The store's own settings stay: a patch of envFrom would replace them.
        sources = [source.get("secretRef", {}).get("name") for source in container["envFrom"]]
        assert sources == [None, "tuneloop-store", "hub"]
    server = next(item for item in pods["serve"]["spec"]["containers"] if item["name"] == "main")
    assert server["resources"]["limits"]["rdma/hca"] == "2"
    assert server["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "NCCL_IB_HCA" in json.dumps(server)
    assert "NCCL_IB_HCA" not in json.dumps(pods["data-prep"])


def test_jobs_have_it() -> None:
    cluster = build_cluster(**COMMON, **REST)
    jobset = as_jobset(backend(), "tune", cluster)["spec"]["replicatedJobs"][0]
    pods = [
        jobset["template"]["spec"]["template"],
        as_job(backend(), "tune", cluster)["spec"]["template"],
    ]
    ray = as_rayjob(Native(stage="sft", nodes=2, args=ARGUMENTS), "tune", cluster)["spec"]
    pods.append(ray["rayClusterSpec"]["headGroupSpec"]["template"])
    pods.append(ray["rayClusterSpec"]["workerGroupSpecs"][0]["template"])
    for pod in pods:
        container = check_pod(pod)
        assert container["resources"]["limits"]["rdma/hca"] == "2"
        assert pod["spec"]["priorityClassName"] == "batch"
    submitter = check_pod(ray["submitterPodTemplate"])
    assert submitter["name"] == "ray-job-submitter"
    assert "rdma/hca" not in json.dumps(submitter)


def test_a_workflow_of_a_backend_has_it() -> None:
    workflow = as_workflow(backend(), "tune", build_cluster(**COMMON, **REST), dataset="s3://a/b")
    pods = list_argo_pods(workflow)
    check_pod(pods["dataset-initializer"])
    launcher = next(item for item in workflow["spec"]["templates"] if item["name"] == "node")
    patch = json.loads(launcher["podSpecPatch"])
    assert patch["imagePullSecrets"] == [{"name": "registry"}]
    assert patch["containers"][0] == {"name": "wait", "$patch": "delete"}
    job = parse_applied_object(launcher)
    check_pod(job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])


def test_a_stage_of_several_pods_has_it() -> None:
    workflow = render("nodes=2", pipeline="sft", **COMMON, **REST)
    assert not lint_workflow(workflow)
    launcher = next(item for item in workflow["spec"]["templates"] if item["name"] == "sft-job")
    job = parse_applied_object(launcher)
    check_pod(job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
    assert compute_pod_requests(launcher)["rdma/hca"] == 4


def test_deployments_of_servers_have_it() -> None:
    sets = ["engine.weights.kind=pull", "engine.weights.url=s3://bucket/weights"]
    found = find_pipeline("grpo")
    config: Any = found.configure(sets=[*sets, f"cluster.pod={json.dumps(COMMON | REST)}"])
    deployment, _ = render_servers(found.build(config), "rollout", config)
    pod = deployment["spec"]["template"]
    container = check_pod(pod)
    assert container["name"] == "serve"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "rollout"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300


def test_a_trainjob_has_what_it_can_override() -> None:
    job = as_trainjob(backend(), "tune", build_cluster(**COMMON))
    (override,) = job["spec"]["podTemplateOverrides"]
    assert override["metadata"]["annotations"] == {"team": "post-training"}
    assert override["metadata"]["labels"]["cost-center"] == "7"
    spec = override["spec"]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["serviceAccountName"] == "stages"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (container,) = spec["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [
        "/etc/ssl/corporate",
        "/models",
    ]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.internal"} in job["spec"]["trainer"]["env"]


@pytest.mark.parametrize(
    ("pod", "path"),
    [
        ({"env_from": ["secret/hub"]}, "env_from"),
        ({"priority_class": "batch"}, "priority_class"),
        ({"security": "openshift"}, "security"),
        ({"network": {"rdma": {"rdma/hca": 1}}}, "network"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
        ({"spec": {"containers": [{"name": "main", "tty": True}]}}, "spec.containers[main].tty"),
        (
            {"spec": {"containers": [{"name": "main", "volumeMounts": None}]}},
            "spec.containers[main].volumeMounts",
        ),
    ],
)
def test_a_trainjob_refuses_the_rest_by_name(pod: JsonObject, path: str) -> None:
    with pytest.raises(UserError, match="render a JobSet") as all_pods:
        as_trainjob(backend(), "tune", Cluster.model_validate({"pod": pod}))
    assert all_pods.value.field == f"cluster.pod.{path}"
    with pytest.raises(UserError) as trainers:
        as_trainjob(backend(), "tune", Cluster.model_validate({"trainer": {"pod": pod}}))
    assert trainers.value.field == f"cluster.trainer.pod.{path}"


def test_openshift_gives_the_ids() -> None:
    workflow = render("nodes=2", security="openshift")
    text = yaml.safe_dump(workflow)
    for field in ("runAsGroup", "fsGroup"):
        assert field not in text
    # Argo itself gives a user to the containers of a pod that applies a JobSet: it is deleted.
    assert set(re.findall(r"runAsUser.{6}", text)) == {'runAsUser":null'}
    for pod in list_argo_pods(workflow).values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        main = next(item for item in pod["spec"]["containers"] if item["name"] == "main")
        assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"name": "USER", "value": "tuneloop"} in main["env"]


def test_no_security_context_where_none_is_wanted() -> None:
    workflow = render(security="none")
    assert not lint_workflow(workflow)
    assert workflow["spec"].get("securityContext", {}) == {}
    for pod in list_argo_pods(workflow).values():
        for container in pod["spec"]["containers"]:
            assert container.get("securityContext", {}) == {}
        for volume in pod["spec"]["volumes"]:
            # Without fsGroup a group's files are not the user's to read.
            assert volume.get("secret", {}).get("defaultMode", 0o444) == 0o444


def test_a_role_adds_to_all_pods() -> None:
    workflow = render(
        'cluster.sampler.pod={env: {A: "2", B: "3"}, security: openshift, service_account: servers}',
        env={"A": "1"},
        security="restricted",
    )
    pods = list_argo_pods(workflow)

    def read(name: str) -> dict[str, Any]:
        containers = pods[name]["spec"]["containers"]
        main = next(item for item in containers if item["name"] == "main")
        return {item["name"]: item.get("value") for item in main["env"]}

    assert (read("serve")["A"], read("serve")["B"]) == ("2", "3")
    assert read("data-prep")["A"] == "1" and "B" not in read("data-prep")
    assert "runAsUser" not in pods["serve"]["spec"]["securityContext"]
    assert pods["data-prep"]["spec"]["securityContext"]["runAsUser"] == 1000
    assert pods["serve"]["spec"]["serviceAccountName"] == "servers"
    assert pods["data-prep"]["spec"]["serviceAccountName"] == "tuneloop-stage"


def test_argos_containers_are_patched_in_argos_pods_alone() -> None:
    limits = {"limits": {"cpu": "1"}}
    spec = {
        "containers": [{"name": "wait", "resources": limits}],
        "initContainers": [{"name": "init", "resources": limits}],
    }
    pod = list_argo_pods(render(spec=spec))["data-prep"]["spec"]
    wait = next(item for item in pod["containers"] if item["name"] == "wait")
    for container in (pod["initContainers"][0], wait):
        assert container["resources"]["limits"]["cpu"] == "1"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    job = as_job(backend(), "tune", build_cluster(spec=spec))["spec"]["template"]["spec"]
    assert [container["name"] for container in job["containers"]] == ["main"]
    assert "initContainers" not in job


def test_a_retrys_memory_stands_beside_it() -> None:
    workflow = render(
        "cluster.cpu.memory=1Gi",
        "cluster.cpu.memory_on_retry=2Gi",
        spec={"containers": [{"name": "main", "resources": {"limits": {"cpu": "2"}}}]},
    )
    template = next(item for item in workflow["spec"]["templates"] if item["name"] == "data-prep")
    (container,) = json.loads(template["podSpecPatch"])["containers"]
    assert container["resources"]["limits"]["cpu"] == "2"
    assert "2Gi" in container["resources"]["limits"]["memory"]


def test_another_resource_counts_gpus() -> None:
    workflow = render("cluster.sampler.gpus=1", gpu_resource="amd.com/gpu")
    serve = next(item for item in workflow["spec"]["templates"] if item["name"] == "serve")
    assert serve["container"]["resources"]["limits"]["amd.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in yaml.safe_dump(workflow["spec"]["templates"])


def test_the_preflight_sees_what_pods_need() -> None:
    references = set(list_references(render(**COMMON, **REST)))
    expected = {
        ("secret", "registry"),
        ("secret", "hub"),
        ("claim", "models"),
        ("service account", "stages"),
        ("config map", "ca"),
    }
    assert expected <= references


def test_the_preflight_reads_patches_that_delete() -> None:
    spec = {
        "imagePullSecrets": [{"name": "old", "$patch": "delete"}, {"name": "new"}],
        "volumes": [
            {"name": "a", "persistentVolumeClaim": None, "emptyDir": {}},
            {"name": "b", "configMap": {"name": "settings"}},
            {"name": "c", "configMap": {"name": "extra", "optional": True}},
        ],
        "containers": [{"name": "main", "envFrom": [{"secretRef": None}]}],
    }
    references = set(list_references(render(spec=spec)))
    assert references - set(list_references(render())) == {
        ("secret", "new"),
        ("config map", "settings"),
    }
    assert list(list_references(render(spec={"imagePullSecrets": None})))


def test_a_store_may_be_on_a_volume_of_the_settings() -> None:
    workflow = render(volumes={"/store": "pvc/runs", "/secrets": "secret/keys"})

    def check(store: str) -> list[str]:
        prepared = prepare_workflow(workflow, run="demo", store=store)
        find: Any = CHECKS["store"]
        return [str(error) for error in find(None, prepared)]

    assert check("/store/runs") == check("file:///store") == []
    for store in ("/store2/runs", "/secrets/runs", "/dev/shm/runs"):
        (error,) = check(store)
        assert "is a path that the pods do not share" in error


@pytest.mark.parametrize(
    ("pod", "path", "text"),
    [
        ({"spec": {"serviceAccountName": "a"}}, "spec.serviceAccountName", "service_account"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "q"}}, "labels.kueue", "cluster.queue"),
        ({"metadata": {"name": "x"}}, "metadata.name", "only labels and annotations"),
        ({"env": {"TUNELOOP_IMAGE": "x"}}, "env.TUNELOOP_IMAGE", "tuneloop's own"),
        ({"env_from": ["hub"]}, "env_from", "secret/NAME"),
        ({"volumes": {"/tmp": "emptydir/"}}, "volumes", "no path of a volume"),
        ({"volumes": {"/a": "claim/x"}}, "volumes./a", "pvc/NAME"),
        (
            {"spec": {"containers": [{"name": "main", "image": "x"}]}},
            "spec.containers[main].image",
            "cluster.images",
        ),
        (
            {"spec": {"containers": [{"name": "proxy", "image": "x"}]}},
            "spec.containers[proxy]",
            "restartPolicy: Always",
        ),
        ({"spec": {"containers": None}}, "spec.containers", "would delete"),
        ({"spec": {"initContainers": None}}, "spec.initContainers", "would delete"),
        ({"spec": {"$patch": "replace"}}, "spec.$patch", "would delete"),
        (
            {"spec": {"containers": [{"name": "main", "$patch": "delete"}]}},
            "spec.containers[main].$patch",
            "would delete",
        ),
        (
            {"spec": {"initContainers": [{"$patch": "replace"}]}},
            "spec.initContainers.$patch",
            "would delete",
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_its_path(pod: JsonObject, path: str, text: str) -> None:
    with pytest.raises(UserError) as refusal:
        render(**pod)
    assert refusal.value.field.startswith(f"cluster.pod.{path}")
    assert text in str(refusal.value)


def test_settings_left_out_change_nothing() -> None:
    assert PodSettings().build_spec_patch(is_accelerated=True) == {}
    assert Cluster().build_spec_patch("trainer") == {}


def test_a_run_of_this_machine_has_no_use_for_them() -> None:
    check_workflow(render(**COMMON, **REST)["spec"])
