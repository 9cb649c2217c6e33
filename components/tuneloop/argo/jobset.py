"""A stage of several pods: a JobSet that Argo applies and watches, and a step that reads the
committed output.

Every pod is the stage's pod under torchrun with a fixed rendezvous at the first one: pod i of the
JobSet's only job is node i. If one is interrupted, evicted or killed (`tuneloop.core.ends`), all
start again from the last resume point; any other failure ends the JobSet. An Argo resource template
gets neither exit codes nor outputs of what it watches, so the stage runs once more, in one process
that finds its output committed and reports it.

`argo/template.py: stage_template` calls `jobset_steps` for a stage with ``nodes`` above 1. KFP
launches JobSets from a task instead: `kfp/stage.py` builds them of `pod_spec`, `ranks_env` and
`build_jobset`, which `extensions/trainers/trainjob.py` uses, too.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from tuneloop.argo.pod_fields import (
    ACCOUNT,
    EXECUTOR,
    EXECUTOR_LIMITS,
    LIMIT,
    custom_fields,
    describe_executor,
    place_fields,
    plan_resources,
    pod_fields,
    retry_fields,
)
from tuneloop.core.attempts import ATTEMPT
from tuneloop.core.component import Component
from tuneloop.core.ends import RETRIED_CODES, RETRY_STEP
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import parse_applied_object, read_parameters
from tuneloop.workflow.plan import PodResources, StagePlan
from tuneloop.workflow.pod_hook import check_use, collect_pod_changes
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER, PodSettings, fit_patch
from tuneloop.workflow.settings import AUTO, RUN_LABEL, Cluster, ResourceRole
from tuneloop.workflow.strategic_merge import apply_patch

if TYPE_CHECKING:
    from hera.workflows import Container, Resource, Steps

PORT = 29500
"""The port of torchrun's rendezvous in the first pod."""
JOB = "node"
"""The only job of a JobSet. It is part of the pods' host names (`ranks_env`, `check_names`)."""
CONTAINER = "main"
"""The container of each pod, by which the settings' patches find it (`MAIN` of
`workflow/pod_settings.py`)."""
LONGEST = 63
"""Maximum length of a pod's name in JobSet's webhook, including the five characters that identify
an attempt.
"""
RESUMED = 99
"""The number of a run's workflow (``RUN-99``) for which `check_names` leaves room at least."""


def read_field(name: str, path: str) -> JsonObject:
    """Return a variable of a pod that has the value of one of its own fields."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


RENDEZVOUS = read_field("PET_RDZV_ID", "metadata.labels['batch.kubernetes.io/controller-uid']")
"""Variable that is equal in all pods and changes with each restart: it names the data of an
attempt. `extensions/trainers/kubeflow_sdk.py` recognizes it by its value, as Trainer's runtimes set
it themselves.
"""
RESTART = read_field(ATTEMPT, "metadata.labels['jobset.sigs.k8s.io/restart-attempt']")
"""Variable with the number of restarts of the JobSet, which `core/attempts.py` reads as the
attempt; a suspension by Kueue does not count."""


def jobset_steps(
    component: Component, stage: StagePlan, result: "Container", cluster: Cluster
) -> "Steps":
    """Build a stage of several nodes as a template with the same name, inputs and outputs as for a
    single pod.

    Args:
        component: the stage as it is declared.
        stage: its plan.
        result: the stage in one process, which becomes the step that reads the output.
        cluster: where its pods run.
    """
    from hera.workflows import Parameter, Steps
    from hera.workflows.models import ValueFrom

    result.name = f"{stage.template}-result"
    name = "{{workflow.name}}-%s" % stage.template
    if "iteration" in stage.wired:
        # The stage runs once in each iteration.
        name += "-{{inputs.parameters.iteration}}"
    args: Any = result.args
    pod = pod_spec(
        component.image,
        stage.resource_role,
        component.command(nodes=stage.nodes),
        args,
        cluster,
        ranks_env(name, stage.nodes, stage.processes),
        stage.resources,
    )
    labels = {
        RUN_LABEL: "{{workflow.parameters.run}}",
        "app.kubernetes.io/part-of": "tuneloop",
        "app.kubernetes.io/component": component.image,
        # `argo logs` goes by it.
        "workflows.argoproj.io/workflow": "{{workflow.name}}",
    }
    labels |= collect_pod_changes(cluster, stage.resource_role, component.image).labels
    manifest = build_jobset(
        name,
        pod,
        stage.nodes,
        labels=labels,
        queue=cluster.build_queue_labels(stage.resource_role),
        stage=stage.template,
        settings=cluster.pod_settings(stage.resource_role),
    )
    # A caller of the template cannot tell that the stage has several pods.
    inputs: Any = result.inputs
    start = apply_jobset(stage.job_template, manifest, cluster, inputs=inputs)
    arguments = {item.name: "{{inputs.parameters.%s}}" % item.name for item in inputs}
    stage_outputs: Any = result.outputs
    outputs: list[Parameter] = []
    for item in stage_outputs:
        value = ValueFrom(parameter="{{steps.result.outputs.parameters.%s}}" % item.name)
        outputs.append(Parameter(name=item.name, value_from=value))
    with Steps(name=stage.template, inputs=inputs, outputs=outputs) as steps:
        start(name="job", arguments=arguments)
        result(name="result", arguments=arguments)
    return steps


def _build_patch(cluster: Cluster) -> JsonObject:
    """Build the patch of the pod that watches a JobSet: Argo runs it without a sidecar, and writes
    to /tmp. Argo applies the workflow's own patch before this one (`argo/template.py:
    define_workflow`), and that names the sidecar ``wait``, which is deleted here.

    Args:
        cluster: where the pod runs.
    """
    settings = cluster.pod_settings("cpu")
    security = dict(RESTRICTED_CONTAINER)
    resources: JsonObject = {
        "requests": EXECUTOR["requests"],
        "limits": {"memory": EXECUTOR_LIMITS["memory"]},
    }
    init: JsonObject = {
        "name": "init",
        "volumeMounts": [{"name": "tmp-dir-argo", "mountPath": "/tmp"}],
    }
    if cluster.limits:
        # Where every container has limits, `main` and `init` have those of Argo's own containers.
        resources = describe_executor(cluster)
        init["resources"] = resources
    # Argo gives both containers of such a pod a user, which a namespace with a range of users
    # refuses.
    if "runAsUser" not in settings.pod_security:
        security["runAsUser"] = None
        init["securityContext"] = {"runAsUser": None}
    return {
        "containers": [
            {"name": "wait", "$patch": "delete"},
            {
                "name": "main",
                "securityContext": security,
                "resources": resources,
            },
        ],
        "initContainers": [init],
    }


def apply_jobset(name: str, manifest: JsonObject, cluster: Cluster, **fields: Any) -> "Resource":
    """Build a template that applies a JobSet and ends as it does; the JobSet is deleted with the
    workflow.

    Args:
        name: of the template.
        manifest: the JobSet.
        cluster: where the pod runs that applies it.
        fields: further fields of the template.
    """
    from hera.workflows import Resource
    from hera.workflows.models import ExecutorConfig

    patch = _build_patch(cluster)
    fields |= custom_fields("cpu", cluster, patch, containers=())
    return Resource(
        name=name,
        action="apply",
        set_owner_reference=True,
        success_condition="status.terminalState = Completed",
        failure_condition="status.terminalState = Failed",
        manifest=dump_manifest(manifest),
        executor=ExecutorConfig(service_account_name="tuneloop-launcher"),
        **place_fields(cluster.cpu),
        **retry_fields(RETRY_STEP),
        **fields,
    )


def build_jobset(
    name: str,
    pod: JsonMapping,
    nodes: int,
    *,
    labels: Mapping[str, str] | None = None,
    queue: Mapping[str, str] | None = None,
    stage: str = "",
    settings: PodSettings | None = None,
) -> JsonObject:
    """Build a JobSet: one Indexed Job of `nodes` pods that end and start again together.

    Args:
        name: with ``-node-0-0-x7k2p`` at its end it has at most 63 characters.
        pod: the spec of each pod.
        nodes: how many there are.
        labels: of the JobSet and its pods.
        queue: Kueue's labels of the JobSet, as in `Cluster.build_queue_labels`.
        stage: what `tuneloop cluster logs` calls the pods; empty: `name`.
        settings: what labels and annotations the pods have besides.

    Which exit codes start all pods again is `RETRIED_CODES` of `core/ends.py`.
    """
    annotations = {"workflows.argoproj.io/node-name": stage or name}
    pod_labels = dict(labels or {})
    # An end that is not retried fails the job, and thereby the JobSet.
    final_end = {
        "containerName": CONTAINER,
        "operator": "NotIn",
        "values": [code for code in RETRIED_CODES if code > 0],
    }
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final_end}]},
        "template": {
            "metadata": build_pod_metadata(pod_labels, settings, annotations),
            "spec": pod,
        },
    }
    rule = {
        "name": "bug",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": pod_labels | dict(queue or {})},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": LIMIT,
                # No pod of an attempt is left when the next one starts.
                "restartStrategy": "BlockingRecreate",
                "rules": [rule],
            },
            "ttlSecondsAfterFinished": 3600,
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def build_pod_metadata(
    labels: Mapping[str, str],
    settings: PodSettings | None,
    annotations: Mapping[str, str] | None = None,
) -> JsonObject:
    """Build the metadata of a pod: tuneloop's labels and annotations, and those of its settings."""
    settings = settings or PodSettings()
    metadata: JsonObject = {"labels": dict(labels) | settings.build_labels()}
    all_annotations = dict(annotations or {}) | settings.build_annotations()
    if all_annotations:
        metadata["annotations"] = all_annotations
    return metadata


def check_names(workflow: JsonMapping, run: str) -> None:
    """Check that a run's name gives valid host names to the pods of its JobSets.

    An invalid one would only show when they start. The tags that `jobset_steps` writes into a name
    are replaced by long values here: a further tag needs one, too.

    Raises:
        UserError: the name begins with a digit, or is too long.
    """
    spec = workflow["spec"]
    parameters = read_parameters(spec)
    iterations = parameters.get("iterations", "1")
    # A long loop continues in further workflows.
    parts = math.ceil(int(iterations) / int(parameters.get("per-workflow", iterations)))
    # The longest values that the tags can have in this run.
    values = {
        "{{workflow.name}}": f"{run}-{max(parts, RESUMED)}",
        "{{inputs.parameters.iteration}}": iterations,
    }
    for job in map(parse_applied_object, spec.get("templates", ())):
        if job.get("kind") != "JobSet":
            continue
        name = job["metadata"]["name"]
        for tag, value in values.items():
            name = name.replace(tag, value)
        group = job["spec"]["replicatedJobs"][0]
        last = group["template"]["spec"]["parallelism"] - 1
        pod_name = f"{name}-{group['name']}-0-{last}-x7k2p"
        if not name[0].isalpha():
            remedy = "names the hosts of stages with several pods: begin with a letter"
            raise UserError("--run", run, remedy)
        excess = len(pod_name) - LONGEST
        if excess > 0:
            remedy = (
                f"a pod could be named {pod_name}, which is too long: "
                f"use a name at least {excess} characters shorter"
            )
            raise UserError("--run", run, remedy)


def ranks_env(name: str, nodes: int, processes: int) -> list[JsonObject]:
    """Build torchrun's ``PET_*`` variables in the pods of the JobSet `name`: a rendezvous at the
    first. `extensions/trainers/trainjob.py: as_job` replaces two of them for a pod without a JobSet.
    """
    rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
        read_field("PET_NODE_RANK", rank),
        # The JobSet gives its pods host names, and a domain that is called as it is.
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{JOB}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
        RENDEZVOUS,
        RESTART,
    ]


def pod_spec(
    image: str,
    role: ResourceRole,
    command: Sequence[str],
    args: Sequence[str],
    cluster: Cluster,
    env: Sequence[JsonMapping] = (),
    resources: PodResources | None = None,
) -> JsonObject:
    """Build a pod object for Kubernetes, with the same fields as a stage's pod in
    `tuneloop.argo.template`. Argo is not there to put the fields of a template into a pod: each key
    of `argo/pod_fields.py: pod_fields` that a pod needs is copied here by its name, and any other
    is left out.

    Args:
        image: the logical one: base, trainer, rollout or ray.
        role: what the pod computes.
        command: of its container.
        args: of its container.
        cluster: has its place, its account and the names of images.
        env: further variables of the container.
        resources: what the pod requests; None: what its role does.

    Raises:
        UserError: the settings share devices between runs, since each pod would request a lease by
            itself; or they give a pod more memory after the first attempt.
    """
    # A pod that computes nothing uses no device.
    if role != "cpu":
        check_use(cluster, "job")
    cluster.check_one_memory_limit(role, "a job of several pods")
    role_settings = cluster.resources(role)
    settings = cluster.pod_settings(role)
    resources = enable_shared_memory(resources or plan_resources(role, cluster))
    fields = pod_fields(image, role, cluster, resources)
    variables: list[JsonMapping] = [_plain(variable) for variable in fields["env"]]
    variables += env
    container: JsonObject = {
        "name": CONTAINER,
        "image": fields["image"],
        "imagePullPolicy": fields["image_pull_policy"],
        "command": list(command),
        "args": list(args),
        "env": variables,
        "envFrom": [_plain(source) for source in fields["env_from"]],
        "resources": _plain(fields["resources"].build()),
        "securityContext": settings.container_security,
        # Hera has no public way to build the two halves of a volume.
        "volumeMounts": [_plain(volume._build_volume_mount()) for volume in fields["volumes"]],
    }
    spec: JsonObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": role_settings.grace_s,
        "serviceAccountName": settings.service_account or ACCOUNT,
        "automountServiceAccountToken": False,
        "securityContext": settings.pod_security,
        "containers": [container],
        "volumes": [_plain(volume._build_volume()) for volume in fields["volumes"]],
    }
    spec |= role_settings.place
    # The settings have the last word.
    spec = apply_patch(spec, collect_pod_changes(cluster, role, image).spec)
    return apply_patch(spec, fit_patch(cluster.build_spec_patch(role)))


def enable_shared_memory(resources: PodResources) -> PodResources:
    """Return the resources with a ``/dev/shm``, where the ranks of a job's pod, or Ray, exchange
    tensors.
    """
    return resources.model_copy(update={"shared_memory": resources.shared_memory or AUTO})


def _plain(model: Any) -> JsonObject:
    return model.model_dump(by_alias=True, exclude_none=True)


def dump_manifest(manifest: JsonObject) -> str:
    """Dump a manifest as YAML for a resource template, without anchors: equal parts are written in
    full.
    """
    # PyYAML writes an anchor for an object that occurs twice; a copy through JSON has no such.
    return yaml.safe_dump(
        json.loads(json.dumps(manifest)),
        sort_keys=False,
        width=10**6,
    )
