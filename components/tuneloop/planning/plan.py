"""What a rendered workflow will do: graph, pods, accelerators, steps, tokens, memory.

It is read from the workflow's graph and its plan (`tuneloop.workflow.plan`). Counts that the graph
decides while it runs are shown as bounds.

`tuneloop plan` prints it; it refuses nothing, which is `planning/limits.py`'s part.
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

NOT_ESTIMATED = " (not estimated)"


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
    tree = Tree(f"{name}: at most {pods.counts.total} pods")
    templates = index_templates(workflow)
    iterations = count_iterations(workflow)
    _add_calls(tree, templates, pods, iterations, workflow["spec"]["entrypoint"], [])
    # What is known without the shape of the model comes first.
    lines = ["work at most"]
    for stage, text in estimate_work(pods.stages, pods.counts.stages):
        lines.append(f"  {stage}: {text}")
    checkpoints = _describe_checkpoints(pods)
    if checkpoints:
        lines.append("a checkpoint")
        lines += checkpoints
    parameters: int | None = None
    if isinstance(model, Model):
        parameters = model.parameters
        lines.append(f"memory of {model.name}: {parameters:,} parameters ({model.derivation})")
        lines += _describe_memory(pods, model)
    else:
        lines.append(f"memory of {model}")
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
            number += f" times in {pods.counts.iteration_pods} pods"
        pod = pods.by_template.get(name)
        if pod:
            image = pod.image
            accelerators = str(pod.resources.accelerators or "cpu")
            memory = pod.resources.memory_request + _qualify_memory(pods, pod)
        else:
            # A step that calls an API, or reads the output of a job.
            container = templates[name]["container"]
            image = container["image"]
            accelerators = "cpu"
            memory = container["resources"]["requests"]["memory"] + NOT_ESTIMATED
        table.add_row(name, image, accelerators, number, memory)
    return table


def _qualify_memory(pods: PlannedPods, pod: PodPlan) -> str:
    """Return what to say behind a pod's memory: how much of its needs is known."""
    model = pods.model
    if not isinstance(model, Model):
        return NOT_ESTIMATED
    if not estimate_memory_parts(pod, model, pods.context):
        return NOT_ESTIMATED
    if is_memory_estimate_complete(pod, model, pods.context):
        return ""
    return " at least (a part is not estimated)"


def _describe_memory(pods: PlannedPods, model: Model) -> Iterator[str]:
    """Yield the arithmetic of each pod's memory."""
    for name, pod in pods.by_template.items():
        parts = estimate_memory_parts(pod, model, pods.context)
        if parts:
            total = format_size(compute_memory_request([pod], parts))
            yield f"  {name}: {describe_parts(parts)}; with its programs {total}"


def describe_parts(parts: Iterable[Part]) -> str:
    """Describe the parts of a pod's memory as a sum."""
    return " + ".join(f"{part.text} = {format_size(part.size)}" for part in parts)


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
    """Count the prompts whose completions a pod of a sampler hands on; of groups that are carried,
    those of a batch.
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
            work = f"{times} × at most {limit:g} completions" if limit else ""
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
    text = f"{times} × {prompts:g} prompts × {completions:g} = {total:,.0f} completions"
    longest = stage.number("max_tokens")
    if longest:
        # Groups that are carried have been sampled, and the last iteration leaves some.
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
        return f"{times} × {updates:g} = {times * updates:,.0f} optimizer steps"
    max_steps = stage.number("max_steps")
    if not max_steps:
        return ""
    batch = stage.ranks * stage.nodes
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        batch *= int(stage.number(name) or 1)
    # Epochs come before steps where both are set; how many rows there are is not known yet.
    epochs = stage.number("epochs")
    if epochs:
        return f"{times * epochs:g} epochs, in steps of {batch} examples"
    steps = times * max_steps
    text = f"{steps:,.0f} optimizer steps × {batch} examples"
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
