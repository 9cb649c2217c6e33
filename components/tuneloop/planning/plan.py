"""What a rendered workflow will do: graph, pods, accelerators, steps, tokens, memory. It is read from the workflow's
graph and its plan (`tuneloop.workflow.plan`, `tuneloop.argo.memory_estimate`), and says where a count is a bound."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from tuneloop.argo import colocation, memory_estimate
from tuneloop.config.model_facts import Model
from tuneloop.core.json_types import JsonMapping
from tuneloop.planning.checkpoint_size import describe_checkpoint
from tuneloop.planning.counts import Counts, count_iterations, count_runs
from tuneloop.runs.summary import format_size
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.plan import PodPlan, RunPlan, StagePlan, read_plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.tree import Tree

COLUMNS = ("stage", "image", "accelerators", "pods", "memory of a pod")
NUMBERS = ("accelerators", "pods")
"""Columns of the table, and those that are aligned as numbers."""


def render_plan(name: str, workflow: JsonMapping) -> "RenderableType":
    """Render a workflow's plan for a terminal.

    Raises:
        UserError: there is no such model, runs do not fit their node, or the workflow carries no plan.
    """
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    colocation.check_colocation(workflow)
    plan = read_plan(workflow)
    counts = count_runs(workflow, plan)
    pods = list_pods(plan, counts)
    stages = [pod for pod in pods.values() if isinstance(pod, StagePlan)]
    model = memory_estimate.model_of(stages)
    context = memory_estimate.context_of(pods.values())
    tree = Tree(f"{name}: at most {counts.total} pods")
    _grow(tree, workflow, plan, workflow["spec"]["entrypoint"], ())
    table = _draw_table(workflow, plan, counts, model, context)
    lines = ["work at most"]
    lines += [f"  {stage}: {text}" for stage, text in estimate_work(stages, counts.stages)]
    checkpoints = _describe_checkpoints(stages, model)
    if checkpoints:
        lines += ["a checkpoint", *checkpoints]
    shape = model
    if isinstance(model, Model):
        shape = f"{model.name}: {model.parameters:,} parameters ({model.how})"
    lines.append(f"memory of {shape}")
    parameters: int | None = None
    if isinstance(model, Model):
        lines += _describe_memory(pods, model, context)
        parameters = model.parameters
    lines += colocation.describe_colocation(workflow, parameters)
    return Group(tree, table, Text("\n".join(lines)))


def list_pods(plan: RunPlan, counts: Counts) -> dict[str, PodPlan]:
    """Return template → stage or server, for those that run, in the order of the graph."""
    pods: dict[str, PodPlan] = {}
    for template in counts.stages:
        pod = find_process(plan, template)
        if pod:
            pods[template] = pod
    return pods


def list_running_pods(workflow: JsonMapping, plan: RunPlan) -> dict[str, PodPlan]:
    """Return template → stage or server, for those that a rendered workflow starts."""
    # A stage that no graph calls starts nothing.
    return list_pods(plan, count_runs(workflow, plan))


def find_process(plan: RunPlan, template: str) -> PodPlan | None:
    """Return the stage or server that runs under the name of a template; None for a step that only calls an API."""
    if plan.loop and plan.loop.pod and template in plan.loop.stages:
        return plan.stages[template]
    return plan.find_pod(template)


def _draw_table(
    workflow: JsonMapping, plan: RunPlan, counts: Counts, model: Model | str, context: int | None
) -> "Table":
    """Draw a row for each template that is a pod or, of a pod of iterations, for each of its stages."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        justify = "right" if column in NUMBERS else "left"
        table.add_column(column, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    inner = plan.loop.stages if plan.loop and plan.loop.pod else []
    for name, count in counts.stages.items():
        number = str(count)
        if name in inner:
            number = f"{count} times in {counts.iteration_pods} pods"
        pod = find_process(plan, name)
        if pod:
            accelerators = str(pod.resources.accelerators or "cpu")
            memory = f"{pod.resources.memory_request}{_qualify_memory(pod, model, context)}"
            table.add_row(name, pod.image, accelerators, number, memory)
        else:
            # A step that calls an API, or reads the output of a job.
            container = templates[name]["container"]
            memory = f"{container['resources']['requests']['memory']} (not estimated)"
            table.add_row(name, container["image"], "cpu", number, memory)
    return table


def _qualify_memory(pod: PodPlan, model: Model | str, context: int | None) -> str:
    """Return what to say behind a pod's memory: how much of its needs is known."""
    if not isinstance(model, Model):
        return " (not estimated)"
    if not memory_estimate.estimate_memory_parts(pod, model, context):
        return " (not estimated)"
    is_complete = memory_estimate.is_memory_estimate_complete(pod, model, context)
    return "" if is_complete else " at least (a part is not estimated)"


def _describe_memory(
    pods: Mapping[str, PodPlan], model: Model, context: int | None
) -> Iterator[str]:
    """Yield the arithmetic of each pod's memory."""
    for name, pod in pods.items():
        parts = memory_estimate.estimate_memory_parts(pod, model, context)
        if not parts:
            continue
        terms = " + ".join(f"{text} = {format_size(size)}" for text, size in parts)
        total = memory_estimate.compute_memory_request([pod], parts)
        yield f"  {name}: {terms}; with its programs {format_size(total)}"


def _describe_checkpoints(stages: Iterable[StagePlan], model: Model | str) -> list[str]:
    """Describe what a checkpoint of each stage that trains takes in the store."""
    facts = memory_estimate.facts_of(stages)
    dtype = facts.dtype if facts else None
    lines: list[str] = []
    for stage in stages:
        component = stage.component
        if stage.role == "trainer" and component and component.kind == "checkpoint":
            lines.append(f"  {stage.job_template}: {describe_checkpoint(stage, model, dtype)}")
    return lines


def count_prompts(stage: StagePlan) -> float | None:
    """Count the prompts whose completions a pod of a sampler hands on; of groups that are carried, those of a batch."""
    prompts = stage.number("prompts_per_iteration")
    if stage.number("carry_after"):
        return prompts
    return stage.number("oversampled_prompts") or prompts


def estimate_work(
    stages: Iterable[StagePlan], times_by_template: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield each stage that samples, trains or evaluates, and its steps, completions and tokens, as far as its
    parameters say."""
    for stage in stages:
        template = stage.job_template
        times = times_by_template[template]
        updates = stage.number("updates_per_batch")
        limit = stage.number("limit")
        if stage.role == "sampler":
            completions = describe_completions(stage, times)
            if completions:
                yield template, completions
        elif stage.role == "trainer" and updates:
            yield template, f"{times} × {updates:g} = {times * updates:,.0f} optimizer steps"
        elif stage.role == "trainer" and stage.number("max_steps"):
            yield template, describe_steps(stage, times)
        elif stage.role == "evaluator" and "tasks" not in stage.parameters and limit:
            yield template, f"{times} × at most {limit:g} completions"


def describe_completions(stage: StagePlan, times: int) -> str:
    """Describe the completions of a sampler that runs `times` times; empty where they are not known."""
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
    """Describe the optimizer steps of a stage that trains on fixed examples, `times` times."""
    batch = stage.ranks * stage.nodes
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        batch *= int(stage.number(name) or 1)
    epochs = stage.number("epochs")
    if epochs:
        return f"{times * epochs:g} epochs, in steps of {batch} examples"
    steps = times * (stage.number("max_steps") or 0)
    length = stage.number("max_length")
    tokens = f", at most {steps * batch * length:,.0f} tokens" if length else ""
    return f"{steps:,.0f} optimizer steps × {batch} examples{tokens}"


def _grow(
    tree: "Tree", workflow: JsonMapping, plan: RunPlan, name: str, above: tuple[str, ...]
) -> None:
    """Add a branch for each call of a template, with those of the templates that it calls."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    for task in list_calls(templates[name]):
        target = task["template"]
        if target == name or target in above:
            times = count_iterations(workflow)
            tree.add(f"↺ {target} again, at most {times} times in all")
            continue
        note = ""
        if templates[target].get("daemon"):
            note = " (a server, until the graph around it ends)"
        elif "when" in task:
            note = " (while its condition holds)"
        branch = tree.add(f"{task['name']}{note}")
        loop = plan.loop
        if loop and loop.pod and target == loop.pod.template:
            for stage in loop.pod_stages:
                branch.add(stage)
        _grow(branch, workflow, plan, target, (*above, name))
