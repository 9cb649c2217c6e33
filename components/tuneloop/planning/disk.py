"""What a run writes to its store, and how much of it stays there at a time.

Checkpoints count (`tuneloop.planning.checkpoint_size`). Rollouts, rewards and the manifests are
small beside them and are left out, and so are published weight versions.

`plan` prints the footprint, and `run` and `fork` ask `check_store` before they start a new run
(`cli/execute.py`); a resume and runs on clusters do not. The tests are in
`tests/unit/planning/test_limits.py`.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from tuneloop.config.model_facts import Model
from tuneloop.core.disk_faults import find_existing_parent
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import local_path
from tuneloop.core.wording import format_count
from tuneloop.planning.checkpoint_size import estimate_checkpoint
from tuneloop.planning.counts import count_iterations
from tuneloop.planning.limits import Limit
from tuneloop.planning.pods import list_planned_pods
from tuneloop.runs.summary import format_size
from tuneloop.stages.base_model import base_model
from tuneloop.stages.export import export
from tuneloop.stages.reward_model import reward_model
from tuneloop.workflow.plan import StagePlan, find_plan

ADAPTER_SHARE = 0.1
"""Bytes of exported adapters, divided by the model's: more than usual ranks take."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run stores: once, by each iteration of its loop, and at most at a time.

    Attributes:
        once: of the stages outside the loop.
        iteration: that one iteration writes.
        iterations: how many there are at most.
        retained: of the loop's checkpoints, at most at a time.
        rule: which of these checkpoints stay, in words; empty without a loop.
    """

    once: float
    iteration: float = 0.0
    iterations: int = 0
    retained: float = 0.0
    rule: str = ""

    @property
    def total(self) -> float:
        """Bytes in the store at most."""
        return self.once + self.retained


def estimate_footprint(workflow: JsonMapping) -> Footprint | None:
    """Estimate what a run stores.

    Returns:
        None where the model's size, or that of its adapters, is not known, or the workflow carries
        no plan.
    """
    plan = find_plan(workflow)
    if plan is None:
        return None
    pods = list_planned_pods(workflow, plan)
    model = pods.model
    if pods.facts is None or not isinstance(model, Model):
        return None
    base_dtype = pods.facts.dtype
    once = 0.0
    update: StagePlan | None = None
    for stage in pods.stages:
        if plan.loop and stage.template == plan.loop.trainer:
            update = stage
            continue
        size = estimate_stage_bytes(stage, model, base_dtype)
        if size is None:
            return None
        once += size
    if update is None:
        return Footprint(once)
    checkpoint = estimate_checkpoint(update, model, base_dtype)
    if checkpoint.state is None:
        return None
    return _add_loop(
        once=once,
        model_bytes=checkpoint.model,
        state_bytes=checkpoint.state,
        update=update,
        iterations=count_iterations(workflow),
    )


def _add_loop(
    once: float,
    model_bytes: float,
    state_bytes: float,
    update: StagePlan,
    iterations: int,
) -> Footprint:
    """Return the footprint of a run with a loop.

    Args:
        once: bytes of the stages outside the loop.
        model_bytes: of the model that an iteration writes.
        state_bytes: of the trainer's state that comes with every `state_every`-th model.
        update: the loop's trainer, whose parameters say what stays.
        iterations: how many there are at most.

    What is counted as kept follows `training/old_checkpoints.py: delete_old_checkpoints`: change
    both.
    """
    every = int(update.number("state_every") or 1)
    limit = update.number("save_total_limit")
    iteration = model_bytes + state_bytes / every
    if limit is None or limit >= iterations:
        return Footprint(
            once=once,
            iteration=iteration,
            iterations=iterations,
            retained=iterations * iteration,
            rule="all; set update.save_total_limit to keep only the newest",
        )
    # The next checkpoint is written before an old one is deleted. The models since the last state
    # stay, too: a new process replays their updates.
    newest = min(iterations, int(limit) + every)
    retained = newest * model_bytes
    retained += math.ceil(newest / every) * state_bytes
    rule = f"the newest {format_count(int(limit), 'checkpoint')}"
    keep_every = int(update.number("keep_every") or 0)
    if keep_every:
        multiples = f"{keep_every}, {2 * keep_every}, {3 * keep_every}, …"
        rule += f", and the model alone of iterations {multiples}"
        # Of these the models stay, and their states go.
        retained += iterations // keep_every * model_bytes
    return Footprint(
        once=once,
        iteration=iteration,
        iterations=iterations,
        retained=retained,
        rule=rule,
    )


def estimate_stage_bytes(stage: StagePlan, model: Model, base_dtype: str | None) -> float | None:
    """Estimate the bytes that a stage outside the loop stores; None where they are not known. A
    stage with an artifact of another kind than those below counts as 0."""
    component = stage.component
    size = estimate_checkpoint(stage, model, base_dtype)
    if component is base_model:
        return size.model
    if component is export:
        # The whole model is exported, and beside it its adapters and its copy for llama.cpp.
        share = ADAPTER_SHARE if stage.parameters.get("adapter") is True else 0.0
        copies = 2 if stage.parameters.get("gguf") is True else 1
        return size.model * (copies + share)
    if component is reward_model:
        return size.model
    if component is not None and component.kind == "checkpoint":
        return None if size.state is None else size.model + size.state
    return 0.0


def describe_footprint(footprint: Footprint) -> Iterator[str]:
    """Yield the lines of a plan that say what a run stores."""
    iterations = footprint.iterations
    yield f"disk space in the store: {format_size(footprint.total)} at most"
    yield f"  models and checkpoints outside the loop: {format_size(footprint.once)}"
    if iterations:
        written = format_size(footprint.iteration)
        total = format_size(footprint.iteration * iterations)
        retained = format_size(footprint.retained)
        yield f"  {format_count(iterations, 'iteration')} write {written} each, {total} in all"
        yield f"  of these, {retained} at most are kept: {footprint.rule}"


def check_store(workflow: JsonMapping, store: str) -> Iterator[Limit]:
    """Find a local store without the room that a run needs at most at a time."""
    directory = local_path(store)
    footprint = estimate_footprint(workflow)
    # A bucket has no size that it could be asked for.
    if directory is None or footprint is None:
        return
    free = shutil.disk_usage(find_existing_parent(directory)).free
    if footprint.total <= free:
        return
    total = format_size(footprint.total)
    remedy = f"has {format_size(free)} free, and the run takes up to {total}: "
    remedy += f"{format_size(footprint.once)} outside the loop"
    if footprint.iterations:
        retained = format_size(footprint.retained)
        remedy += f", {retained} of its checkpoints ({footprint.rule})"
    remedy += "; make room, or take another store"
    yield Limit(UserError("--store", store, remedy), is_estimate=True)
