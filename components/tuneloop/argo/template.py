"""A stage as a Hera template, and the Workflow around it, for Argo Workflows 3.7. Every name that a pod refers to
(service accounts, queue, store settings) is one that ``manifests/`` ships."""

import json
from collections.abc import Sequence
from typing import Any

import hera.workflows
from hera.workflows import Container, Parameter, Steps, models
from pydantic import BaseModel

from tuneloop.argo import claims, pod_fields
from tuneloop.argo.claim_steps import build_reservation_steps, insert_reservation_steps
from tuneloop.argo.jobset import jobset_steps
from tuneloop.argo.lease_sidecar import add_lease_sidecar
from tuneloop.argo.memory_estimate import set_pod_memory
from tuneloop.argo.resize import check_asleep
from tuneloop.argo.tasks import input_tag
from tuneloop.core.component import Component
from tuneloop.core.ends import RETRY_SERVER
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.program import encode_flags, encode_value, to_kebab_case
from tuneloop.workflow.settings import CLIENT_LABEL, DELETE_DELAY, SHARE, Cluster


class Workflow(hera.workflows.Workflow):
    """Hera's Workflow, completed when it is rendered: with its pods' memory, and the steps that reserve claims."""

    def to_dict(self) -> Any:
        """Return the Workflow as a mapping, from which its YAML is also made."""
        made = super().to_dict()
        insert_reservation_steps(made)
        set_pod_memory(made)
        check_asleep(made)
        return made


def define_workflow(
    name: str, parameters: JsonMapping | None = None, *, cluster: Cluster | None = None
) -> Workflow:
    """Create a Workflow, to be used in a ``with`` block; it starts at the template ``main``. `cluster` has the settings
    of its pods: a workflow whose stages share devices reserves their claim."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "tuneloop"}
    own = {key.replace("_", "-"): value for key, value in (parameters or {}).items()}
    executor = {"securityContext": pod_fields.RESTRICTED, "resources": pod_fields.EXECUTOR}
    patch = {
        "containers": [{"name": "wait", **executor}],
        "initContainers": [{"name": "init", **executor}],
    }
    cluster = cluster or Cluster()
    steps: Any = build_reservation_steps(cluster)
    return Workflow(
        generate_name=f"{name}-",
        labels=labels,
        annotations={SHARE: cluster.share.model_dump_json()} if cluster.share else None,
        templates=steps,
        on_exit=claims.GIVE if steps else None,
        pod_metadata=models.Metadata(labels=labels),
        entrypoint="main",
        arguments=[
            Parameter(
                name="run",
                value=name,
                description="name of the run: artifacts lie at <store>/<run>",
            ),
            Parameter(
                name="store",
                value="runs",
                description="URL of the store: a path, file://, s3://, gs://, az://",
            ),
            *(Parameter(name=key, value=str(value)) for key, value in own.items()),
        ],
        # A run has one writer, however its workflows are submitted: the next one waits until this one has ended.
        synchronization=models.Synchronization(
            mutexes=[models.Mutex(name="{{workflow.parameters.run}}")]
        ),
        service_account_name="tuneloop-stage",
        automount_service_account_token=False,
        executor=models.ExecutorConfig(service_account_name="tuneloop-executor"),
        # Argo's own containers carry no security context by default; a restricted namespace refuses them without.
        pod_spec_patch=json.dumps(patch, separators=(",", ":")),
        security_context=models.PodSecurityContext.model_validate(pod_fields.NOBODY),
        pod_gc=models.PodGC(strategy="OnPodSuccess", delete_delay_duration=DELETE_DELAY),
        ttl_strategy=models.TTLStrategy(seconds_after_success=86400, seconds_after_failure=604800),
    )


def stage_template(
    component: Component,
    params: BaseModel | JsonMapping,
    *,
    dynamic: Sequence[str] = (),
    processes: int = 1,
    nodes: int = 1,
    cluster: Cluster | None = None,
) -> Container | Steps:
    """Build the stage as a template named after it: a container, or a JobSet for several nodes. Its inputs are the
    stage's input artifacts (references), the output's URL and the `dynamic` parameters, of which optional ones may be
    left out or empty; its outputs are the output's reference, under the output's name, and the stage's results.
    `params` are resolved here, once, and written into the command. Raises UserError at a parameter that is refused."""
    cluster = cluster or Cluster()
    given = params.model_dump() if isinstance(params, BaseModel) else dict(params)
    if nodes > 1:
        given["expected_world_size"] = nodes * processes
    passed = [*component.inputs, component.output, *dynamic]
    role = pod_fields.find_role(component, given, dynamic)
    optional = {name for name, required in component.inputs.items() if not required}
    optional |= {name for name in dynamic if not component.Params.model_fields[name].is_required()}
    flags = encode_flags(component.resolve_constants(given, dynamic))
    flags += encode_flags({k: input_tag(to_kebab_case(k)) for k in passed})
    outputs = map(to_kebab_case, (component.output, *component.results))
    made = Container(
        name=component.template,
        inputs=[
            Parameter(name=to_kebab_case(k), default="")
            if k in optional
            else Parameter(name=to_kebab_case(k))
            for k in passed
        ],
        outputs=[
            Parameter(name=name, value_from=models.ValueFrom(path=f"{pod_fields.OUTPUTS}/{name}"))
            for name in outputs
        ],
        command=component.command(processes if nodes == 1 else 1),
        args=flags,
        **pod_fields.retried_pod_fields(component.image, role if nodes == 1 else "cpu", cluster),
    )
    if component.account:
        made.service_account_name = component.account
        made.automount_service_account_token = True
    if nodes > 1:
        return jobset_steps(
            component, made, role, processes, nodes, cluster, numbered="iteration" in dynamic
        )
    engine = pod_fields.read_engine(component, given)
    if "endpoint" in dynamic and engine and engine.serves:
        pod_fields.mount_token(made)
    if engine and not engine.in_process:
        made.labels = {**(made.labels or {}), CLIENT_LABEL: "true"}
    # A client needs no device lease: it calls the run's own server, which holds one.
    elif component.accelerator:
        add_lease_sidecar(made, cluster, claims.role_of(component.image))
    return made


def server_template(
    port: int,
    engine_args: JsonMapping,
    cluster: Cluster,
    *,
    weights: str | None = None,
    several: bool = False,
) -> Container:
    """Build the vLLM server as a daemon of the graph that starts it. It follows the versions published at the URL
    `weights`; without one it boots from `policy` and loads what it is told to. If `several`, each has a `replica`."""
    names = [*([] if weights else ["policy"]), *(["replica"] if several else [])]
    attempts = "{{workflow.parameters.store}}/{{workflow.parameters.run}}/serve"
    # `tuneloop run` reads the field as 127.0.0.1.
    field = models.ObjectFieldSelector(field_path="status.podIP")
    address = models.EnvVar(name="POD_IP", value_from=models.EnvVarSource(field_ref=field))
    health = models.HTTPGetAction(path="/health", port=port)
    made = Container(
        name="serve",
        daemon=True,
        inputs=[Parameter(name=name) for name in names],
        command=["python", "-m", "tuneloop.inference.server"],
        args=[
            *(("--weights", weights) if weights else ("--policy", "{{inputs.parameters.policy}}")),
            "--host",
            "$(POD_IP)",
            "--port",
            str(port),
            "--engine-args",
            encode_value(dict(engine_args)),
            "--attempts",
            attempts + ("-{{inputs.parameters.replica}}" if several else ""),
        ],
        ports=[models.ContainerPort(container_port=port)],
        readiness_probe=models.Probe(http_get=health, period_seconds=1, failure_threshold=600),
        **pod_fields.retried_pod_fields("rollout", "sampler", cluster, RETRY_SERVER, [address]),
    )
    pod_fields.mount_token(made)
    return made
