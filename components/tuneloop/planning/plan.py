"""What a rendered workflow will do: graph, pods, accelerators, steps, tokens, memory. Everything is read from the
workflow (`tuneloop.workflow.rendered_stages`, `tuneloop.argo.memory_estimate`). Counts are upper bounds where the graph
decides while it runs (``when``, loops that may stop early), and say so."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tuneloop.argo import colocation, memory_estimate
from tuneloop.argo.claims import TAKE
from tuneloop.config.model_facts import Model
from tuneloop.planning.checkpoint_size import describe_checkpoint
from tuneloop.runs.summary import format_size
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.pod_loop import PerPod, expand_pod
from tuneloop.workflow.rendered_stages import Stage, read_loop, read_stage

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree


REQUEUE = 10.0
"""Seconds between two pods that follow one another: Argo looks at a workflow again so long after a pod has ended (its
controller's ``DEFAULT_REQUEUE_TIME``, which an admin may lower; measured on Argo 3.7.6)."""


def render_plan(name: str, workflow: Mapping[str, Any]) -> "RenderableType":
    """Render a workflow's plan for a terminal. Raises UserError: no such model, or runs that do not fit their node."""
    colocation.check_colocation(workflow)
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    workflow, grain = expand_pod(workflow)
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    pods = count_pods(workflow)
    stages = [read_stage(templates[template]) for template in pods]
    shared = read_loop(workflow).keys() if grain else set()
    total, together = count_all_pods(workflow, grain, pods)
    tree = Tree(f"{name}: at most {total} pods")
    _grow(tree, workflow, templates, workflow["spec"]["entrypoint"], ())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("stage", "image", "accelerators", "pods", "memory of a pod"):
        table.add_column(
            column, no_wrap=True, justify="right" if column in ("accelerators", "pods") else "left"
        )
    model = memory_estimate.model_of(stages)
    context = memory_estimate.context_of(stages)
    facts = memory_estimate.facts_of(stages)
    sums = []
    for stage in stages:
        parts = (
            memory_estimate.estimate_memory_parts(stage, model, context)
            if isinstance(model, Model)
            else []
        )
        complete = (
            isinstance(model, Model)
            and parts
            and memory_estimate.is_memory_estimate_complete(stage, model, context)
        )
        known = "" if complete else " or more" if parts else " (not estimated)"
        count = (
            f"{pods[stage.name]} in {together}" if stage.name in shared else str(pods[stage.name])
        )
        table.add_row(
            stage.name,
            stage.image,
            str(stage.accelerators or "cpu"),
            count,
            f"{stage.memory}{known}",
        )
        if parts:
            sums.append(
                f"  {stage.name}: "
                + " + ".join(f"{text} = {format_size(count)}" for text, count in parts)
            )
            sums[-1] += (
                f"; with its programs {format_size(memory_estimate.compute_memory_request([stage], parts))}"
            )
    told = (
        f"{model.name}: {model.parameters:,} parameters ({model.how})"
        if isinstance(model, Model)
        else model
    )
    work = [f"  {stage}: {text}" for stage, text in estimate_work(stages, pods)]
    training = [
        s
        for s in stages
        if s.role == "trainer" and s.component and s.component.kind == "checkpoint"
    ]
    stored = facts.dtype if facts else None
    written = [f"  {stage.name}: {describe_checkpoint(stage, model, stored)}" for stage in training]
    lines = [
        "work at most",
        *work,
        *(["a checkpoint", *written] if written else []),
        f"memory of {told}",
        *sums,
    ]
    lines += colocation.describe_colocation(
        workflow, model.parameters if isinstance(model, Model) else None
    )
    return Group(tree, table, Text("\n".join(lines)))


def count_pods(workflow: Mapping[str, Any]) -> Counter[str]:
    """Count template → pods that it can become at most, without retries; in the order of the graph."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    counts: Counter[str] = Counter()

    def count(name: str, times: int, above: tuple[str, ...]) -> None:
        tasks = list_calls(templates[name])
        if not tasks:
            counts[name] += times
            return
        again = next((task for task in tasks if task.get("template") == name), {})
        rounds = _parameter(workflow, "iterations") if again else 1
        for task in tasks:
            if task["template"] not in (*above, name):
                ahead = (
                    "when" in again and task.get("when") == again["when"]
                )  # of the next round: the last has none
                count(task["template"], times * (rounds - ahead), (*above, name))

    count(workflow["spec"]["entrypoint"], 1, ())
    later = -(-_parameter(workflow, "iterations") // _parameter(workflow, "per-workflow")) - 1
    for (
        name
    ) in counts:  # each workflow of a long run has a server, and each but the last starts the next
        if "tuneloop.cluster.continue_run" in templates[name].get("container", {}).get(
            "command", ()
        ):
            counts[name] = later
        elif templates[name].get("daemon") or name == TAKE:
            counts[name] *= 1 + later
    handler = workflow["spec"].get("onExit")
    if handler:
        counts[handler] = 1 + later
    return +counts


def count_all_pods(
    workflow: Mapping[str, Any], grain: PerPod, pods: Mapping[str, int]
) -> tuple[int, int]:
    """Count the pods of an unfolded workflow at most, and those of them that run iterations."""
    together = (
        -(-_parameter(workflow, "iterations") // (1 if grain == "auto" else int(grain)))
        if grain
        else 0
    )
    shared = read_loop(workflow).keys() if grain else set()
    return sum(count for stage, count in pods.items() if stage not in shared) + together, together


def count_iterations(workflow: Mapping[str, Any]) -> int:
    """Count the iterations of a workflow's loop at most; 1 where it has none."""
    return _parameter(workflow, "iterations")


def count_prompts(stage: Stage) -> float | None:
    """Count the prompts whose completions a pod of a sampler hands on; of groups that are carried, those of a batch."""
    more = None if stage.number("carry_after") else stage.number("oversampled_prompts")
    return more or stage.number("prompts_per_iteration")


def estimate_work(stages: list[Stage], pods: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the steps, completions and tokens of each stage, as far as its flags say."""
    for stage in stages:
        times = pods[stage.name]
        value = stage.number
        prompts = count_prompts(stage)
        if stage.role == "sampler" and prompts and (n := value("n")):
            total = times * prompts * n
            left = (
                value("oversampled_prompts") or prompts
            ) - prompts  # with carry_after: by the last iteration
            begun = total + left * n
            tokens = (
                f", at most {begun * most:,.0f} tokens" if (most := value("max_tokens")) else ""
            )
            yield (
                stage.name,
                f"{times} × {prompts:g} prompts × {n:g} = {total:,.0f} completions{tokens}",
            )
        elif stage.role == "trainer" and (each := value("updates_per_batch")):
            yield stage.name, f"{times} × {each:g} = {times * each:,.0f} optimizer steps"
        elif stage.role == "trainer" and value("max_steps"):
            yield stage.name, describe_steps(stage, times)
        elif stage.role == "evaluator" and "tasks" not in stage.flags and (limit := value("limit")):
            yield stage.name, f"{times} × at most {limit:g} completions"


def describe_steps(stage: Stage, times: int) -> str:
    """Describe the optimizer steps of a stage that trains on fixed examples, `times` times."""
    batch = stage.ranks * stage.nodes
    for flag in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        batch *= int(stage.number(flag) or 1)
    epochs = stage.number("epochs")
    if epochs:
        return f"{times * epochs:g} epochs, in steps of {batch} examples"
    steps = times * (stage.number("max_steps") or 0)
    length = stage.number("max_length")
    tokens = f", at most {steps * batch * length:,.0f} tokens" if length else ""
    return f"{steps:,.0f} optimizer steps × {batch} examples{tokens}"


def _parameter(workflow: Mapping[str, Any], name: str) -> int:
    """Return a parameter of the workflow: ``iterations`` is how often a template that calls itself runs at most,
    ``per-workflow`` how often in one workflow; where there is none, once and all of them."""
    for parameter in workflow["spec"].get("arguments", {}).get("parameters", ()):
        if parameter["name"] == name and "value" in parameter:
            return int(parameter["value"])
    return 1 if name == "iterations" else 1 << 30


def _grow(
    tree: "Tree",
    workflow: Mapping[str, Any],
    templates: Mapping[str, Any],
    name: str,
    above: tuple[str, ...],
) -> None:
    for task in list_calls(templates[name]):
        target = task["template"]
        note = (
            " (while its condition holds)"
            if "when" in task and target not in above and target != name
            else ""
        )
        if target == name or target in above:
            tree.add(f"↺ {target} again, at most {_parameter(workflow, 'iterations')} times in all")
            continue
        template = templates[target]
        if template.get("daemon"):
            note = " (a server, until the graph around it ends)"
        branch = tree.add(f"{task['name']}{note}")
        _grow(branch, workflow, templates, target, (*above, name))
