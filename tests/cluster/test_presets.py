"""Each preset of ``manifests/presets`` on a real API server, in a namespace with its policies.

Argo's controller makes the pods of all templates of a rendered `grpo`, and no admission refuses
one. None is scheduled: the nodes that the presets are for are not there.
"""

import copy
import json
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.test_jobset import IMAGES
from tests.cluster.volumes import apply
from tests.waiting import until
from tuneloop.cli import run_cli
from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.config.loading import find_pipeline
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.manifest import parse_applied_object

pytestmark = pytest.mark.cluster

PRESETS = ROOT / "manifests" / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
CORE = ("openshift", "quota", "infiniband")
"""The presets whose namespaces have policies of their own."""
RESTRICTED = "restricted"
LEVELS = {"infiniband": "privileged"}
"""Preset → Pod Security level of its namespace, where this is not `RESTRICTED`."""
COPIED = ("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Secret", "NetworkPolicy")
"""Kinds of the overlay for development that a run needs in its namespace; by its network policies all
is denied that they do not name.
"""
NAMESPACE = """
apiVersion: v1
kind: Namespace
metadata: {name: NAME, labels: {pod-security.kubernetes.io/enforce: LEVEL}}
"""
QUOTA = """
apiVersion: v1
kind: ResourceQuota
metadata: {name: limits}
spec: {hard: {limits.cpu: "10000", limits.memory: 100Ti, pods: "200"}}
"""
LIMIT_RANGE = """
apiVersion: v1
kind: LimitRange
metadata: {name: defaults}
spec:
  limits:
  - type: Container
    default: {cpu: "8", memory: 8Gi}
    defaultRequest: {cpu: 10m, memory: 64Mi}
    max: {cpu: "256", memory: 4Ti}
"""
UID_RANGE = """
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: NAME}
spec:
  matchConstraints:
    resourceRules:
    - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
  variables:
  - name: ids
    expression: >-
      [object.spec.?securityContext.?runAsUser, object.spec.?securityContext.?fsGroup]
      + (object.spec.containers + object.spec.?initContainers.orValue([])).map(
        container, container.?securityContext.?runAsUser)
  validations:
  - expression: >-
      variables.ids.all(id, !id.hasValue() || (id.value() >= 1000650000 && id.value() < 1000660000))
    message: "restricted-v2: runAsUser and fsGroup must be in the ranges: [1000650000, 1000659999]"
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: NAME}
spec:
  policyName: NAME
  validationActions: [Deny]
  matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}}
"""
"""Refuses what OpenShift's constraint ``restricted-v2`` does, in a namespace with this range."""
ASSIGNED_UID = """
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: NAME}
spec:
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
    - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}
  matchConditions:
  - {name: names-no-user, expression: "!object.spec.?securityContext.?runAsUser.hasValue()"}
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration:
      expression: >-
        Object{spec: Object.spec{securityContext: Object.spec.securityContext{
          runAsUser: 1000650000, fsGroup: 1000650000}}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: NAME}
spec:
  policyName: NAME
  matchResources: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: NAME}}}
"""
"""Gives pods a user and an fsGroup as OpenShift does, from the namespace's range."""
OWN = """
processes: 1
data: {source: digits, source_args: {digits: 2}, train: 8, eval: 8, sft: 32}
sft: {max_steps: 2, warmup_steps: 0}
cluster:
  queue: ""
  images: IMAGES
  cpu: {cpu: 50m}
  trainer: {cpu: 100m}
  sampler: {cpu: 100m}
"""
"""What a user sets besides the presets."""
GATE = {"name": "tuneloop.dev/never-scheduled"}
PENDING_POD = """
apiVersion: v1
kind: Pod
metadata: {name: probe}
spec:
  securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: main
    image: none
    resources: {limits: {cpu: 1m, memory: 1Mi}}
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""


@dataclass
class Team:
    """A namespace of a platform team, with its policies."""

    cluster: Connection
    namespace: str

    def create(self, manifest: JsonMapping, *options: str) -> subprocess.CompletedProcess[str]:
        """Ask the API server to create an object; the outcome may be a refusal."""
        command = ["kubectl", "-n", self.namespace, "create", "-o", "name", *options, "-f", "-"]
        text = json.dumps(manifest)
        return subprocess.run(command, input=text, text=True, capture_output=True)

    def check(self, manifest: JsonMapping) -> str:
        """Return why the API server would refuse an object; empty if it would not."""
        return self.create(manifest, "--dry-run=server").stderr

    def make_pods(self, workflow: JsonMapping) -> list[JsonObject]:
        """Have Argo's controller make a pod of each template; return them as the API server has
        them.

        Raises:
            AssertionError: one is refused, with the refusals as its text.
        """
        probe = build_probe(workflow)
        created = self.create(probe)
        assert created.returncode == 0, created.stderr
        name = probe["metadata"]["name"]
        tasks = probe["spec"]["templates"][-1]["dag"]["tasks"]
        selector = f"workflows.argoproj.io/workflow={name}"

        def read_outcome() -> tuple[list[JsonObject], list[str]] | None:
            pods = json.loads(self._get("pods", "-l", selector))["items"]
            status = json.loads(self._get("workflow", name)).get("status", {})
            messages = [
                f"{node['displayName']}: {node['message']}"
                for node in status.get("nodes", {}).values()
                if "forbidden" in node.get("message", "")
            ]
            return (pods, messages) if messages or len(pods) == len(tasks) else None

        try:
            outcome = until(read_outcome, pause=1)
        finally:
            kubectl("-n", self.namespace, "delete", "workflow", name)
        assert outcome is not None
        pods, refusals = outcome
        assert not refusals, "\n".join(refusals)
        return pods

    def _get(self, *words: str) -> str:
        return kubectl("-n", self.namespace, "get", "-o", "json", *words)


def build_probe(workflow: JsonMapping) -> JsonObject:
    """Build a workflow that calls all templates of pods at once; none of the pods is scheduled."""
    probe = copy.deepcopy(dict(workflow))
    spec = probe["spec"]
    tasks: list[JsonObject] = []
    for template in spec["templates"]:
        if "container" not in template and "resource" not in template:
            continue
        inputs = template.get("inputs", {}).get("parameters", [])
        arguments = {"parameters": [{"name": item["name"], "value": "1"} for item in inputs]}
        tasks.append(
            {"name": template["name"], "template": template["name"], "arguments": arguments}
        )
    spec["templates"].append({"name": "probe", "dag": {"tasks": tasks}})
    spec["entrypoint"] = "probe"
    patch = json.loads(spec["podSpecPatch"])
    spec["podSpecPatch"] = json.dumps(patch | {"schedulingGates": [GATE]})
    return probe


def list_job_pods(workflow: JsonMapping) -> Iterator[tuple[JsonObject, JsonObject]]:
    """Yield the JobSets that a workflow applies, each with a pod that its Job would create."""
    for template in workflow["spec"]["templates"]:
        if "resource" not in template:
            continue
        text = json.dumps(parse_applied_object(template))
        for tag in ("workflow.name", "inputs.parameters.iteration", "workflow.parameters.run"):
            text = text.replace("{{%s}}" % tag, "a1")
        job = json.loads(text)
        pod = copy.deepcopy(job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
        pod["metadata"]["name"] = "node"
        yield job, {"apiVersion": "v1", "kind": "Pod"} | pod


def render(preset: str, namespace: str) -> JsonObject:
    """Render `grpo` with a JobSet and a rollout server, as `submit` sends it."""
    files = [PRESETS / f"{preset}.yaml"] if preset else []
    pipeline = find_pipeline("grpo")
    workflow = pipeline.build(pipeline.configure(files, ["nodes=2", "engine.kind=vllm"]))
    run = f"{preset or 'plain'}-{uuid.uuid4().hex[:6]}"
    return prepare_workflow(workflow, run=run, store="s3://artifacts/presets", namespace=namespace)


def list_accounts(workflow: JsonMapping) -> set[str]:
    """Return the accounts of a workflow's pods."""
    spec = workflow["spec"]
    owners = [spec, *spec["templates"]]
    owners += [pod["spec"] for _, pod in list_job_pods(workflow)]
    return {owner["serviceAccountName"] for owner in owners if "serviceAccountName" in owner}


def copy_overlay(namespace: str) -> None:
    """Give a namespace the accounts, rights and settings of the overlay for development."""
    overlay = kubectl("kustomize", str(ROOT / "manifests" / "overlays" / "local"))
    copied: list[JsonObject] = []
    for document in yaml.safe_load_all(overlay):
        if document["kind"] in COPIED and document["metadata"].get("namespace") == "tuneloop":
            copied.append(document)
    text = yaml.safe_dump_all(copied)
    apply(text.replace("namespace: tuneloop\n", f"namespace: {namespace}\n"))


@pytest.fixture
def teams(cluster: Connection) -> Iterator[Any]:
    """Makes namespaces with a Pod Security level and with policies, and removes them afterwards."""
    objects: list[str] = []

    def make(level: str, *policies: str) -> Team:
        namespace = f"team-{uuid.uuid4().hex[:8]}"
        text = NAMESPACE.replace("NAME", namespace).replace("LEVEL", level)
        objects.append(text)
        apply(text)
        copy_overlay(namespace)
        for policy in policies:
            named = policy.replace("NAME", namespace)
            # Only what is in the namespace goes with it.
            if "namespaceSelector" in named:
                objects.append(named)
                apply(named)
            else:
                kubectl_apply(namespace, named)
        return Team(cluster, namespace)

    yield make
    for text in objects:
        apply(text, "delete")


def kubectl_apply(namespace: str, text: str) -> None:
    """Apply manifests that name no namespace."""
    command = ["kubectl", "-n", namespace, "apply", "-f", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def list_policies(preset: str) -> list[str]:
    """List the policies of the namespace that a preset is for."""
    policies = [QUOTA]
    # The preset `quota` is for a namespace that has no defaults.
    if preset != "quota":
        policies.append(LIMIT_RANGE)
    if preset == "openshift":
        policies.append(UID_RANGE)
    return policies


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in NAMES],
)
def test_no_admission_refuses_a_pod_of_a_preset(preset: str, teams: Any) -> None:
    team = teams(LEVELS.get(preset, RESTRICTED), *list_policies(preset))
    workflow = render(preset, team.namespace)
    for account in list_accounts(workflow):
        kubectl("-n", team.namespace, "create", "serviceaccount", account, check=False)
    if preset == "openshift":
        # A policy is in force some time after it was created.
        probe = yaml.safe_load(PENDING_POD)
        assert until(lambda: "restricted-v2" in team.check(probe), pause=0.5)
    assert team.check(workflow) == ""
    jobs = list(list_job_pods(workflow))
    assert jobs
    for job, pod in jobs:
        assert team.check(job) == ""
        assert team.check(pod) == ""
    pods = team.make_pods(workflow)
    for pod in pods:
        assert GATE in pod["spec"]["schedulingGates"]
        if preset == "openshift":
            assert "runAsUser" not in pod["spec"]["securityContext"]


@pytest.mark.parametrize(
    ("level", "policies", "preset", "refusal"),
    [
        (RESTRICTED, [LIMIT_RANGE, UID_RANGE], "", "restricted-v2: runAsUser"),
        (RESTRICTED, [QUOTA], "", "must specify limits"),
        (RESTRICTED, [LIMIT_RANGE], "infiniband", "IPC_LOCK"),
    ],
    ids=["openshift", "quota", "infiniband"],
)
def test_the_policies_refuse_what_they_are_for(
    level: str, policies: list[str], preset: str, refusal: str, teams: Any
) -> None:
    team = teams(level, *policies)
    workflow = render(preset, team.namespace)
    if UID_RANGE in policies:
        probe = yaml.safe_load(PENDING_POD)
        assert until(lambda: "restricted-v2" in team.check(probe), pause=0.5)
    ((_, pod),) = list_job_pods(workflow)
    assert refusal in team.check(pod)
    if not preset:
        with pytest.raises(AssertionError, match=refusal):
            team.make_pods(workflow)


@pytest.mark.slow
def test_a_run_under_all_policies_at_once(
    teams: Any, root: str, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on OpenShift, with a quota on limits: of several presets, and a user's own settings."""
    if not kubectl("api-resources", "-o", "name").count("mutatingadmissionpolicies."):
        pytest.skip("this release of Kubernetes has no MutatingAdmissionPolicy")
    team = teams(RESTRICTED, QUOTA, UID_RANGE, ASSIGNED_UID)
    probe = yaml.safe_load(PENDING_POD)
    assert until(lambda: "restricted-v2" in team.check(probe), pause=0.5)
    (tmp_path / "own.yaml").write_text(OWN.replace("IMAGES", IMAGES))
    words = ["submit", "sft", "--run", run, "--store", root, "--namespace", team.namespace]
    for preset in ("openshift", "quota", "istio"):
        words += ["-c", str(PRESETS / f"{preset}.yaml")]
    code = run_cli([*words, "-c", str(tmp_path / "own.yaml"), "--wait"])
    assert code == 0, capsys.readouterr().out[-3000:]
    pods = json.loads(kubectl("-n", team.namespace, "get", "pods", "-o", "json"))["items"]
    assert len(pods) >= 4
    for pod in pods:
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000650000
        assert all("cpu" in item["resources"]["limits"] for item in pod["spec"]["containers"])
        assert pod["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"
