"""What a rendered workflow will do: graph, pods, accelerators, steps, tokens, memory.

It is read from the workflow's graph and its plan (`tuneloop.workflow.plan`). Counts that the graph
decides while it runs are shown as bounds.

`tuneloop plan` prints it; it refuses nothing, which is `planning/limits.py`'s part. Work and steps
are read from parameters of stages by their names, as in `planning/arithmetic.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tuneloop.argo.memory_estimate import (
    Part,
    compute_memory_request,
    estimate_memory_parts,
    is_memory_estimate_complete,
)
from tuneloop.config.model_facts import Model
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.wording import format_count
from tuneloop.planning.checkpoint_size import describe_checkpoint
from tuneloop.planning.counts import count_iterations, index_templates
from tuneloop.planning.pods import PlannedPods, list_planned_pods
from tuneloop.runs.summary import format_size
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.plan import PodPlan, StagePlan, read_plan
from tuneloop.workflow.pod_hook import list_pod_hooks

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.tree import Tree

PRESET = " (preset)"
"""Stands behind the memory of a pod that is the same for all models."""
IN_PART = " (in part)"
"""Stands behind the memory of a pod whose needs are known in part: it may take more."""


SHARED = " (one pod)"
"""Stands behind the memory of the pod that runs a stage with the others of an iteration."""
MEMORY_NOTES = {
    PRESET: "the same for all models",
    IN_PART: "estimated in part: it may take more",
    SHARED: "one pod runs these stages one after another",
}
"""What stands behind a pod's memory → what it means, as printed below the table. A further
qualification has to be here, or it is not explained."""


def render_plan(name: str, workflow: JsonMapping) -> "RenderableType":
    """Render a workflow's plan for a terminal.

    Args:
        name: the pipeline's.
        workflow: as it is rendered.

    Raises:
        UserError: there is no such model, the pods of an extension do not fit, or the workflow carries no
            plan.
    """
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    pods = list_planned_pods(workflow, read_plan(workflow))
    model = pods.model
    tree = Tree(f"{name}: at most {format_count(pods.counts.total, 'pod')}")
    templates = index_templates(workflow)
    iterations = count_iterations(workflow)
    _add_calls(tree, templates, pods, iterations, workflow["spec"]["entrypoint"], [])
    lines = list(filter(None, [_explain_memory(pods)]))
    # What is known without the shape of the model comes first.
    lines.append("work, at most")
    for stage, text in estimate_work(pods.stages, pods.counts.stages):
        lines.append(f"  {stage}: {text}")
    checkpoints = _describe_checkpoints(pods)
    if checkpoints:
        lines.append("size of a checkpoint")
        lines += checkpoints
    parameters: int | None = None
    if isinstance(model, Model):
        parameters = model.parameters
        lines.append(f"memory, for {model.name} of {parameters:,} parameters ({model.derivation})")
        lines += _describe_memory(pods, model)
    else:
        lines.append(f"memory: {model}")
    for hook in list_pod_hooks():
        lines += hook.describe_plan(workflow, parameters)
    return Group(tree, _draw_table(templates, pods), Text("\n".join(lines)))


def _draw_table(templates: Mapping[str, JsonMapping], pods: PlannedPods) -> "Table":
    """Draw a row for each of the templates that is a pod or, of a pod of iterations, for each of
    its stages.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "image"):
        table.add_column(column, no_wrap=True)
    for column in ("accelerators", "pods"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("memory of a pod", no_wrap=True)
    loop = pods.plan.loop
    inner = loop.stages if loop and loop.pod else []
    for name, count in pods.counts.stages.items():
        number = str(count)
        if name in inner:
            number += f" times in {format_count(pods.counts.iteration_pods, 'pod')}"
        pod = pods.by_template.get(name)
        if pod:
            image = pod.image
            accelerators = str(pod.resources.accelerators or "cpu")
            memory = pod.resources.memory_request
            # Of a pod of iterations it is that of all its stages.
            memory += SHARED if name in inner else _qualify_memory(pods, pod)
        else:
            # A step that calls an API, or reads the output of a job.
            container = templates[name]["container"]
            image = container["image"]
            accelerators = "cpu"
            memory = container["resources"]["requests"]["memory"] + PRESET
        table.add_row(name, image, accelerators, number, memory)
    return table


def _explain_memory(pods: PlannedPods) -> str:
    """Explain the qualifications behind the memory of pods in the table; empty if there are
    none."""
    loop = pods.plan.loop
    used = {_qualify_memory(pods, pod) for pod in pods.by_template.values()}
    if loop and loop.pod:
        used.add(SHARED)
    notes = [f"{key.strip(' ()')}: {text}" for key, text in MEMORY_NOTES.items() if key in used]
    return f"memory of a pod: {'; '.join(notes)}" if notes else ""


def _qualify_memory(pods: PlannedPods, pod: PodPlan) -> str:
    """Return the qualification of a pod's memory: how much of its needs is known."""
    model = pods.model
    if not isinstance(model, Model):
        return PRESET
    if not estimate_memory_parts(pod, model, pods.context):
        return PRESET
    if is_memory_estimate_complete(pod, model, pods.context):
        return ""
    return IN_PART


def _describe_memory(pods: PlannedPods, model: Model) -> Iterator[str]:
    """Yield the arithmetic of each pod's memory."""
    for name, pod in pods.by_template.items():
        parts = estimate_memory_parts(pod, model, pods.context)
        if parts:
            total = compute_memory_request([pod], parts)
            programs = total - sum(part.size for part in parts)
            text = describe_parts(parts)
            if pod.resources.accelerators:
                # Most of the parts are in the device's memory.
                yield f"  {name}: {text}; of the host's memory {format_size(total)}"
                continue
            text = f"{format_size(total)} = {text}"
            if programs > 0:
                text += f" + {format_size(programs)} Python and its libraries"
            yield f"  {name}: {text}"


def describe_parts(parts: Iterable[Part]) -> str:
    """Describe the parts of a pod's memory as a sum, each with its factors."""
    texts = [f"{format_size(part.size)} {part.label} ({part.factors})" for part in parts]
    return " + ".join(texts)


def _describe_checkpoints(pods: PlannedPods) -> list[str]:
    """Describe what a checkpoint of each stage that trains takes in the store."""
    dtype = pods.facts.dtype if pods.facts else None
    lines: list[str] = []
    for stage in pods.list_role("trainer"):
        component = stage.component
        # A reward model is trained, too, and is an artifact of another kind.
        if component and component.kind == "checkpoint":
            checkpoint = describe_checkpoint(stage, pods.model, dtype)
            lines.append(f"  {stage.job_template}: {checkpoint}")
    return lines


def count_prompts(stage: StagePlan) -> float | None:
    """Count the prompts whose completions a pod of a sampler hands on; None where they are not
    known.

    With `carry_after` unfinished groups go into the next iteration, and only those of a batch are
    handed on. Without it all `oversampled_prompts` are handed on, and the update takes a batch of
    them.
    """
    prompts = stage.number("prompts_per_iteration")
    if stage.number("carry_after"):
        return prompts
    return stage.number("oversampled_prompts") or prompts


def estimate_work(
    stages: Iterable[StagePlan], times_by_template: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Estimate the steps, completions and tokens of stages, as far as their parameters say.

    Args:
        stages: of a plan.
        times_by_template: how often each runs at most.

    Yields:
        The template of each stage that samples, trains or evaluates, and its work in words.
    """
    for stage in stages:
        template = stage.job_template
        times = times_by_template[template]
        work = ""
        if stage.role == "sampler":
            work = describe_completions(stage, times)
        elif stage.role == "trainer":
            work = describe_steps(stage, times)
        elif stage.role == "evaluator" and "tasks" not in stage.parameters:
            # The tasks of lm-eval decide themselves how much is generated.
            limit = stage.number("limit")
            evaluations = format_count(times, "evaluation")
            work = f"{evaluations} × at most {limit:g} completions" if limit else ""
        if work:
            yield template, work


def describe_completions(stage: StagePlan, times: int) -> str:
    """Describe the completions of a sampler that runs `times` times; empty where they are not
    known.
    """
    prompts = count_prompts(stage)
    completions = stage.number("n")
    if not prompts or not completions:
        return ""
    total = times * prompts * completions
    batches = format_count(times, "iteration")
    factors = f"{batches} × {prompts:g} prompts × {completions:g} completions of each"
    text = f"{factors} = {total:,.0f} completions"
    longest = stage.number("max_tokens")
    if longest:
        # With `carry_after` the first iteration samples more prompts than a batch has; the later
        # ones as many as they hand on.
        oversampled = stage.number("oversampled_prompts") or prompts
        sampled = total + (oversampled - prompts) * completions
        text += f", at most {sampled * longest:,.0f} tokens"
    return text


def describe_steps(stage: StagePlan, times: int) -> str:
    """Describe the optimizer steps of a trainer that runs `times` times; empty where they are not
    known.
    """
    updates = stage.number("updates_per_batch")
    if updates:
        iterations = format_count(times, "iteration")
        return f"{iterations} × {updates:g} = {times * updates:,.0f} optimizer steps"
    max_steps = stage.number("max_steps")
    if not max_steps:
        return ""
    batch = stage.ranks * stage.nodes
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        batch *= int(stage.number(name) or 1)
    # Epochs come before steps where both are set; how many rows there are is not known yet.
    epochs = stage.number("epochs")
    if epochs:
        return f"{times * epochs:g} epochs, in steps of {format_count(batch, 'example')}"
    steps = times * max_steps
    text = f"{steps:,.0f} optimizer steps × {format_count(batch, 'example')}"
    length = stage.number("max_length")
    if length:
        text += f", at most {steps * batch * length:,.0f} tokens"
    return text


def _add_calls(
    tree: "Tree",
    templates: Mapping[str, JsonMapping],
    pods: PlannedPods,
    iterations: int,
    name: str,
    callers: Sequence[str],
) -> None:
    """Add a branch for each call of a template, with those of the templates that it calls.

    Args:
        tree: the branch of the template itself.
        templates: all of the workflow, by name.
        pods: has the stages of a pod of iterations.
        iterations: of the workflow's loop, at most.
        name: the template's.
        callers: the templates around it.
    """
    graphs = [*callers, name]
    for call in list_calls(templates[name]):
        target = call["template"]
        if target in graphs:
            tree.add(f"↺ {target} again, at most {iterations} times in all")
            continue
        note = ""
        if templates[target].get("daemon"):
            note = " (a server, until the graph around it ends)"
        elif "when" in call:
            note = " (while its condition holds)"
        branch = tree.add(f"{call['name']}{note}")
        loop = pods.plan.loop
        if loop and loop.pod and target == loop.pod.template:
            for stage in loop.pod_stages:
                branch.add(stage)
        _add_calls(branch, templates, pods, iterations, target, graphs)
