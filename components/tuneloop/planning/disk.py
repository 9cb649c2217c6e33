"""What a run writes to its store, and how much of it stays there at a time.

Checkpoints count (`tuneloop.planning.checkpoint_size`). Rollouts, rewards and the manifests are
small beside them and are left out, and so are published weight versions."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuneloop.argo.memory_estimate import facts_of
from tuneloop.config.model_facts import Model, ModelFacts
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import local_path
from tuneloop.planning.checkpoint_size import count_served_bytes, count_state_bytes
from tuneloop.planning.counts import count_iterations
from tuneloop.planning.limits import Limit
from tuneloop.planning.plan import list_running_pods
from tuneloop.runs.summary import format_size
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.workflow.plan import StagePlan, find_plan


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run stores: once, by each iteration of its loop, and at most at a time.

    Attributes:
        once: of the stages outside the loop.
        iteration: that one iteration writes.
        iterations: how many there are at most.
        kept: of the loop's checkpoints, at most at a time.
        rule: which of these checkpoints stay, in words.
    """

    once: float
    iteration: float
    iterations: int
    kept: float
    rule: str

    @property
    def total(self) -> float:
        """Bytes in the store at most."""
        return self.once + self.kept


def estimate_footprint(workflow: JsonMapping) -> Footprint | None:
    """Estimate what a run stores; None where the model's size, or that of its adapters, is not
    known, or the workflow carries no plan."""
    plan = find_plan(workflow)
    if plan is None:
        return None
    pods = list_running_pods(workflow, plan).values()
    stages = [pod for pod in pods if isinstance(pod, StagePlan)]
    facts = facts_of(stages)
    if facts is None or not isinstance(facts.shape, Model):
        return None
    once = 0.0
    update: StagePlan | None = None
    for stage in stages:
        if plan.loop and stage.template == plan.loop.trainer:
            update = stage
            continue
        size = estimate_stage_bytes(stage, facts, facts.shape)
        if size is None:
            return None
        once += size
    if update is None:
        return Footprint(once=once, iteration=0, iterations=0, kept=0, rule="")
    served = count_served_bytes(update, facts.shape, facts.dtype)
    state = count_state_bytes(update, facts.shape)
    if state is None:
        return None
    return add_loop(once, served, state, update, count_iterations(workflow))


def add_loop(
    once: float, served: float, state: float, update: StagePlan, iterations: int
) -> Footprint:
    """Return the footprint of a run whose loop writes models of `served` bytes, and trainer's
    states of `state`."""
    every = int(update.number("state_every") or 1)
    limit = update.number("save_total_limit")
    rare = update.number("keep_every")
    iteration = served + state / every
    if limit is None or limit >= iterations:
        rule = "all of them stay: set update.save_total_limit to keep the newest"
        return Footprint(once, iteration, iterations, iterations * iteration, rule)
    # Before an old checkpoint is deleted the next one is written, and between two states no model can go.
    newest = min(iterations, int(limit) + every)
    states = -(-newest // every)
    models = iterations // int(rare) if rare else 0
    rule = f"the newest {int(limit)} stay"
    rule += f", and the model of each {int(rare)}th iteration" if rare else ""
    kept = newest * served + states * state + models * served
    return Footprint(once, iteration, iterations, kept, rule)


def estimate_stage_bytes(stage: StagePlan, facts: ModelFacts, model: Model) -> float | None:
    """Return the bytes that a stage outside the loop stores; None where they are not known."""
    component = stage.component
    if component is base_model:
        return count_served_bytes(stage, model, facts.dtype)
    if component is export:
        adapter = 1.1 if stage.parameters.get("adapter") is True else 1
        return count_served_bytes(stage, model, facts.dtype) * adapter
    if component is not None and component.kind == "checkpoint":
        state = count_state_bytes(stage, model)
        return None if state is None else count_served_bytes(stage, model, facts.dtype) + state
    return 0.0


def describe_footprint(footprint: Footprint) -> Iterator[str]:
    """Yield the lines of a plan that say what a run stores."""
    yield f"store: at most {format_size(footprint.total)} at a time"
    yield f"  stages outside the loop: {format_size(footprint.once)}"
    if footprint.iterations:
        written = format_size(footprint.iteration)
        total = format_size(footprint.iteration * footprint.iterations)
        yield f"  {footprint.iterations} iterations write {written} each, {total} in all"
        yield f"  of these checkpoints {footprint.rule}: {format_size(footprint.kept)}"


def check_store(workflow: JsonMapping, store: str) -> Iterator[Limit]:
    """Find a local store without the room that a run needs at most at a time."""
    directory = local_path(store)
    footprint = estimate_footprint(workflow)
    if directory is None or footprint is None:
        return
    free = shutil.disk_usage(find_standing(directory)).free
    if footprint.total > free:
        remedy = (
            f"has {format_size(free)} free, and the run takes up to {format_size(footprint.total)}: "
            f"{format_size(footprint.once)} outside the loop"
        )
        if footprint.iterations:
            remedy += f", {format_size(footprint.kept)} of its checkpoints ({footprint.rule})"
        yield Limit(
            UserError("--store", store, f"{remedy}; make room, or take another store"), True
        )


def find_standing(directory: Path) -> Path:
    """Return the nearest directory above `directory`, or itself, that exists."""
    return next(path for path in (directory, *directory.parents) if path.exists())
