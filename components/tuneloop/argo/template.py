"""A stage as a Hera template, and the Workflow around it, for Argo Workflows 3.7.

Every name that a pod refers to (service accounts, queue, store settings) is one that ``manifests/``
ships.

A field of Argo's that is rendered for the first time has to be in `workflow/local_fields.yaml`, as
`tuneloop run` refuses fields that it does not know. ``make golden`` shows what a change renders.
"""

from collections.abc import Sequence
from typing import Any

import hera.workflows
from hera.workflows import DAG, Container, Parameter, Steps, Task, models

from tuneloop.argo import pod_fields
from tuneloop.argo.jobset import jobset_steps
from tuneloop.argo.resize import resize_while_asleep
from tuneloop.argo.tasks import input_tag, pod_output
from tuneloop.core.component import Component
from tuneloop.core.ends import RETRY_SERVER
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags, encode_value, to_kebab_case
from tuneloop.workflow.plan import PLAN, RunPlan, ServerPlan, StagePlan
from tuneloop.workflow.pod_hook import list_pod_hooks
from tuneloop.workflow.settings import DELETE_DELAY, Cluster

EXIT_GRAPH = "at-the-end"
"""The template of the graph that runs the exit templates of several extensions."""


class Workflow(hera.workflows.Workflow):
    """Hera's Workflow, which extensions complete (`PodHook.complete_workflow`) when its ``with``
    block ends: all its graphs are drawn then."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for hook in list_pod_hooks():
                hook.complete_workflow(self)


def define_workflow(
    name: str,
    parameters: JsonMapping | None = None,
    *,
    plan: RunPlan | None = None,
    cluster: Cluster | None = None,
) -> Workflow:
    """Create a Workflow, to be used in a ``with`` block; it starts at the template ``main``.

    All that runs on Argo is made by it: pipelines, graphs of users, jobs
    (`extensions/trainers/trainjob.py: as_workflow`). `cluster/run_workflows.py` and
    `cluster/schedule.py` change the result for a run or a schedule, and `argo/standalone.py` for
    `argo submit`.

    Args:
        name: the pipeline's.
        parameters: of the workflow, beside ``run`` and ``store``: name in snake_case → default.
        plan: what its stages are rendered from; None where it runs no stage.
        cluster: the settings of its pods, from which extensions add to the workflow.
    """
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "tuneloop"}
    defaults = {to_kebab_case(key): value for key, value in (parameters or {}).items()}
    # Argo's own containers carry no security context by default; a restricted namespace refuses
    # them without.
    cluster = cluster or Cluster()
    settings = cluster.common_pod_settings
    executor: JsonObject = {"resources": pod_fields.describe_executor(cluster)}
    if settings.container_security:
        executor = {"securityContext": settings.container_security} | executor
    patch = {
        "containers": [{"name": "wait"} | executor],
        "initContainers": [{"name": "init"} | executor],
    }
    annotations: dict[str, str] = {}
    templates: list[Any] = []
    exit_templates: list[str] = []
    for hook in list_pod_hooks():
        change = hook.change_workflow(cluster)
        if change:
            annotations |= change.annotations
            templates += change.templates
            exit_templates += [change.exit_template] if change.exit_template else []
    if plan:
        annotations[PLAN] = plan.dump()
    arguments = [
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
    ]
    for key, value in defaults.items():
        arguments.append(Parameter(name=key, value=str(value)))
    return Workflow(
        generate_name=f"{name}-",
        labels=labels,
        annotations=annotations or None,
        templates=templates,
        on_exit=add_exit_handler(templates, exit_templates),
        pod_metadata=models.Metadata(labels=labels),
        entrypoint="main",
        arguments=arguments,
        # A run has one writer, however its workflows are submitted: the next one waits until this
        # one has ended.
        synchronization=models.Synchronization(
            mutexes=[models.Mutex(name="{{workflow.parameters.run}}")]
        ),
        service_account_name=settings.service_account or pod_fields.ACCOUNT,
        automount_service_account_token=False,
        executor=models.ExecutorConfig(service_account_name="tuneloop-executor"),
        pod_spec_patch=encode_value(patch),
        security_context=models.PodSecurityContext.model_validate(settings.pod_security),
        pod_gc=models.PodGC(strategy="OnPodSuccess", delete_delay_duration=DELETE_DELAY),
        ttl_strategy=models.TTLStrategy(seconds_after_success=86400, seconds_after_failure=604800),
    )


def add_exit_handler(templates: list[Any], names: Sequence[str]) -> str | None:
    """Return the exit handler of a workflow, which runs the templates `names`; None for no names.

    A workflow has one handler: of several a graph is added to `templates`.
    """
    if len(names) < 2:
        return names[0] if names else None
    handler = DAG(
        name=EXIT_GRAPH,
        tasks=[Task(name=name, template=name) for name in names],
    )
    templates.append(handler)
    return EXIT_GRAPH


def stage_template(component: Component, stage: StagePlan, cluster: Cluster) -> Container | Steps:
    """Build a stage as a template named after it: a container, or a JobSet for several nodes.

    Its inputs are the stage's input artifacts (references), the output's URL and the parameters
    that the graph sets. Optional ones may be left out or empty. Its outputs are the output's
    reference, under the output's name, and the stage's results.

    `cluster/schedule.py: take_base_model` finds the flag ``--model`` in the arguments of the stage
    `base_model`, and replaces its value.

    Args:
        component: the stage as it is declared.
        stage: its plan (`tuneloop.argo.run_plan.plan_stage`).
        cluster: where its pods run.
    """
    flags = encode_flags(stage.parameters)
    flags += encode_flags({name: input_tag(to_kebab_case(name)) for name in stage.wired})
    outputs = [component.output]
    outputs += component.results
    is_job = stage.nodes > 1
    container = Container(
        name=stage.template,
        inputs=build_inputs(component, stage),
        outputs=[pod_output(to_kebab_case(name)) for name in outputs],
        command=component.command(1 if is_job else stage.processes),
        args=flags,
        # The pod that reads the output of a JobSet computes nothing.
        **pod_fields.retried_pod_fields(
            component.image,
            "cpu" if is_job else stage.resource_role,
            cluster,
            resources=None if is_job else stage.resources,
        ),
    )
    if component.account:
        container.service_account_name = component.account
        container.automount_service_account_token = True
    if is_job:
        return jobset_steps(component, stage, container, cluster)
    prepare_sampling(component, stage, container, cluster)
    return container


def build_inputs(component: Component, stage: StagePlan) -> list[Parameter]:
    """Build the inputs of a stage's template; an optional one may be left out or empty."""
    parameters = component.Params.model_fields
    inputs: list[Parameter] = []
    for name in stage.wired:
        is_optional = False
        if name in component.inputs:
            is_optional = not component.inputs[name]
        elif name in parameters:
            is_optional = not parameters[name].is_required()
        if is_optional:
            inputs.append(Parameter(name=to_kebab_case(name), default=""))
        else:
            inputs.append(Parameter(name=to_kebab_case(name)))
    return inputs


def prepare_sampling(
    component: Component, stage: StagePlan, container: Container, cluster: Cluster
) -> None:
    """Give a stage's pod the token of the servers that it calls, or what extensions add to a pod
    that computes itself. `argo/loop.py: iterations_template` and `pod_template` do both for a pod
    of iterations.
    """
    engine = pod_fields.read_engine(component, stage.parameters)
    calls_server = "endpoint" in stage.wired
    if calls_server and engine and engine.serves:
        pod_fields.mount_token(container, cluster, stage.resource_role)
    if engine and not engine.in_process:
        pod_fields.label_client(container)
    elif component.accelerator:
        for hook in list_pod_hooks():
            hook.change_computing_stage(cluster, component.image, container)


def server_template(server: ServerPlan, cluster: Cluster) -> Container:
    """Build a rollout server as a daemon of the graph that starts it.

    It follows the versions published at its URL of weights. Without one it has an input ``policy``,
    boots from this checkpoint and loads what it is told to. One of several has an input
    ``replica``, its number.

    `inference/server.py` parses the flags. `cluster/serving.py` makes Deployments of this template:
    it reads the arguments in pairs, so each flag needs a value, and it drops those with a tag of
    Argo. KFP starts the server by itself (`kfp/rollout_server.py`): what changes here, such as the
    time until it is ready (`BOOT_S` there), changes there.
    """
    has_replicas = server.replicas > 1
    inputs: list[str] = []
    if not server.weights:
        inputs.append("policy")
    if has_replicas:
        inputs.append("replica")
    args = ["--policy", input_tag("policy")]
    if server.weights:
        args = ["--weights", server.weights]
    attempts = "{{workflow.parameters.store}}/{{workflow.parameters.run}}/serve"
    if has_replicas:
        attempts += f"-{input_tag('replica')}"
    args += ["--host", "$(POD_IP)"]
    args += server.flags
    args += ["--attempts", attempts]
    # `tuneloop run` reads the field as 127.0.0.1.
    field = models.ObjectFieldSelector(field_path="status.podIP")
    address = models.EnvVar(name="POD_IP", value_from=models.EnvVarSource(field_ref=field))
    health = models.HTTPGetAction(path="/health", port=server.port)
    container = Container(
        name=server.template,
        daemon=True,
        inputs=[Parameter(name=name) for name in inputs],
        command=["python", "-m", "tuneloop.inference.server"],
        args=args,
        ports=[models.ContainerPort(container_port=server.port)],
        readiness_probe=models.Probe(http_get=health, period_seconds=1, failure_threshold=600),
        **pod_fields.retried_pod_fields(
            "rollout", server.resource_role, cluster, RETRY_SERVER, [address], server.resources
        ),
    )
    pod_fields.mount_token(container, cluster, server.resource_role)
    if server.asleep:
        resize_while_asleep(container, server.asleep)
    return container
