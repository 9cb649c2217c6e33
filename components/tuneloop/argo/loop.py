"""A loop as Argo templates: an iteration is a graph that calls itself, and a long loop continues in another workflow::

    main:       evaluate-before → part
    part:       loop → continue (another workflow, from `continued` on), or evaluate-after → export
    loop:       rollout → reward → policy-update → next (this template again)
    continued:  serve → part

In an asynchronous loop, `loop` samples the first batch and calls `turn`, which updates on its batch, samples the next
one meanwhile, and calls itself. With several iterations in a pod, `loop` calls that pod and then itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from hera.expr import C, P, g
from hera.workflows import DAG, Container, Parameter
from hera.workflows.models import ValueFrom

from tuneloop.argo.claims import role_of
from tuneloop.argo.lease_sidecar import add_lease_sidecar
from tuneloop.argo.pod_fields import (
    OUTPUTS,
    mount_token,
    retried_pod_fields,
    step_fields,
)
from tuneloop.argo.run_plan import SERVER
from tuneloop.argo.tasks import (
    CONTINUED,
    ITERATION,
    RUN,
    Output,
    build_term,
    input_tag,
    output_parameter,
    output_term,
    task_tag,
)
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.program import to_kebab_case
from tuneloop.workflow.loop import Loop, Step, output_of, step_of
from tuneloop.workflow.loop_state import goes_on
from tuneloop.workflow.plan import PodPlan, RunPlan
from tuneloop.workflow.pod_loop import PROGRAM, PerPod, PodLoop
from tuneloop.workflow.settings import CLIENT_LABEL, NEXT, Cluster

Templates = JsonMapping
"""Name of a template → the template; calling it inside a graph creates a task."""


def build_dag(name: str, inputs: Sequence[str], outputs: Sequence[Parameter] = ()) -> Any:
    """Return a graph with input parameters; it is Any because Hera does not type the result of calling one."""
    return DAG(name=name, inputs=[Parameter(name=k) for k in inputs], outputs=list(outputs) or None)


def build_input_tags(names: Sequence[str]) -> dict[str, str]:
    """Return arguments that pass on the inputs of the enclosing template."""
    return {name: input_tag(name) for name in names}


def build_loop_condition(iteration: Any, reward: Any) -> Any:
    """Return the condition for another iteration after the one with this number and this mean reward."""
    limits: Any = g.workflow.parameters
    return goes_on(
        iteration.as_int(),
        reward.as_float(),
        limits.iterations.as_int(),
        limits["target-reward"].as_float(),
    )


def build_same_workflow_condition(iteration: Any, reward: Any) -> Any:
    """Return the condition for another iteration in the same workflow."""
    here: Any = iteration.as_int() % g.workflow.parameters["per-workflow"].as_int() != 0
    return here & build_loop_condition(iteration, reward)


def last_outputs(own: JsonMapping) -> list[Parameter]:
    """Return the outputs of a template that calls itself as `next`: those of the last call, or else its `own`."""
    following: Any = g.tasks.next  # only a task that ran has outputs; Argo says so by its status
    ran = following.status == "Succeeded"
    return [
        output_parameter(k, expression=ran.check(following.outputs.parameters[k], own[k]))
        for k in own
    ]


def call_step(step: Step, templates: Templates, values: Mapping[str, str], **about: Any) -> Any:
    """Make a step's task in an iteration; a wire that is not in `values` is an output of another task of the graph."""
    given = {
        k: values[wire] if wire in values else task_tag(*wire.split("."))
        for k, wire in step.wires.items()
    }
    arguments = list(given.items())
    behind = max(i for i, name in enumerate(given) if name in step.component.inputs)
    arguments.insert(behind + 1, (to_kebab_case(step.component.output), f"{ITERATION}/{step.name}"))
    return templates[step.name](name=step.name, arguments=dict(arguments), **about)


def chain_steps(steps: Sequence[Step], templates: Templates, values: Mapping[str, str]) -> Any:
    """Create the tasks of `steps`, each after the previous one; return the last."""
    before = None
    for step in steps:
        task = call_step(step, templates, values)
        before = before >> task if before else task
    return before


def call_once(
    step: Step, templates: Templates, values: Mapping[str, str], name: str, **about: Any
) -> Any:
    """Make the task of a step outside of iterations, committed below the run under the task's name."""
    arguments = {k: values[wire] for k, wire in step.wires.items() if wire != "iteration"}
    if "iteration" in step.wires.values():
        arguments["iteration"] = "0"
    arguments[to_kebab_case(step.component.output)] = f"{RUN}/{name}"
    return templates[step.name](name=name, arguments=arguments, **about)


def build_loop(loop: Loop, templates: Templates, config: LoopPipelineConfig) -> Any:
    """Build the template `loop`: iterations that start from a policy, until the loop or the workflow's part ends."""
    every = config.loop.evaluate_every
    if not config.loop.asynchronous:
        return build_iteration(loop, templates, every)
    sampled = build_input_tags(loop.values_of(loop.batch))
    batched = [output_of(wire) for wire in loop.batch_wires]
    outputs = [
        output_parameter(output_of(wire), value=task_tag(*wire.split(".")))
        for wire in loop.batch_wires
    ]
    with build_dag("batch", list(sampled), outputs) as batch:
        chain_steps(loop.batch, templates, sampled)
    turn = build_iteration(loop, templates, every, batch)
    outputs = [output_parameter(k, value=task_tag("turn", k)) for k in loop.outputs]
    with build_dag("loop", loop.inputs, outputs) as made:
        first = batch(name="batch", arguments=sampled)
        first >> turn(
            name="turn",
            arguments=build_input_tags(loop.inputs) | {k: Output(first, k) for k in batched},
        )
    return made


def build_iteration(
    loop: Loop, templates: Templates, evaluate_every: int, batch: Any = None
) -> Any:
    """Build the template of one iteration, which calls the next. In an asynchronous loop it is given its batch, and
    during its update calls the template `batch` for the next batch, with the policy that it starts from."""
    number = g.inputs.parameters.iteration
    reward = output_of(loop.reward)
    rewarded = (
        build_term(g.inputs.parameters, reward)
        if batch
        else output_term(step_of(loop.reward), reward)
    )
    more = f"{build_same_workflow_condition(number, rewarded):=}"
    after = f"{number.as_int() + 1:=}"
    batched = [output_of(wire) for wire in loop.batch_wires] if batch else []
    # Outputs see tasks, but no inputs; a tag is replaced before.
    own = {name: output_term(*wire.split(".")) for name, wire in loop.carry.items()}
    own |= {"iteration": getattr(g, input_tag("iteration")).string(), reward: rewarded}
    values = {
        **build_input_tags(loop.inputs),
        **{wire: input_tag(output_of(wire)) for wire in loop.batch_wires if batch},
    }
    with build_dag(
        "turn" if batch else "loop", (*loop.inputs, *batched), last_outputs(own)
    ) as made:
        scored = None if batch else chain_steps(loop.batch, templates, values)
        update = call_step(loop.trainer, templates, values)
        if scored:
            scored >> update
        trained = {name: Output(update, output_of(wire)) for name, wire in loop.carry.items()}
        done = [update]
        if batch:
            sampled = {**build_input_tags(loop.values_of(loop.batch)), "iteration": after}
            done.append(batch(name="ahead", arguments=sampled, when=more))
        given = {"iteration": after, **trained, **build_input_tags((*loop.constants, "endpoint"))}
        ahead: Any = g.tasks.ahead  # it has outputs if it ran
        ran = ahead.status == "Succeeded"
        given |= {k: f"{ran.check(ahead.outputs.parameters[k], C('')):=}" for k in batched}
        following = made(name="next", arguments=given, when=more)
        if evaluate_every:
            when: Any = number.as_int() % evaluate_every == 0
            check = call_step(loop.check, templates, {**values, **trained}, when=f"{when:=}")
            done >> check  # a server holds one version at a time
            following.depends = f"{update.name} && ({check.name}.Succeeded || {check.name}.Skipped)"
        else:
            done >> following
    return made


def pod_template(
    loop: PodLoop,
    inputs: Sequence[str],
    outputs: Sequence[str],
    values: Mapping[str, str],
    *,
    per_pod: PerPod,
    pod: PodPlan,
    cluster: Cluster,
) -> Container:
    """Return the template of a pod that runs several iterations.

    Args:
        loop: the steps.
        inputs: of the template; each is a value of the first iteration.
        outputs: of the template.
        values: further values of the loop, which stay the same.
        per_pod: iterations; ``auto``: up to all of the workflow's.
        pod: its plan.
        cluster: where it runs.
    """
    limit = [str(per_pod)]
    if per_pod == "auto":
        limit = ["{{workflow.parameters.per-workflow}}", "--auto"]
    passed = {name: input_tag(name) for name in inputs} | dict(values)
    container = Container(
        name=pod.template,
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[
            Parameter(name=name, value_from=ValueFrom(path=f"{OUTPUTS}/{name}")) for name in outputs
        ],
        command=["python", "-m", PROGRAM],
        args=[
            "--loop",
            loop.model_dump_json(exclude_defaults=True),
            "--run",
            RUN,
            "--iterations",
            "{{workflow.parameters.iterations}}",
            "--per-pod",
            *limit,
            "--target-reward",
            "{{workflow.parameters.target-reward}}",
            *(word for name, value in passed.items() for word in ("--value", f"{name}={value}")),
        ],
        **retried_pod_fields("rollout", pod.resource_role, cluster, resources=pod.resources),
    )
    add_lease_sidecar(container, cluster, role_of("rollout"))
    return container


def iterations_template(loop: Loop, plan: RunPlan, config: LoopPipelineConfig) -> Container:
    """Return the template of a pod that runs several iterations of a pipeline's loop."""
    looped = plan.loop
    assert looped and looped.pod, "the iterations have a pod"
    container = pod_template(
        looped.build_pod_loop(plan.stages),
        loop.inputs,
        loop.pod_outputs,
        config.published(RUN),
        per_pod=looped.iterations_per_pod,
        pod=looped.pod,
        cluster=config.cluster,
    )
    if config.engine.server:
        mount_token(container)
    elif not config.engine.capabilities.in_process:
        container.labels = {**(container.labels or {}), CLIENT_LABEL: "true"}
    return container


def build_pods(loop: Loop, pod: Any) -> Any:
    """Build the template `loop` with several iterations in a pod: it calls the container `pod`, and then itself."""
    ended = g.tasks.iterations.outputs.parameters
    with build_dag(
        "loop", loop.inputs, last_outputs({name: ended[name] for name in loop.pod_outputs})
    ) as made:
        work = pod(name="iterations", arguments=build_input_tags(loop.inputs))
        following = {
            "iteration": f"{ended.iteration.as_int() + 1:=}",
            **{k: Output(work, k) for k in loop.carry},
        }
        more = build_same_workflow_condition(
            ended.iteration, build_term(ended, output_of(loop.reward))
        )
        work >> made(
            name="next", arguments={**build_input_tags(loop.inputs), **following}, when=f"{more:=}"
        )
    return made


def build_continue_template(
    entrypoint: str, arguments: Sequence[str], cluster: Cluster
) -> Container:
    """Build the step ``continue``, which starts the run's next workflow at the template `entrypoint`."""
    passed = [f"{name}={input_tag(name)}" for name in arguments]
    own = [
        "--workflow",
        "{{workflow.name}}",
        "--namespace",
        "{{workflow.namespace}}",
        "--entrypoint",
        entrypoint,
    ]
    return Container(
        name="continue",
        inputs=[Parameter(name=name) for name in arguments],
        outputs=[
            Parameter(name=NEXT, global_name=NEXT, value_from=ValueFrom(path=f"{OUTPUTS}/{NEXT}"))
        ],
        command=["python", "-m", "tuneloop.cluster.continue_run"],
        args=[*own, *passed],
        **step_fields("tuneloop-continue", cluster),
    )


def build_part(loop: Loop, templates: Templates, config: LoopPipelineConfig) -> Any:
    """Make the template `part`: one workflow's part of the loop; then the next workflow, or the end of the run."""
    proceed = build_continue_template(CONTINUED, loop.passed, config.cluster)
    ended = g.tasks.loop.outputs.parameters
    more = build_loop_condition(ended.iteration, build_term(ended, output_of(loop.reward)))
    with build_dag("part", loop.inputs) as part:
        repeat = templates["loop"](name="loop", arguments=build_input_tags(loop.inputs))
        trained = {name: Output(repeat, name) for name in loop.carry}
        following = {
            **build_input_tags(loop.constants),
            "iteration": f"{ended.iteration.as_int() + 1:=}",
            **trained,
        }
        repeat >> proceed(name="continue", arguments=following, when=f"{more:=}")
        values = {**build_input_tags(loop.inputs), **trained}
        before = repeat
        # One after the other: a server holds one version at a time.
        for step, name in (
            (loop.check, f"{loop.check.name}-after"),
            *((step, step.name) for step in loop.finish),
        ):
            if step.name in templates:
                before = before >> call_once(step, templates, values, name, when=f"{~P(more):=}")
                ran: Any = build_term(g.tasks, name).status == "Succeeded"
                values |= {
                    each: f"{ran.check(output_term(name, output_of(each)), C('')):=}"
                    for each in step.outputs
                }
    with build_dag(CONTINUED, loop.passed):
        server, endpoint = call_server(templates, config, input_tag("policy"))
        server >> part(
            name="part", arguments={**build_input_tags(loop.passed), "endpoint": endpoint}
        )
    return part


def call_server(
    templates: Templates, config: LoopPipelineConfig, policy: str
) -> tuple[list[Any], str]:
    """Create the tasks of the engine's rollout servers, if there are any; return them and their endpoint. They boot
    with `policy`; servers that pull find the latest version themselves."""
    server = config.engine.server
    if server is None or SERVER not in templates:
        return [], config.engine.endpoint_url
    given = {} if config.engine.publication else {"policy": policy}
    count = server.replicas
    calls = (
        {f"{SERVER}-{i}": {**given, "replica": str(i)} for i in range(1, count + 1)}
        if count > 1
        else {SERVER: given}
    )
    tasks = [templates[SERVER](name=name, arguments=arguments) for name, arguments in calls.items()]
    return tasks, ",".join(f"http://{task.ip}:{server.port}" for task in tasks)


def call_loop(
    loop: Loop,
    templates: Templates,
    config: LoopPipelineConfig,
    boot: Output,
    values: Mapping[str, Output],
) -> None:
    """Evaluate the policy, then loop; to be called inside the main DAG. The server boots with the checkpoint
    `boot` while the loop's policy may still be trained, unless both want the same device."""
    server, endpoint = call_server(templates, config, boot)
    start: Any = values["policy"].task
    given = {**values, "endpoint": endpoint, "iteration": "1"}
    before = call_once(loop.check, templates, given, f"{loop.check.name}-before")
    first = templates["part"](
        name="part", arguments={name: given[name] for name in loop.values_of(loop.steps)}
    )
    is_colocated = bool(config.engine.server and config.engine.server.colocate)
    (start if is_colocated else boot.task) >> server
    [start, *server] >> before >> first
