"""How long stages take on a device whose data sheet is known: arithmetic, where no run was measured.

Training takes 6 operations a parameter and token, 2 of them forward; 2 more with gradient
checkpointing, which computes forward twice, and 2 fewer for parameters that LoRA freezes. A
generated token takes a pass over the weights and the KV cache of all sequences that are generated
at once, as fast as memory gives them or the device computes, and a prompt's 2 operations a
parameter. Attention's own operations are left out."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tuneloop.argo.memory_estimate import (
    SEQUENCES,
    context_of,
    count_batch_sequences,
    model_of,
)
from tuneloop.config.model_facts import Model
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.planning.plan import count_prompts, list_running_pods
from tuneloop.runs.summary import format_size
from tuneloop.training.devices import DEVICES, Device
from tuneloop.workflow.plan import PodPlan, ServerPlan, StagePlan, read_plan

COMPUTING = 0.4
READING = 0.6
"""Shares of a device's operations and of its memory's bytes a second that are assumed to be reached."""


@dataclass(frozen=True)
class Estimate:
    """The seconds of a pod, and the arithmetic."""

    seconds: float
    terms: str


class NotEstimated(Exception):
    """A stage's seconds cannot be computed; the text says what is not known."""


@dataclass(frozen=True)
class Subject:
    """What the arithmetic is about.

    Attributes:
        pods: the stages and servers that run, by template.
        context: the most tokens of a prompt and its completion; None: not limited.
    """

    pods: dict[str, PodPlan]
    model: Model
    context: int | None
    device: Device

    @property
    def stages(self) -> list[StagePlan]:
        return [pod for pod in self.pods.values() if isinstance(pod, StagePlan)]

    @property
    def servers(self) -> list[ServerPlan]:
        return [pod for pod in self.pods.values() if isinstance(pod, ServerPlan)]

    @property
    def flops(self) -> float:
        """Operations a second that a device reaches."""
        return self.device.flops * COMPUTING

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device reads from its memory."""
        return self.device.bandwidth * READING


def estimate_seconds(workflow: JsonMapping, name: str) -> tuple[dict[str, float], list[str]]:
    """Estimate the seconds of a pod of each stage that trains or generates.

    Args:
        workflow: as it is rendered.
        name: the device's.

    Returns:
        Stage → seconds, and the lines that state the arithmetic.

    Raises:
        UserError: the device or the shape of the model is not known, or nothing can be estimated of any stage.
    """
    if name not in DEVICES:
        raise UserError("--device", name, f"is not known; known: {', '.join(DEVICES)}")
    plan = read_plan(workflow)
    pods = list_running_pods(workflow, plan)
    context = context_of(pods.values())
    subject = Subject(pods, require_dense_model(pods.values(), name), context, DEVICES[name])
    seconds: dict[str, float] = {}
    lines: list[str] = []
    for stage in subject.stages:
        if stage.role not in ("trainer", "sampler", "evaluator"):
            continue
        template = stage.job_template
        try:
            is_trainer = stage.role == "trainer"
            estimate = _train(subject, stage) if is_trainer else _generate(subject, stage)
        except NotEstimated as reason:
            lines.append(f"  {template}: not estimated: {reason}")
            continue
        seconds[stage.template] = estimate.seconds
        lines.append(f"  {template}: {estimate.terms} = {estimate.seconds:.3g} s")
    if not seconds:
        reasons = "; ".join(map(str.strip, lines))
        raise UserError("--device", name, reasons or "no stage here trains or generates")
    lines.append(f"  {describe_assumptions(name)}")
    return seconds, lines


def require_dense_model(pods: Iterable[PodPlan], device: str) -> Model:
    """Return the base model. Raises UserError where its shape is not known, or it is not dense."""
    model = model_of(pods)
    if not isinstance(model, Model):
        raise UserError("--device", device, f"needs the shape of the model: {model}")
    if not model.linears:
        remedy = f"needs a dense model: {model.name} has experts, or another kind of layers"
        raise UserError("--device", device, remedy)
    return model


def describe_assumptions(name: str) -> str:
    """Say what is assumed of a device."""
    device = DEVICES[name]
    operations = f"{COMPUTING:.0%} of {name}'s {device.flops / 1e12:g} TFLOP/s (dense bfloat16)"
    reads = f"{READING:.0%} of its {device.bandwidth / 1e12:g} TB/s"
    return f"assumed: {operations}, {reads}; without starting, loading and storing"


def _train(subject: Subject, stage: StagePlan) -> Estimate:
    """Estimate a stage that trains. Raises NotEstimated."""
    count = stage.resources.accelerators * stage.nodes
    reasons: list[str] = []
    if not count:
        reasons.append("it has no accelerator (cluster.trainer.gpus)")
    dtype = stage.parameters.get("dtype", "not given")
    if dtype != "bfloat16":
        reasons.append(f"dtype is {dtype}, and peaks are known of bfloat16")
    if reasons:
        raise NotEstimated(", and ".join(reasons))
    sequences, length = _count_trained(subject, stage)
    is_checkpointed = stage.parameters.get("gradient_checkpointing") is True
    has_adapters = "lora" in stage.parameters
    operations = 6 + 2 * is_checkpointed - 2 * has_adapters
    parameters = subject.model.parameters
    total = operations * parameters * sequences * length
    terms = f"{operations} × {parameters:,} × {sequences:,.0f} × {length:g} tokens, on {count}"
    return Estimate(total / (count * subject.flops), terms)


def _count_trained(subject: Subject, stage: StagePlan) -> tuple[float, float]:
    """Count the sequences that a stage trains on, and the tokens of each at most. Raises NotEstimated."""
    length = stage.number("max_length")
    setting = "max_length"
    if stage.number("updates_per_batch"):
        # A batch of rollouts is trained on once.
        samplers = [sampler for sampler in subject.stages if sampler.role == "sampler"]
        sequences = sum(_count_completions(sampler, is_trained=True) for sampler in samplers)
        length = subject.context
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


def _generate(subject: Subject, stage: StagePlan) -> Estimate:
    """Estimate a stage that generates, itself or by the servers. Raises NotEstimated."""
    if "tasks" in stage.parameters:
        raise NotEstimated("its tasks decide how much it generates")
    count = stage.resources.accelerators * stage.nodes
    options = stage.engine_args
    if not count:
        servers = subject.servers
        count = sum(server.resources.accelerators * server.replicas for server in servers)
        options = servers[0].engine_args if servers else {}
    if not count:
        raise NotEstimated("it has no accelerator, and no server here has (cluster.sampler.gpus)")
    sequences = _count_completions(stage)
    longest = stage.number("max_tokens")
    context = subject.context
    if not (sequences and longest and context):
        raise NotEstimated("nothing limits its tokens (engine.args.max_model_len)")
    if longest >= context:
        remedy = "max_tokens leaves no room for a prompt in engine.args.max_model_len"
        raise NotEstimated(remedy)
    tensor = int(options.get("tensor_parallel_size") or 1)
    pipeline = int(options.get("pipeline_parallel_size") or 1)
    engines = max(1, count // (tensor * pipeline))
    share = math.ceil(sequences / engines)
    at_once = min(share, int(options.get("max_num_seqs") or SEQUENCES))
    steps = math.ceil(share / at_once) * longest
    # On the mean half of a completion is in the cache.
    mean = context - longest / 2
    parameters = subject.model.parameters
    kv_bytes = subject.model.kv_bytes
    read_bytes = 2 * parameters + at_once * mean * kv_bytes
    reading_s = read_bytes / subject.bandwidth
    computing_s = 2 * parameters * at_once / subject.flops
    step_s = max(reading_s, computing_s) / tensor
    prompt_tokens = sequences * (context - longest)
    prompts_s = 2 * parameters * prompt_tokens / (count * subject.flops)
    terms = (
        f"{steps:,.0f} steps of {at_once} at once, each {format_size(read_bytes)} "
        f"(2 × {parameters:,} + {at_once} × {mean:g} × {kv_bytes:,}), "
        f"and {sequences:,.0f} × {context - longest:g} tokens of prompts, on {count}"
    )
    return Estimate(steps * step_s + prompts_s, terms)


def _count_completions(stage: StagePlan, *, is_trained: bool = False) -> float:
    """Count the completions of a pod without those that it carries on, or those of them that are trained on."""
    prompts = stage.number("prompts_per_iteration") if is_trained else count_prompts(stage)
    return (prompts or stage.number("limit") or 0) * (stage.number("n") or 1)
