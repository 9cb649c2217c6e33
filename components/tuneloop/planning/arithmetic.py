"""How long stages take on a device whose data sheet is known: arithmetic, where no run was measured.

Training takes 6 operations a parameter and token, 2 of them forward; 2 more with gradient
checkpointing, which computes forward twice, and 2 fewer for parameters that LoRA freezes. A
generated token takes a pass over the weights and the KV cache of all sequences that are generated
at once, as fast as memory gives them or the device computes, and a prompt's 2 operations a
parameter. Attention's own operations are left out.

`tuneloop plan --device` prints it, and `planning/cost.py` adds it up. Devices are in
`training/devices.py`. It reads parameters of stages by their names (``max_steps``,
``updates_per_batch``, ``n``, ``limit``, …), as `planning/plan.py: estimate_work` does: a new
parameter by which a stage does more or less work has to be read in both. docs/commands.md ("Hours
and cost") states the shares and formulas for users; no test compares it with this file, whose own
are in `tests/unit/planning/test_arithmetic.py`.
"""

import math
from dataclasses import dataclass

from tuneloop.argo.memory_estimate import SEQUENCES, count_batch_sequences
from tuneloop.config.model_facts import Model
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.planning.plan import count_prompts
from tuneloop.planning.pods import PlannedPods, list_planned_pods
from tuneloop.runs.summary import format_size
from tuneloop.training.devices import DEVICES, Device
from tuneloop.workflow.plan import StagePlan, read_plan

COMPUTING = 0.4
READING = 0.6
"""Shares (of 1) of a device's operations a second, and of its memory's bytes a second, that are
assumed to be reached. `describe_assumptions` prints them.
"""


@dataclass(frozen=True)
class Estimate:
    """The seconds of a stage in one pod, and the arithmetic in words."""

    seconds: float
    terms: str


class NotEstimated(Exception):
    """A stage's seconds cannot be computed; the text says what is not known."""


@dataclass(frozen=True)
class Accelerators:
    """The accelerators that a stage computes on.

    Attributes:
        count: how many there are; 0: it has none.
        options: of the engine, by vLLM's names; other engines have some of them.
    """

    count: int
    options: JsonMapping

    def read_option(self, name: str, default: int) -> int:
        """Return an option that is a number; vLLM takes null as its default."""
        return int(self.options.get(name) or default)


@dataclass(frozen=True)
class Estimator:
    """Estimates stages of a workflow on a device.

    Attributes:
        pods: what the workflow starts.
        model: the base model, which is dense.
        device: by its data sheet.
    """

    pods: PlannedPods
    model: Model
    device: Device

    @property
    def flops(self) -> float:
        """Operations a second that a device reaches."""
        return self.device.flops * COMPUTING

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device reads from its memory."""
        return self.device.bandwidth * READING

    def estimate_training(self, stage: StagePlan) -> Estimate:
        """Estimate a stage that trains, once. Raises NotEstimated where what the arithmetic needs
        is not known."""
        count = stage.resources.accelerators * stage.nodes
        reasons: list[str] = []
        if not count:
            reasons.append("it has no accelerator (cluster.trainer.gpus)")
        dtype = stage.parameters.get("dtype", "not given")
        if dtype != "bfloat16":
            reasons.append(f"dtype is {dtype}, and peaks are known of bfloat16")
        if reasons:
            raise NotEstimated(", and ".join(reasons))
        sequences, length = self._count_trained(stage)
        # A weight costs two operations forward, two for the gradient of its input, two for its own.
        operations = 6
        if stage.parameters.get("gradient_checkpointing") is True:
            operations += 2
        if "lora" in stage.parameters:
            operations -= 2
        parameters = self.model.parameters
        tokens = sequences * length
        work = f"{operations} × {parameters:,} × {sequences:,.0f} × {length:g} tokens"
        return Estimate(
            seconds=operations * parameters * tokens / (count * self.flops),
            terms=f"{work}, on {count}",
        )

    def _count_trained(self, stage: StagePlan) -> tuple[float, float]:
        """Count the sequences that a stage trains on, and the tokens of each at most. Raises
        NotEstimated.
        """
        length = stage.number("max_length")
        setting = "max_length"
        sequences = 0.0
        if stage.number("updates_per_batch"):
            # A batch of rollouts is trained on once. Only a loop's trainer has this parameter.
            for sampler in self.pods.list_role("sampler"):
                prompts = sampler.number("prompts_per_iteration")
                sequences += _count_completions(sampler, prompts)
            length = self.pods.context
            setting = "engine.args.max_model_len"
        elif stage.number("epochs"):
            raise NotEstimated("its epochs are of rows that are not read yet: set max_steps")
        else:
            sequences = (count_batch_sequences(stage) or 1) * (stage.number("max_steps") or 1)
            sequences *= stage.number("gradient_accumulation_steps") or 1
            sequences *= stage.ranks * stage.nodes
        if not (sequences and length):
            raise NotEstimated(f"nothing limits its tokens ({setting})")
        return sequences, length

    def estimate_generation(self, stage: StagePlan) -> Estimate:
        """Estimate a stage that generates, itself or by the servers, once. Raises NotEstimated
        where what the arithmetic needs is not known."""
        if "tasks" in stage.parameters:
            raise NotEstimated("its tasks decide how much it generates")
        accelerators = self._find_accelerators(stage)
        if not accelerators.count:
            remedy = "it has no accelerator, and no server here has (cluster.sampler.gpus)"
            raise NotEstimated(remedy)
        sequences = _count_completions(stage, count_prompts(stage))
        length = stage.number("max_tokens")
        context = self.pods.context
        if not (sequences and length and context):
            raise NotEstimated("nothing limits its tokens (engine.args.max_model_len)")
        if length >= context:
            remedy = "max_tokens leaves no room for a prompt in engine.args.max_model_len"
            raise NotEstimated(remedy)
        tokens = self._estimate_tokens(accelerators, sequences, length, context)
        prompts = self._estimate_prompts(accelerators, sequences, context - length)
        return Estimate(
            seconds=tokens.seconds + prompts.seconds,
            terms=f"{tokens.terms}, and {prompts.terms}, on {accelerators.count}",
        )

    def _estimate_tokens(
        self,
        accelerators: Accelerators,
        sequences: float,
        length: float,
        context: int,
    ) -> Estimate:
        """Estimate the tokens of completions, which are generated one after another.

        Args:
            accelerators: of the engines.
            sequences: completions of all engines together.
            length: tokens of each.
            context: tokens of each with its prompt.
        """
        weights = self.model.parameters
        cache_bytes = self.model.kv_bytes
        tensor = accelerators.read_option("tensor_parallel_size", 1)
        pipeline = accelerators.read_option("pipeline_parallel_size", 1)
        # Engines share the sequences, and generate theirs in rounds.
        engines = max(1, accelerators.count // (tensor * pipeline))
        share = math.ceil(sequences / engines)
        at_once = min(share, accelerators.read_option("max_num_seqs", SEQUENCES))
        steps = math.ceil(share / at_once) * length
        # On average half of a completion is in the cache.
        mean = context - length / 2
        read_bytes = 2 * weights + at_once * mean * cache_bytes
        reading_s = read_bytes / self.bandwidth
        computing_s = 2 * weights * at_once / self.flops
        # The ranks of a pipeline work one after another on a token.
        step_s = max(reading_s, computing_s) / tensor
        sizes = f"2 × {weights:,} + {at_once} × {mean:g} × {cache_bytes:,}"
        passes = f"{steps:,.0f} steps of {at_once} at once"
        return Estimate(
            seconds=steps * step_s,
            terms=f"{passes}, each {format_size(read_bytes)} ({sizes})",
        )

    def _estimate_prompts(
        self, accelerators: Accelerators, sequences: float, length: float
    ) -> Estimate:
        """Estimate prompts of so many tokens, which are computed at once."""
        operations = 2 * self.model.parameters * sequences * length
        return Estimate(
            seconds=operations / (accelerators.count * self.flops),
            terms=f"{sequences:,.0f} × {length:g} tokens of prompts",
        )

    def _find_accelerators(self, stage: StagePlan) -> Accelerators:
        """Find the accelerators that generate for a stage: its own, or else those of the
        servers.
        """
        count = stage.resources.accelerators * stage.nodes
        options = stage.engine_args
        servers = self.pods.servers
        if not count and servers:
            options = servers[0].engine_args
            count = sum(server.resources.accelerators * server.replicas for server in servers)
        return Accelerators(count, options)


def estimate_seconds(workflow: JsonMapping, name: str) -> tuple[dict[str, float], list[str]]:
    """Estimate the seconds of a pod of each stage that trains or generates.

    Args:
        workflow: as it is rendered.
        name: the device's.

    Returns:
        Stage → seconds, and the lines that state the arithmetic.

    Raises:
        UserError: the device or the shape of the model is not known, or nothing can be estimated of
            any stage.
    """
    if name not in DEVICES:
        raise UserError("--device", name, f"is not known; known: {', '.join(DEVICES)}")
    pods = list_planned_pods(workflow, read_plan(workflow))
    estimator = Estimator(
        pods=pods,
        model=require_dense_model(pods, name),
        device=DEVICES[name],
    )
    seconds: dict[str, float] = {}
    lines: list[str] = []
    for stage in pods.stages:
        estimate_stage = estimator.estimate_generation
        if stage.role == "trainer":
            estimate_stage = estimator.estimate_training
        elif stage.role not in ("sampler", "evaluator"):
            continue
        line = f"  {stage.job_template}: "
        try:
            estimate = estimate_stage(stage)
        except NotEstimated as reason:
            lines.append(f"{line}not estimated: {reason}")
            continue
        seconds[stage.template] = estimate.seconds
        lines.append(f"{line}{estimate.terms} = {estimate.seconds:.3g} s")
    if not seconds:
        # Hours of nothing would look like a run that is done at once.
        reasons = "; ".join(line.strip() for line in lines)
        raise UserError("--device", name, reasons or "no stage here trains or generates")
    lines.append(f"  {describe_assumptions(name)}")
    return seconds, lines


def require_dense_model(pods: PlannedPods, device: str) -> Model:
    """Return the base model. Raises UserError where its shape is not known, or it is not dense."""
    model = pods.model
    if not isinstance(model, Model):
        raise UserError("--device", device, f"needs the shape of the model: {model}")
    # The parameters that a token passes are not known of a model with experts.
    if not model.linears:
        remedy = f"needs a dense model: {model.name} has experts, or another kind of layers"
        raise UserError("--device", device, remedy)
    return model


def describe_assumptions(name: str) -> str:
    """Say what is assumed of a device."""
    flops = DEVICES[name].flops / 1e12
    bandwidth = DEVICES[name].bandwidth / 1e12
    operations = f"{COMPUTING:.0%} of {name}'s {flops:g} TFLOP/s (dense bfloat16)"
    reads = f"{READING:.0%} of its {bandwidth:g} TB/s"
    return f"assumed: {operations}, {reads}; without starting, loading and storing"


def _count_completions(stage: StagePlan, prompts: float | None) -> float:
    """Count the completions of a pod to so many prompts; None: to the rows of an evaluator
    (``limit``)."""
    return (prompts or stage.number("limit") or 0) * (stage.number("n") or 1)
