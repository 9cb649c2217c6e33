"""A loop as Argo templates: an iteration is a graph that calls itself, and a long loop continues in
another workflow::

    main:       evaluate-before → part
    part:       loop → continue (another workflow, from `continued` on), or evaluate-after → export
    loop:       rollout → reward → policy-update → next (this template again)
    continued:  serve → part

In an asynchronous loop, `loop` samples the first batch and calls `turn`, which updates on its
batch, samples the next one meanwhile, and calls itself. With several iterations in a pod, `loop`
calls that pod and then itself.

Argo replaces ``{{tag}}`` by text, and computes ``{{=expression}}``. Hera formats a term of an
expression as the latter with ``f"{term:=}"``.

`kfp/loop.py` draws the same loop for Kubeflow Pipelines, and `local/iterations.py` runs it in a
pod: what an iteration does differently is changed in all three. When an evaluation is due
(`call_next`) is also computed by `kfp/iterations.py: read_iteration`, and counted by
`planning/counts.py: count_runs`. Names of templates and tasks are read elsewhere: `continued` by
`cluster/continue_run.py` and forks, `serve` by `cluster/serving.py`, `ahead` by
`extensions/sharing/colocation.py`. `planning/counts.py` finds the loop by the template that calls
itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hera.expr import C, P, g
from hera.workflows import DAG, Container, Parameter

from tuneloop.argo.pod_fields import (
    label_client,
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
    expression_parameter,
    input_tag,
    output_term,
    pod_output,
    tag_parameter,
    task_tag,
)
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.program import to_kebab_case
from tuneloop.workflow.loop import Loop, Step, output_of, step_of
from tuneloop.workflow.loop_state import goes_on
from tuneloop.workflow.plan import PodPlan, RunPlan
from tuneloop.workflow.pod_hook import list_pod_hooks
from tuneloop.workflow.pod_loop import PROGRAM, PerPod, PodLoop
from tuneloop.workflow.settings import NEXT, Cluster

Templates = JsonMapping
"""Name of a template → the template; calling it inside a graph creates a task."""


def build_dag(name: str, inputs: Iterable[str], outputs: Sequence[Parameter] = ()) -> Any:
    """Return a graph with input parameters; it is Any because Hera does not type the result of
    calling one.
    """
    parameters = [Parameter(name=item) for item in inputs]
    return DAG(name=name, inputs=parameters, outputs=list(outputs) or None)


def build_input_tags(names: Iterable[str]) -> dict[str, str]:
    """Return arguments that pass on the inputs of the enclosing template."""
    return {name: input_tag(name) for name in names}


def build_wire_tag(wire: str) -> str:
    """Return the tag of the output that a wire names, of another task of the graph."""
    return task_tag(step_of(wire), output_of(wire))


def build_wire_term(wire: str) -> Any:
    """Return the output that a wire names as a term of an expression."""
    return output_term(step_of(wire), output_of(wire))


def build_loop_condition(iteration: Any, reward: Any) -> Any:
    """Return the condition for another iteration after the one with this number and this mean
    reward.
    """
    limits: Any = g.workflow.parameters
    return goes_on(
        iteration.as_int(),
        reward.as_float(),
        limits.iterations.as_int(),
        limits["target-reward"].as_float(),
    )


def build_same_workflow_condition(iteration: Any, reward: Any) -> Any:
    """Return the condition for another iteration in the same workflow."""
    per_workflow: Any = g.workflow.parameters["per-workflow"]
    is_inside = iteration.as_int() % per_workflow.as_int() != 0
    return is_inside & build_loop_condition(iteration, reward)


def build_last_outputs(terms: JsonMapping) -> list[Parameter]:
    """Return the outputs of a template that calls itself as `next`: those of the last call.

    Args:
        terms: output → its term in this call, if no other one follows.
    """
    following: Any = g.tasks.next
    # Only a task that ran has outputs: its status tells it.
    has_run = following.status == "Succeeded"
    outputs: list[Parameter] = []
    for name, term in terms.items():
        choice = has_run.check(following.outputs.parameters[name], term)
        outputs.append(expression_parameter(name, choice))
    return outputs


def call_step(
    step: Step, templates: Templates, values: Mapping[str, str], when: str | None = None
) -> Any:
    """Create a step's task in an iteration.

    Args:
        step: the call, of a stage with at least one input artifact.
        templates: that of the step's stage is among them.
        values: of the loop; a wire that is not among them is an output of another task of the
            graph.
        when: the condition on which it runs; None: always.
    """
    inputs = [name for name in step.wires if name in step.component.inputs]
    last_input = inputs[-1]
    arguments: dict[str, str] = {}
    for name, wire in step.wires.items():
        if wire in values:
            arguments[name] = values[wire]
        else:
            arguments[name] = build_wire_tag(wire)
        # In the manifest a stage's output stands after its inputs and before its parameters.
        if name == last_input:
            arguments[to_kebab_case(step.component.output)] = f"{ITERATION}/{step.name}"
    return templates[step.name](name=step.name, arguments=arguments, when=when)


def chain_steps(steps: Sequence[Step], templates: Templates, values: Mapping[str, str]) -> Any:
    """Create the tasks of `steps`, each after the previous one, whether it takes its outputs or
    not; return the last."""
    last: Any = None
    for step in steps:
        task = call_step(step, templates, values)
        if last is not None:
            last >> task
        last = task
    return last


def call_once(
    step: Step,
    templates: Templates,
    values: Mapping[str, str],
    name: str,
    when: str | None = None,
) -> Any:
    """Create the task of a step outside of iterations, committed below the run under the task's
    name. An evaluation there has the iteration 0, as on KFP (`kfp/loop.py: draw`).

    Args:
        step: the call.
        templates: that of the step's stage is among them.
        values: wire → tag, of every wire of the step but ``iteration``.
        name: of the task.
        when: the condition on which it runs; None: always.
    """
    arguments = {key: values[wire] for key, wire in step.wires.items() if wire != "iteration"}
    if "iteration" in step.wires.values():
        arguments["iteration"] = "0"
    arguments[to_kebab_case(step.component.output)] = f"{RUN}/{name}"
    return templates[step.name](name=name, arguments=arguments, when=when)


def build_loop(loop: Loop, templates: Templates, config: LoopPipelineConfig) -> Any:
    """Build the template `loop`: iterations that start from a policy, until the loop or the
    workflow's part ends.
    """
    evaluate_every = config.loop.evaluate_every
    if not config.loop.asynchronous:
        return build_iteration(loop, templates, evaluate_every)
    # The first batch and those of later iterations are sampled by one template.
    sampled = build_input_tags(loop.values_of(loop.batch))
    batch_outputs: list[Parameter] = []
    for wire in loop.batch_wires:
        batch_outputs.append(tag_parameter(output_of(wire), build_wire_tag(wire)))
    with build_dag("batch", sampled, batch_outputs) as batch:
        chain_steps(loop.batch, templates, sampled)
    turn = build_turn(loop, templates, evaluate_every, batch)
    outputs: list[Parameter] = []
    for name in loop.outputs:
        outputs.append(tag_parameter(name, task_tag("turn", name)))
    with build_dag("loop", loop.inputs, outputs) as template:
        # Nothing is trained meanwhile: there is no batch yet.
        first = batch(name="batch", arguments=sampled)
        arguments = build_input_tags(loop.inputs)
        for wire in loop.batch_wires:
            arguments[output_of(wire)] = Output(first, output_of(wire))
        first >> turn(name="turn", arguments=arguments)
    return template


@dataclass(frozen=True)
class IterationParts:
    """What the graph of an iteration is built from.

    Attributes:
        loop: its steps.
        templates: those of the stages.
        values: wire → tag, of the loop's values; in an asynchronous loop also of the batch, which
            the template gets as inputs.
        reward: the mean reward of the batch that is trained on, as a term.
        evaluate_every: iterations between two evaluations; 0: none.
    """

    loop: Loop
    templates: Templates
    values: Mapping[str, str]
    reward: Any
    evaluate_every: int

    @property
    def condition(self) -> str:
        """The condition on which another iteration follows in the same workflow."""
        number = g.inputs.parameters.iteration
        return f"{build_same_workflow_condition(number, self.reward):=}"

    @property
    def next_number(self) -> str:
        """The number of the iteration that follows."""
        return f"{g.inputs.parameters.iteration.as_int() + 1:=}"

    def build_outputs(self) -> list[Parameter]:
        """Build the outputs: what the last iteration leaves."""
        terms = {name: build_wire_term(wire) for name, wire in self.loop.carry.items()}
        # Outputs see tasks, but no inputs; a tag is replaced before.
        terms["iteration"] = getattr(g, input_tag("iteration")).string()
        terms[output_of(self.loop.reward)] = self.reward
        return build_last_outputs(terms)

    def call_next(self, template: Any, tasks: Sequence[Any], batch: Mapping[str, str]) -> None:
        """Create the task of the next iteration, and before it the evaluation if one may be due.

        Args:
            template: of an iteration.
            tasks: those of this iteration that both wait for; the first is the update.
            batch: arguments with the next batch, where it is sampled already.
        """
        update = tasks[0]
        trained = {name: Output(update, output_of(wire)) for name, wire in self.loop.carry.items()}
        arguments: dict[str, str] = {"iteration": self.next_number}
        arguments |= trained
        arguments |= build_input_tags(self.loop.constants)
        arguments |= build_input_tags(["endpoint"])
        arguments |= batch
        following = template(name="next", arguments=arguments, when=self.condition)
        working = list(tasks)
        if not self.evaluate_every:
            working >> following
            return
        is_due: Any = g.inputs.parameters.iteration.as_int() % self.evaluate_every == 0
        values = dict(self.values) | trained
        check = call_step(
            self.loop.check,
            self.templates,
            values,
            when=f"{is_due:=}",
        )
        # A server holds one version at a time.
        working >> check
        following.depends = f"{update.name} && ({check.name}.Succeeded || {check.name}.Skipped)"


def build_iteration(loop: Loop, templates: Templates, evaluate_every: int) -> Any:
    """Build the template `loop` of an iteration that samples, trains, and calls the next."""
    parts = IterationParts(
        loop=loop,
        templates=templates,
        values=build_input_tags(loop.inputs),
        reward=build_wire_term(loop.reward),
        evaluate_every=evaluate_every,
    )
    with build_dag("loop", loop.inputs, parts.build_outputs()) as template:
        update = chain_steps(loop.steps, templates, parts.values)
        parts.call_next(template, [update], {})
    return template


def build_turn(loop: Loop, templates: Templates, evaluate_every: int, batch: Any) -> Any:
    """Build the template `turn` of an iteration of an asynchronous loop, which calls the next.

    It is given a batch. While it updates on that, it calls the template `batch` for the next one,
    with the policy that it starts from. `extensions/sharing/colocation.py` recognizes an
    asynchronous loop by the task `ahead`.
    """
    batch_names = [output_of(wire) for wire in loop.batch_wires]
    values = build_input_tags(loop.inputs)
    for wire in loop.batch_wires:
        values[wire] = input_tag(output_of(wire))
    parts = IterationParts(
        loop=loop,
        templates=templates,
        values=values,
        reward=build_term(g.inputs.parameters, output_of(loop.reward)),
        evaluate_every=evaluate_every,
    )
    inputs = list(loop.inputs) + batch_names
    with build_dag("turn", inputs, parts.build_outputs()) as template:
        update = call_step(loop.trainer, templates, values)
        sampled = build_input_tags(loop.values_of(loop.batch))
        sampled["iteration"] = parts.next_number
        # It has no edge from the update: both run at the same time. `planning/counts.py` counts it
        # to the next iteration because it has the same condition as `next`.
        ahead = batch(name="ahead", arguments=sampled, when=parts.condition)
        next_batch: dict[str, str] = {}
        for name in batch_names:
            output: Any = g.tasks.ahead.outputs.parameters[name]
            next_batch[name] = build_optional_output("ahead", output)
        parts.call_next(template, [update, ahead], next_batch)
    return template


def build_optional_output(task: str, output: Any) -> str:
    """Return the tag of an output of a task that may be skipped: it is empty then."""
    task_term: Any = build_term(g.tasks, task)
    has_run = task_term.status == "Succeeded"
    return f"{has_run.check(output, C('')):=}"


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

    `local/iterations.py` parses the flags that are written here; KFP's task of iterations gets the
    same values another way (`kfp/iterations.py`).

    Args:
        loop: the steps.
        inputs: of the template; each is a value of the first iteration.
        outputs: of the template, which the program writes under these names.
        values: name → text of further values of the loop, which stay the same.
        per_pod: iterations; ``auto``: up to all of the workflow's.
        pod: its plan.
        cluster: where it runs.
    """
    limit = [str(per_pod)]
    if per_pod == "auto":
        limit = ["{{workflow.parameters.per-workflow}}", "--auto"]
    args = [
        "--loop",
        loop.model_dump_json(exclude_defaults=True),
        "--run",
        RUN,
        "--iterations",
        "{{workflow.parameters.iterations}}",
        "--per-pod",
    ]
    args += limit
    args += ["--target-reward", "{{workflow.parameters.target-reward}}"]
    initial_values = build_input_tags(inputs) | dict(values)
    for name, value in initial_values.items():
        args += ["--value", f"{name}={value}"]
    container = Container(
        name=pod.template,
        inputs=[Parameter(name=item) for item in inputs],
        outputs=[pod_output(name) for name in outputs],
        command=["python", "-m", PROGRAM],
        args=args,
        **retried_pod_fields("rollout", pod.resource_role, cluster, resources=pod.resources),
    )
    for hook in list_pod_hooks():
        hook.change_computing_stage(cluster, "rollout", container)
    return container


def iterations_template(loop: Loop, plan: RunPlan, config: LoopPipelineConfig) -> Container:
    """Return the template of a pod that runs several iterations of a pipeline's loop."""
    loop_plan = plan.loop
    assert loop_plan and loop_plan.pod, "the iterations have a pod"
    container = pod_template(
        loop_plan.build_pod_loop(plan.stages),
        loop.inputs,
        loop.pod_outputs,
        config.published(RUN),
        per_pod=loop_plan.iterations_per_pod,
        pod=loop_plan.pod,
        cluster=config.cluster,
    )
    if config.engine.server:
        mount_token(container, config.cluster, loop_plan.pod.resource_role)
    elif not config.engine.capabilities.in_process:
        label_client(container)
    return container


def build_pods(loop: Loop, pod: Any) -> Any:
    """Build the template `loop` with several iterations in a pod: it calls the container `pod`, and
    then itself.
    """
    # A pod may stop early, at the target reward or by itself: its outputs say where it stands.
    results = g.tasks.iterations.outputs.parameters
    outputs = build_last_outputs({name: results[name] for name in loop.pod_outputs})
    with build_dag("loop", loop.inputs, outputs) as template:
        work = pod(name="iterations", arguments=build_input_tags(loop.inputs))
        arguments = build_input_tags(loop.inputs)
        arguments["iteration"] = f"{results.iteration.as_int() + 1:=}"
        arguments |= {name: Output(work, name) for name in loop.carry}
        reward = build_term(results, output_of(loop.reward))
        condition = build_same_workflow_condition(results.iteration, reward)
        work >> template(
            name="next",
            arguments=arguments,
            when=f"{condition:=}",
        )
    return template


def build_continue_template(
    entrypoint: str, arguments: Sequence[str], cluster: Cluster
) -> Container:
    """Build the step ``continue``, which starts the run's next workflow at the template
    `entrypoint`. It has inputs of the names `arguments`, and passes their values on.

    `cluster/continue_run.py` parses the flags; `planning/counts.py` recognizes the step by its
    command.
    """
    args = [
        "--workflow",
        "{{workflow.name}}",
        "--namespace",
        "{{workflow.namespace}}",
        "--entrypoint",
        entrypoint,
    ]
    args += [f"{name}={input_tag(name)}" for name in arguments]
    return Container(
        name="continue",
        inputs=[Parameter(name=name) for name in arguments],
        # As a global parameter it is found in a workflow's status, whichever task has put it there.
        outputs=[pod_output(NEXT, global_name=NEXT)],
        command=["python", "-m", "tuneloop.cluster.continue_run"],
        args=args,
        **step_fields("tuneloop-continue", cluster),
    )


def build_part(loop: Loop, templates: Templates, config: LoopPipelineConfig) -> Any:
    """Build the template `part`: one workflow's part of the loop; then the next workflow, or the
    end of the run. The template `continued`, where the next workflow starts, comes with it: it has
    no `main` before it, so it starts the servers again.
    """
    proceed = build_continue_template(CONTINUED, loop.passed, config.cluster)
    results = g.tasks.loop.outputs.parameters
    reward = build_term(results, output_of(loop.reward))
    condition = build_loop_condition(results.iteration, reward)
    steps_by_name = {f"{loop.check.name}-after": loop.check}
    steps_by_name |= {step.name: step for step in loop.finish}
    with build_dag("part", loop.inputs) as part:
        repeat = templates["loop"](name="loop", arguments=build_input_tags(loop.inputs))
        trained = {name: Output(repeat, name) for name in loop.carry}
        arguments = build_input_tags(loop.constants)
        arguments["iteration"] = f"{results.iteration.as_int() + 1:=}"
        arguments |= trained
        repeat >> proceed(
            name="continue",
            arguments=arguments,
            when=f"{condition:=}",
        )
        values = build_input_tags(loop.inputs) | trained
        last = repeat
        # One after the other: a server holds one version at a time.
        for name, step in steps_by_name.items():
            if step.name in templates:
                task = call_once(
                    step,
                    templates,
                    values,
                    name,
                    when=f"{~P(condition):=}",
                )
                last >> task
                last = task
                # All of them are skipped together where the run continues in another workflow.
                for wire in step.outputs:
                    output = output_term(name, output_of(wire))
                    values[wire] = build_optional_output(name, output)
    with build_dag(CONTINUED, loop.passed):
        servers, endpoint = call_server(templates, config, input_tag("policy"))
        arguments = build_input_tags(loop.passed)
        arguments["endpoint"] = endpoint
        servers >> part(name="part", arguments=arguments)
    return part


def call_server(
    templates: Templates, config: LoopPipelineConfig, policy: str
) -> tuple[list[Any], str]:
    """Create the tasks of the engine's rollout servers, if there are any.

    Args:
        templates: that of the servers is among them, if the run starts any.
        config: the pipeline's.
        policy: with which they boot; servers that pull find the latest version themselves.

    Returns:
        The tasks, and the endpoint of what samples.
    """
    server = config.engine.server
    if server is None or SERVER not in templates:
        return [], config.engine.endpoint_url
    boot = {} if config.engine.publication else {"policy": policy}
    template = templates[SERVER]
    tasks: list[Any] = []
    if server.replicas == 1:
        tasks.append(template(name=SERVER, arguments=boot))
    else:
        # A daemon's task has the address of one pod, so that each replica is a task.
        for number in range(1, server.replicas + 1):
            arguments = boot | {"replica": str(number)}
            tasks.append(template(name=f"{SERVER}-{number}", arguments=arguments))
    return tasks, ",".join(f"http://{task.ip}:{server.port}" for task in tasks)


def call_loop(
    loop: Loop,
    templates: Templates,
    config: LoopPipelineConfig,
    boot: Output,
    values: Mapping[str, Output],
) -> None:
    """Evaluate the policy, then loop; to be called inside the main DAG.

    The server boots with the checkpoint `boot` while the loop's first policy may still be trained
    (as by SFT), unless both use the same device.

    Args:
        loop: the pipeline's.
        templates: of its stages and servers, and `part`.
        config: its settings.
        boot: the checkpoint that servers boot with.
        values: what the loop starts from, by the names in its `carry` and `constants`.
    """
    servers, endpoint = call_server(templates, config, boot)
    start: Any = values["policy"].task
    arguments: dict[str, str] = dict(values)
    arguments["endpoint"] = endpoint
    arguments["iteration"] = "1"
    before = call_once(loop.check, templates, arguments, f"{loop.check.name}-before")
    part_arguments = {name: arguments[name] for name in loop.values_of(loop.steps)}
    first = templates["part"](name="part", arguments=part_arguments)
    server = config.engine.server
    if server and server.shares_gpu:
        # It would take the device from the stages that train the loop's first policy.
        start >> servers
    else:
        boot.task >> servers
    awaited = [start]
    awaited += servers
    awaited >> before >> first
