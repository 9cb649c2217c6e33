"""What `manifests/`, `images/` and `requirements/` promise, as far as it can be seen without a cluster."""

import copy
import functools
import json
import re
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from tests.unit.planning.test_plan import PUBLISHED
from tuneloop.cli import run_cli
from tuneloop.cluster.launch import KINDS, Kind
from tuneloop.cluster.pod_requests import compute_pod_requests
from tuneloop.config.loading import dump_workflow, find_pipeline, list_pipelines
from tuneloop.core.ends import RETRIED_CODES
from tuneloop.extensions.gateway.command import GRACE_S
from tuneloop.extensions.gateway.jobs import Jobs
from tuneloop.extensions.gateway.sessions import SessionRequest
from tuneloop.inference import sandbox_server
from tuneloop.stages.deploy_model import deploy_model
from tuneloop.workflow.manifest import labels_of
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import QUEUE_LABEL

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"


@functools.cache
def objects() -> list[dict]:
    files = [
        path
        for path in MANIFESTS.rglob("*.yaml")
        if path.name not in ("kustomization.yaml", "images.yaml")
        # Settings of tuneloop, no objects: tests/golden/test_presets.py.
        and path.parent.name != "presets"
    ]
    loaded = [
        item for path in sorted(files) for item in yaml.load_all(path.read_text(), yaml.CSafeLoader)
    ]
    return [item for item in loaded if isinstance(item, dict)]


def named(kind: str) -> dict[str, dict]:
    return {item["metadata"]["name"]: item for item in objects() if item["kind"] == kind}


@pytest.mark.parametrize("path", sorted(MANIFESTS.rglob("kustomization.yaml")), ids=str)
def test_what_a_kustomization_names_exists(path: Path) -> None:
    told = yaml.safe_load(path.read_text())
    patches = [patch["path"] for patch in told.get("patches", ()) if "path" in patch]
    for name in [
        *told.get("resources", ()),
        *told.get("components", ()),
        *told.get("configurations", ()),
        *patches,
    ]:
        assert (path.parent / name).exists(), name


def test_the_namespace_is_restricted() -> None:
    labels = named("Namespace")["tuneloop"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_rights_are_namespaced_and_without_wildcards() -> None:
    reviews = [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    ]
    assert {name: role["rules"] for name, role in named("ClusterRole").items()} == {
        "tuneloop-gateway": reviews
    }
    assert {binding["roleRef"]["name"] for binding in named("ClusterRoleBinding").values()} == {
        "tuneloop-gateway"
    }
    for role in named("Role").values():
        for rule in role["rules"]:
            assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which renders overlays")
@pytest.mark.parametrize("overlay", ["local", "gpu"])
def test_what_pods_may_reach_is_named(overlay: str) -> None:
    """Of each rendered rule that lets something out: whom it names, and at which ports."""
    text = subprocess.check_output(
        ["kubectl", "kustomize", MANIFESTS / "overlays" / overlay], text=True
    )
    rendered = [
        item for item in yaml.load_all(text, yaml.CSafeLoader) if item["kind"] == "NetworkPolicy"
    ]
    policies = {item["metadata"]["name"]: item["spec"] for item in rendered}
    private = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]
    _, api = policies["dns-and-api"]["egress"]
    assert {rule["port"] for rule in api["ports"]} == {443, 6443}
    assert [to["ipBlock"]["cidr"] for to in api["to"]] == (
        private if overlay == "local" else ["10.96.0.1/32", "192.0.2.1/32"]
    )
    (store,) = policies["store"]["egress"]
    if overlay == "gpu":
        assert {*private, "169.254.0.0/16"} < {*store["to"][0]["ipBlock"]["except"]}
    for spec in policies.values():
        for rule in spec.get("egress", ()):
            assert rule.get("ports") or rule["to"] == [{"podSelector": {}}]
            assert rule.get("to") or rule["ports"] == [{"port": 7070, "protocol": "TCP"}], (
                "any address at 443"
            )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which renders overlays")
def test_a_sandbox_reaches_nothing_and_is_reached_at_one_port(tmp_path: Path) -> None:
    """Apart from the namespace whose pods reach the store; the same pods where agent-sandbox keeps them warm."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    rendered = {}
    for name, more in (("own", ""), ("agent", ", ../../components/agent-sandbox")):
        (overlay := tmp_path / "manifests/overlays" / name).mkdir()
        text = f"resources: [../../base]\ncomponents: [../../components/sandbox{more}]\n"
        (overlay / "kustomization.yaml").write_text(text)
        made = subprocess.check_output(["kubectl", "kustomize", overlay], text=True)
        of_sandbox = [
            item
            for item in yaml.load_all(made, yaml.CSafeLoader)
            if "tuneloop-sandbox" in json.dumps(item)
        ]
        rendered[name] = {
            (item["kind"], item["metadata"].get("namespace")): item for item in of_sandbox
        }
    own, agent = rendered["own"], rendered["agent"]
    at = "tuneloop-sandbox"
    policy = own["NetworkPolicy", at]["spec"]
    assert (
        policy["podSelector"] == {}
        and policy["policyTypes"] == ["Ingress", "Egress"]
        and "egress" not in policy
    )
    ((rule,), port) = policy["ingress"], {"port": 8000, "protocol": "TCP"}
    assert rule["ports"] == own["NetworkPolicy", "tuneloop"]["spec"]["egress"][0]["ports"] == [port]
    assert (
        own["Namespace", None]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        == "restricted"
    )
    pod = own["Deployment", at]["spec"]["template"]
    assert (
        pod["spec"]["runtimeClassName"] == "gvisor"
        and pod["spec"]["automountServiceAccountToken"] is False
    )
    assert own["Service", at]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert ("Deployment", at) not in agent and agent.keys() - own.keys() == {
        ("SandboxTemplate", at),
        ("SandboxWarmPool", at),
    }
    assert agent["SandboxTemplate", at]["spec"] == {
        "networkPolicyManagement": "Unmanaged",
        "podTemplate": pod,
    }


def test_the_base_names_no_address_of_an_api_server() -> None:
    """An overlay that forgets to say where it is reaches none, in place of everything."""
    assert named("NetworkPolicy")["dns-and-api"]["spec"]["egress"][1]["to"] == [
        {"ipBlock": {"cidr": "192.0.2.1/32"}}
    ]


def test_servers_listen_at_their_pods_address_and_have_time_to_end() -> None:
    for name in ("rollout", "sandbox"):
        container = named("Deployment")[f"tuneloop-{name}"]["spec"]["template"]["spec"][
            "containers"
        ][0]
        assert container["args"][container["args"].index("--host") + 1] == "$(POD_IP)"
    sandbox = named("Deployment")["tuneloop-sandbox"]["spec"]["template"]["spec"]
    assert sandbox["terminationGracePeriodSeconds"] > sandbox_server.GRACE_S
    job = Jobs(client.ApiClient(), None)._job(
        "session-1", SessionRequest(namespace="a"), "me", "s3://b/a/session-1"
    )
    pod = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command[command.index("--host") + 1] == "$(POD_IP)"
    assert command[command.index("--grace") + 1] == str(pod["terminationGracePeriodSeconds"])
    assert (
        named("Deployment")["tuneloop-gateway"]["spec"]["template"]["spec"][
            "terminationGracePeriodSeconds"
        ]
        > GRACE_S
    )


def test_the_tracker_runs_a_command_that_there_is_and_reaches_the_server_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    container = named("Deployment")["tuneloop-tracker"]["spec"]["template"]["spec"]["containers"][0]
    (chosen,) = (each["value"] for each in container["env"] if each["name"] == "TUNELOOP_TRACKERS")
    server = named("Service")["mlflow"]
    assert (
        chosen == f"mlflow+http://{server['metadata']['name']}:{server['spec']['ports'][0]['port']}"
    )
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert run_cli([*container["command"][1:], *container["args"]]) == 2
    assert capsys.readouterr().err.startswith("error: cluster: '/nowhere': "), (
        "all else is as the command takes it"
    )
    rules = named("Role")["tuneloop-tracker"]["rules"]
    assert rules == [{"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["list"]}]


NEEDS_KUBECTL = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which renders overlays"
)
OF_NAMESPACE_ADMINS = {
    "",
    "apps",
    "argoproj.io",
    "batch",
    "coordination.k8s.io",
    "discovery.k8s.io",
    "resource.k8s.io",
}
"""API groups in which Kubernetes' ClusterRole `admin` has rights, with what Argo Workflows adds to it."""


def render(folder: Path) -> list[dict]:
    text = subprocess.check_output(["kubectl", "kustomize", folder], text=True)
    return list(yaml.load_all(text, yaml.CSafeLoader))


@NEEDS_KUBECTL
def test_an_admin_of_a_namespace_may_create_the_namespaced_half() -> None:
    """The other half is an admin's of the cluster, and both are the base."""
    halves = {name: render(MANIFESTS / name) for name in ("namespaced", "admin/namespace", "base")}
    namespaced = halves["namespaced"]
    assert {item["kind"] for item in namespaced} == {
        "NetworkPolicy",
        "Role",
        "RoleBinding",
        "Secret",
        "ServiceAccount",
    }
    for item in namespaced:
        for rule in item.get("rules", ()):
            assert {*rule["apiGroups"]} <= OF_NAMESPACE_ADMINS, item["metadata"]["name"]
    for item in halves["admin/namespace"]:
        groups = {group for rule in item.get("rules", ()) for group in rule["apiGroups"]}
        assert item["kind"] != "Role" or groups - OF_NAMESPACE_ADMINS, item["metadata"]["name"]
    # Kubernetes refuses a Role, and a binding of one, with rights that its creator has not.
    roles = {item["metadata"]["name"] for item in namespaced if item["kind"] == "Role"}
    bound = {item["roleRef"]["name"] for item in namespaced if item["kind"] == "RoleBinding"}
    assert bound <= roles

    def list_names(items: list[dict]) -> list[tuple[str, str]]:
        return sorted((item["kind"], item["metadata"]["name"]) for item in items)

    assert list_names(halves["base"]) == sorted(
        list_names(namespaced) + list_names(halves["admin/namespace"])
    )


@NEEDS_KUBECTL
def test_an_overlay_renames_the_namespace_everywhere(tmp_path: Path) -> None:
    """Flags, subjects and the namespaces that a ClusterQueue admits included."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    overlay = tmp_path / "manifests/overlays/team-a"
    overlay.mkdir()
    components = [
        "gateway",
        "model-deployer",
        "model-server",
        "notifications",
        "pipelines",
        "resize",
        "rollout-autoscaler",
        "rollout-server",
        "s3",
        "tracker",
        "ui",
    ]
    settings = {
        "namespace": "team-a",
        "resources": ["../../admin", "../../namespaced"],
        "components": [f"../../components/{name}" for name in components],
    }
    (overlay / "kustomization.yaml").write_text(json.dumps(settings))
    rendered = render(overlay)
    for item in rendered:
        assert item["metadata"].get("namespace", "team-a") == "team-a"
        text = json.dumps(item)
        assert '"namespace": "tuneloop"' not in text and "tuneloop.svc" not in text, text
        assert '"--namespace", "tuneloop"' not in text
        assert '"kubernetes.io/metadata.name": "tuneloop"' not in text
    by_kind = {item["kind"]: item for item in rendered}
    assert by_kind["Namespace"]["metadata"]["name"] == "team-a"
    selector = by_kind["ClusterQueue"]["spec"]["namespaceSelector"]["matchLabels"]
    assert selector.items() <= by_kind["Namespace"]["metadata"]["labels"].items()


@NEEDS_KUBECTL
def test_the_images_of_an_overlay_replace_all_that_are_named() -> None:
    """Also in the variable that artifacts record."""
    for item in render(MANIFESTS / "overlays/gpu"):
        # The gateway's settings are a text in a ConfigMap, and the overlay's to write.
        if item["kind"] in ("Deployment", "WorkflowTemplate"):
            assert ":dev" not in json.dumps(item["spec"].get("templates", item["spec"]))


def test_who_makes_tokens_of_servers_can_read_none() -> None:
    rules = [
        rule
        for role in ("tuneloop-continue", "tuneloop-user")
        for rule in named("Role")[role]["rules"]
    ]
    of_secrets = [rule for rule in rules if "secrets" in rule["resources"]]
    assert [rule["verbs"] for rule in of_secrets if "resourceNames" not in rule] == [
        ["create"],
        ["create"],
    ]


def test_stages_have_an_account_without_rights() -> None:
    bound = {
        subject["name"]
        for binding in named("RoleBinding").values()
        for subject in binding["subjects"]
    }
    assert "tuneloop-stage" in named("ServiceAccount") and "tuneloop-stage" not in bound
    mounted = {
        name
        for name, account in named("ServiceAccount").items()
        if account["automountServiceAccountToken"]
    }
    talkative = {
        "tuneloop-claims",
        "tuneloop-continue",
        "tuneloop-graphs",
        "tuneloop-launcher",
        "tuneloop-gateway",
    }
    talkative |= {
        "tuneloop-rollout-autoscaler",
        "tuneloop-ui",
        "tuneloop-tracker",
        "tuneloop-deployer",
    }
    assert mounted <= talkative  # whose pods talk to the API server
    one = {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "resourceNames": ["tuneloop-model"],
        "verbs": ["get", "patch"],
    }
    assert named("Role")["tuneloop-deployer"]["rules"] == [one] and deploy_model.account in mounted
    assert deploy_model.Params().deployment in named("Deployment")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.api[2])
def test_the_launcher_may_start_every_kind_of_job_and_people_may_end_it(kind: Kind) -> None:
    for roles, verbs in (
        (["tuneloop-launcher"], {"create", "get", "delete"}),
        (["tuneloop-user", "tuneloop-user-jobs"], {"deletecollection"}),
    ):
        rules = [rule for role in roles for rule in named("Role")[role]["rules"]]
        group, _, plural = kind.api
        assert any(
            group in r["apiGroups"] and plural in r["resources"] and verbs <= {*r["verbs"]}
            for r in rules
        )


@pytest.mark.parametrize("name", list_pipelines())
def test_a_rendered_workflow_names_what_the_base_ships(name: str) -> None:
    pipeline = find_pipeline(name)
    text = dump_workflow(pipeline.build(pipeline.configure()))
    accounts = set(re.findall(r"serviceAccountName: (\S+)", text))
    assert accounts and accounts <= set(named("ServiceAccount"))
    queues = set(re.findall(r"kueue.x-k8s.io/queue-name: (\S+)", text))
    assert queues and queues <= set(named("LocalQueue"))


def test_the_local_queues_lead_to_cluster_queues_apart() -> None:
    """Samplers take nothing that stages wait for: servers hold what they have as long as their runs."""
    behind = {name: each["spec"]["clusterQueue"] for name, each in named("LocalQueue").items()}
    assert behind == {"tuneloop": "tuneloop", "tuneloop-samplers": "tuneloop-samplers"}
    assert {*behind.values()} == {*named("ClusterQueue")}
    assert not any("cohortName" in each["spec"] for each in named("ClusterQueue").values())


def test_runtimes_of_the_trainer_retry_what_jobsets_do() -> None:
    rules = [
        rule["onExitCodes"]
        for runtime in named("ClusterTrainingRuntime").values()
        for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        for rule in job["template"]["spec"].get("podFailurePolicy", {}).get("rules", ())
        if rule["action"] == "FailJob"
    ]
    assert rules
    for rule in rules:
        assert rule["operator"] == "NotIn"
        assert rule["values"] == [code for code in RETRIED_CODES if code > 0]


def test_what_names_no_priority_class_is_above_low() -> None:
    """Kueue gives it 0, and preempts who is lower."""
    values = {name: each["value"] for name, each in named("WorkloadPriorityClass").items()}
    assert values["tuneloop-low"] < 0 == values["tuneloop-normal"] < values["tuneloop-high"]


def read_gpu_quota(queue: str, file: str) -> dict[str, Decimal]:
    """Resource → quota of a ClusterQueue as `components/gpu-nvidia` patches it."""
    made = copy.deepcopy(named("ClusterQueue")[queue])
    for patch in yaml.safe_load((MANIFESTS / "components" / "gpu-nvidia" / file).read_text()):
        *above, last = patch["path"].strip("/").split("/")
        place = functools.reduce(
            lambda found, key: found[int(key) if key.isdigit() else key], above, made
        )
        place.append(patch["value"]) if last == "-" else place.update({last: patch["value"]})
    (group,) = made["spec"]["resourceGroups"]
    quota = {
        r["name"]: parse_resource_quantity(r["nominalQuota"])
        for r in group["flavors"][0]["resources"]
    }
    assert {*group["coveredResources"]} == quota.keys()
    return quota


def test_the_quotas_of_a_node_with_gpus_hold_a_run_that_uses_all_of_them(tmp_path: Path) -> None:
    """A server beside the largest stage of a model of 7 billion parameters."""
    quotas = {"tuneloop": read_gpu_quota("tuneloop", "quota.yaml")}
    quotas["tuneloop-samplers"] = read_gpu_quota("tuneloop-samplers", "quota-samplers.yaml")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-2-7b"][1]))
    pipeline, sets = (
        find_pipeline("sft_then_grpo"),
        ["cluster.trainer.gpus=6", "cluster.sampler.gpus=2"],
    )
    sets += ["engine.args.tensor_parallel_size=2"]
    made = pipeline.build(pipeline.configure(sets=[f"base_model={tmp_path}", *sets]))
    largest: dict[str, dict[str, Decimal]] = {queue: {} for queue in quotas}
    for template in made["spec"]["templates"]:
        if queue := labels_of(template).get(QUEUE_LABEL):
            asked, most = compute_pod_requests(template), largest[queue]
            most |= {
                resource: max(amount, most.get(resource, Decimal()))
                for resource, amount in asked.items()
            }
    for queue, quota in quotas.items():
        assert largest[queue].keys() == quota.keys()
        assert all(largest[queue][resource] <= quota[resource] for resource in quota)
        assert largest[queue]["nvidia.com/gpu"] == quota["nvidia.com/gpu"]


def test_images_run_without_root_and_pass_signals() -> None:
    stages = (ROOT / "images/Dockerfile").read_text()
    last = stages.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 1000:1000$", last, re.M)
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", last, re.M)[1]) == ["tuneloop"]
    assert "org.opencontainers.image.revision" in last
    installs = re.findall(r"^.*pip install.*(?:\n.*)?-r ", stages, re.M)
    assert len(installs) == 8 and all("--require-hashes" in i for i in installs)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda p: p.stem
)
def test_requirements_are_pinned_hashed_and_name_no_registry(path: Path) -> None:
    text = path.read_text()
    pins = re.findall(r"^([a-z0-9][^=\s]*)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)
    assert len(pins) == len(re.findall(r"^[a-z0-9]", text, re.M)) > 0
    assert "://" not in text


def test_the_images_have_the_versions_that_the_tests_ran_with() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(
            re.findall(r"^(\S+)==(\S+)", (ROOT / "requirements" / f"{name}.txt").read_text(), re.M)
        )

    tested = pins("dev")
    for name in ("base", "trainer", "rollout-cpu", "gateway"):
        assert pins(name).items() <= tested.items()
