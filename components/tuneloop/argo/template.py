"""A stage as a Hera template, and the Workflow around it; nothing about graphs.

Every name a pod refers to (service accounts, queue, store settings) is one that ``manifests/`` ships. Written for
Argo Workflows 3.7: no field that it lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from tuneloop.argo import claims
from tuneloop.argo.settings import SHARE, Cluster, Share
from tuneloop.argo.turn import take_turns
from tuneloop.attempts import ATTEMPT, LAST_END, MORE_MEMORY
from tuneloop.component import Component
from tuneloop.ends import RETRY_SERVER, RETRY_STAGE
from tuneloop.program import flag

if TYPE_CHECKING:
    from hera.workflows import Container, Steps, Workflow

SCRATCH = "/tmp"
OUTPUTS = f"{SCRATCH}/tuneloop/outputs"
CLAIM = "/store"
"""Where `Cluster.claim` is mounted."""
STORE = "tuneloop-store"
"""ConfigMap and Secret with the store's ``AWS_*`` settings; optional, both."""
PAUSE = "10s"
"""Between two attempts. Constant: the controller computes ``duration * factor^n`` in 64-bit nanoseconds, which
overflows after some thirty attempts (``operator.go``, ``processNodeRetries``); and no ``maxDuration``, which is a
deadline counted from the start of the first attempt."""
LIMIT = 1000
"""Of attempts, for pods that end before they can count (`tuneloop.attempts`): four preemptions an hour for ten days.
The controller keeps to the pause only where a limit is given."""
NOBODY = {
    **{"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Whom a pod's containers run as, none of them root."""
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def workflow(name: str, parameters: Mapping[str, Any] | None = None, *, cluster: Cluster | None = None) -> Workflow:
    """A Workflow to enter with ``with``; it starts at the template ``main``.

    Args:
        name: of the pipeline, in kebab-case.
        parameters: workflow parameters beside ``run`` and ``store``, with their values.
        cluster: what its pods ask for: a workflow whose stages share devices takes a seat on their claim.
    """
    from hera.workflows import Parameter
    from hera.workflows.models import ExecutorConfig, Metadata, PodGC, PodSecurityContext, TTLStrategy

    from tuneloop.argo.memory import Workflow

    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "tuneloop"}
    own = {key.replace("_", "-"): value for key, value in (parameters or {}).items()}
    patch = {
        "containers": [{"name": "wait", "securityContext": RESTRICTED}],
        "initContainers": [{"name": "init", "securityContext": RESTRICTED}],
    }
    cluster = cluster or Cluster()
    seats: Any = claims.seat_templates(cluster)
    return Workflow(
        generate_name=f"{name}-",
        labels=labels,
        annotations={SHARE: cluster.share.model_dump_json()} if cluster.share else None,
        templates=seats,
        on_exit=claims.GIVE if seats else None,
        pod_metadata=Metadata(labels=labels),
        entrypoint="main",
        arguments=[
            Parameter(name="run", value=name, description="name of the run: artifacts lie at <store>/<run>"),
            Parameter(name="store", value="runs", description="URL of the store: a path, file://, s3://, gs://, az://"),
            *(Parameter(name=key, value=str(value)) for key, value in own.items()),
        ],
        service_account_name="tuneloop-stage",
        automount_service_account_token=False,
        executor=ExecutorConfig(service_account_name="tuneloop-executor"),
        # Argo's own containers carry no security context by default; a restricted namespace refuses them without.
        pod_spec_patch=json.dumps(patch, separators=(",", ":")),
        security_context=PodSecurityContext.model_validate(NOBODY),
        pod_gc=PodGC(strategy="OnPodSuccess", delete_delay_duration="600s"),
        ttl_strategy=TTLStrategy(seconds_after_success=86400, seconds_after_failure=604800),
    )


def stage_template(
    component: Component,
    params: BaseModel | Mapping[str, Any],
    *,
    dynamic: Sequence[str] = (),
    processes: int = 1,
    nodes: int = 1,
    cluster: Cluster | None = None,
) -> Container | Steps:
    """The stage as a template named after it: a container, or a JobSet for several nodes.

    Its input parameters are the stage's input artifacts (references), the output's URL and the `dynamic` parameters;
    its output parameters are the output's reference (under the output's name) and the stage's results.

    Args:
        component: the stage.
        params: its parameters; they are resolved here, once, and all of them are written into the command.
        dynamic: parameters that the graph passes; optional ones may be left out or empty.
        processes: ranks of torchrun in a pod.
        nodes: pods.
        cluster: what a pod asks for.

    Raises:
        UserError: a parameter that the stage refuses.
    """
    from hera.workflows import Container, Parameter
    from hera.workflows.models import ValueFrom

    cluster = cluster or Cluster()
    given = params.model_dump() if isinstance(params, BaseModel) else dict(params)
    if nodes > 1:
        given["expected_world_size"] = nodes * processes
    resolved = component.validate({k: v for k, v in given.items() if k not in dynamic} | _needed(component, dynamic))
    literal = {k: v for k, v in resolved.model_dump(mode="json").items() if k not in dynamic and v is not None}
    passed = [*component.inputs, component.output, *dynamic]
    optional = {name for name, required in component.inputs.items() if not required}
    optional |= {name for name in dynamic if not component.Params.model_fields[name].is_required()}
    flags = [word for k, v in literal.items() for word in (f"--{flag(k)}", _text(v))]
    flags += [word for k in passed for word in (f"--{flag(k)}", f"{{{{inputs.parameters.{flag(k)}}}}}")]
    outputs = [component.output, *component.results]
    made = Container(
        name=component.template,
        inputs=[Parameter(name=flag(k), default="") if k in optional else Parameter(name=flag(k)) for k in passed],
        outputs=[Parameter(name=flag(k), value_from=ValueFrom(path=f"{OUTPUTS}/{flag(k)}")) for k in outputs],
        command=component.command(processes if nodes == 1 else 1),
        args=flags,
        **retried_pod_fields(component.image, component.accelerator and nodes == 1, cluster),
    )
    if component.accelerator and nodes == 1:
        take_turns(made, cluster)
    if nodes == 1:
        return made
    from tuneloop.argo.jobset import jobset_steps

    return jobset_steps(component, made, processes, nodes, cluster, numbered="iteration" in dynamic)


def server_template(
    port: int, engine_args: Mapping[str, Any], *, weights: str | None = None, cluster: Cluster | None = None
) -> Container:
    """The vLLM server as a daemon: it lives as long as the graph that started it.

    Args:
        port: where it listens, at the pod's address.
        engine_args: vLLM's own options.
        weights: URL of published versions to follow; none: it boots from `policy`, and loads what it is told to.
        cluster: what the pod asks for.
    """
    from hera.workflows import Container, Parameter
    from hera.workflows.models import ContainerPort, EnvVar, EnvVarSource, HTTPGetAction, ObjectFieldSelector, Probe

    # It asks nobody for a token. `tuneloop run` reads the field as 127.0.0.1.
    address = EnvVar(name="POD_IP", value_from=EnvVarSource(field_ref=ObjectFieldSelector(field_path="status.podIP")))
    return Container(
        name="serve",
        daemon=True,
        inputs=[] if weights else [Parameter(name="policy")],
        command=["python", "-m", "tuneloop.serve"],
        args=[
            *(("--weights", weights) if weights else ("--policy", "{{inputs.parameters.policy}}")),
            *("--host", "$(POD_IP)", "--port", str(port)),
            *("--engine-args", _text(dict(engine_args))),
            *("--attempts", "{{workflow.parameters.store}}/{{workflow.parameters.run}}/serve"),
        ],
        ports=[ContainerPort(container_port=port)],
        readiness_probe=Probe(
            http_get=HTTPGetAction(path="/health", port=port), period_seconds=1, failure_threshold=600
        ),
        **retried_pod_fields("rollout", True, cluster or Cluster(), RETRY_SERVER, [address]),
    )


def pod_fields(image: str, accelerator: bool, cluster: Cluster) -> dict[str, Any]:
    """What every pod of ours has: an image, a way to its store, a scratch disk, requests, no rights."""
    from hera.workflows import ConfigMapEnvFrom, EmptyDirVolume, ExistingVolume, Resources, SecretEnvFrom, models

    name = cluster.images.format(image=image)
    labels = {"app.kubernetes.io/component": image}
    if accelerator:
        labels |= cluster.queue_labels
    gpus = cluster.gpus if accelerator else 0
    share = cluster.share if accelerator else None
    shared = shared_fields(share, image) if share else {}
    labels |= shared.pop("labels", {})
    return {
        "image": name,
        "image_pull_policy": "IfNotPresent",
        "labels": labels,
        "env": [
            models.EnvVar(name="TUNELOOP_OUTPUTS", value=OUTPUTS),
            models.EnvVar(name="TUNELOOP_IMAGE", value=name),
            models.EnvVar(name="TUNELOOP_NODE_WORKFLOW", value="{{workflow.name}}"),
            models.EnvVar(name="TUNELOOP_NODE_NAME", value="{{node.name}}"),
        ],
        "env_from": [ConfigMapEnvFrom(name=STORE, optional=True), SecretEnvFrom(name=STORE, optional=True)],
        "resources": Resources(
            cpu_request=cluster.cpu,
            memory_request=(share and share.request) or cluster.memory_request,
            memory_limit=cluster.memory_limit,
            gpus=gpus or None,
        ),
        "security_context": models.SecurityContext.model_validate(RESTRICTED),
        "volumes": [
            EmptyDirVolume(name="scratch", mount_path=SCRATCH),
            *([ExistingVolume(name="store", claim_name=cluster.claim, mount_path=CLAIM)] if cluster.claim else ()),
        ],
        **shared,
    }


def shared_fields(share: Share, image: str) -> dict[str, Any]:
    """What a template of a stage that shares devices has beside."""
    from hera.workflows.models import Affinity

    role = claims.role_of(image)
    patch, placed = claims.pod_patch(share, role), claims.affinity(share, role)
    fields: dict[str, Any] = {"labels": claims.labels(share, role)}
    if patch:
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    if placed:
        fields["affinity"] = Affinity.model_validate(placed)
    return fields


def retry_fields(expression: str = RETRY_STAGE) -> dict[str, Any]:
    """How a pod of ours is started again: by the class of its end."""
    from hera.workflows import RetryPolicy, RetryStrategy, models

    backoff, always = models.Backoff(duration=PAUSE), RetryPolicy.always
    return {"retry_strategy": RetryStrategy(limit=LIMIT, retry_policy=always, expression=expression, backoff=backoff)}


def attempt_env(cluster: Cluster) -> list[Any]:
    """What a pod under `retry_fields` is told of the attempts before it, see `tuneloop.attempts`."""
    from hera.workflows.models import EnvVar

    last = "{{lastRetry.status}} {{lastRetry.exitCode}} {{lastRetry.message}}"
    env = {ATTEMPT: "{{retries}}", LAST_END: last}
    if cluster.memory_on_retry:
        env[MORE_MEMORY] = cluster.memory_on_retry
    return [EnvVar(name=name, value=value) for name, value in env.items()]


def retried_pod_fields(
    image: str, accelerator: bool, cluster: Cluster, expression: str = RETRY_STAGE, env: Sequence[Any] = ()
) -> dict[str, Any]:
    """`pod_fields` and `retry_fields` of a pod that knows of the attempts before it, and may get more memory then."""
    fields = pod_fields(image, accelerator, cluster)
    fields["env"] = [*fields["env"], *attempt_env(cluster), *env]
    if cluster.memory_on_retry:
        limit = f"{{{{=asInt(retries) > 0 ? '{cluster.memory_on_retry}' : '{cluster.memory_limit}'}}}}"
        patch = json.loads(fields.get("pod_spec_patch", "{}"))
        patch.setdefault("containers", []).append({"name": "main", "resources": {"limits": {"memory": limit}}})
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    return fields | retry_fields(expression)


def _needed(component: Component, dynamic: Sequence[str]) -> dict[str, Any]:
    """Stand-ins for required parameters that the graph passes, so that the others can be validated here."""
    return {name: "0" for name in dynamic if component.Params.model_fields[name].is_required()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
