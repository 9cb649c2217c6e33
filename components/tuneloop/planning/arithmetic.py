"""How long stages take on a device whose data sheet is known: arithmetic, where no run was measured.

Training takes 6 operations a parameter and token, 2 of them forward; 2 more with gradient
checkpointing, which computes forward twice, and 2 fewer for parameters that LoRA freezes. A
generated token takes a pass over the weights and the KV cache of all sequences that are generated
at once, as fast as memory gives them or the device computes, and a prompt's 2 operations a
parameter. Attention's own operations are left out."""

import math
from collections.abc import Mapping
from typing import Any

from tuneloop.argo.memory_estimate import context_of, model_of
from tuneloop.config.model_facts import Model
from tuneloop.core.errors import UserError
from tuneloop.planning.cost import count_replicas
from tuneloop.planning.plan import count_pods, count_prompts
from tuneloop.runs.summary import format_size
from tuneloop.training.devices import DEVICES, Device
from tuneloop.training.options import TrainerOptions
from tuneloop.workflow.pod_loop import expand_pod
from tuneloop.workflow.rendered_stages import Stage, read_stage

COMPUTING = 0.4
READING = 0.6
"""Shares of a device's operations and of its memory's bytes a second that are assumed to be reached."""


def estimate_seconds(workflow: Mapping[str, Any], name: str) -> tuple[dict[str, float], list[str]]:
    """Estimate the seconds of a pod of each stage that trains or generates, and tell how. Raises UserError: the device
    or the shape of the model is not known, or that of no stage is."""
    if name not in DEVICES:
        raise UserError("--device", name, f"is not known; known: {', '.join(DEVICES)}")
    workflow, _ = expand_pod(workflow)
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    stages = [read_stage(templates[template]) for template in count_pods(workflow)]
    model = model_of(stages)
    if not isinstance(model, Model):
        raise UserError("--device", name, f"needs the shape of the model: {model}")
    if not model.linears:
        raise UserError(
            "--device",
            name,
            f"needs a dense model: {model.name} has experts, or another kind of layers",
        )
    replicas = count_replicas(templates)
    servers = [stage for stage in stages if stage.serves for _ in range(replicas[stage.name])]
    seconds: dict[str, float] = {}
    lines: list[str] = []
    for stage in stages:
        if stage.role == "trainer":
            told = _train(stage, stages, model, DEVICES[name])
        elif stage.role in ("sampler", "evaluator"):
            told = _generate(stage, servers, model, context_of(stages), DEVICES[name])
        else:
            continue
        if isinstance(told, str):
            lines.append(f"  {stage.name}: not estimated: {told}")
        else:
            seconds[stage.name] = told[0]
            lines.append(f"  {stage.name}: {told[1]} = {told[0]:.3g} s")
    if not seconds:
        raise UserError(
            "--device",
            name,
            "; ".join(map(str.strip, lines)) or "no stage here trains or generates",
        )
    assumed = f"assumed: {COMPUTING:.0%} of {name}'s {DEVICES[name].flops / 1e12:g} TFLOP/s (dense bfloat16), "
    assumed += f"{READING:.0%} of its {DEVICES[name].bandwidth / 1e12:g} TB/s; without starting, loading and storing"
    return seconds, [*lines, f"  {assumed}"]


def _train(
    stage: Stage, stages: list[Stage], model: Model, device: Device
) -> tuple[float, str] | str:
    """Return the seconds of a stage that trains and how they come about, or what is not known."""
    missing = (
        []
        if (count := stage.accelerators * stage.nodes)
        else ["it has no accelerator (cluster.trainer.gpus)"]
    )
    dtype = stage.flags.get("dtype", "not given")
    if dtype != "bfloat16":
        missing.append(f"dtype is {dtype}, and peaks are known of bfloat16")
    if missing:
        return ", and ".join(missing)
    length = stage.number("max_length")
    limit = "max_length"
    if stage.number("updates_per_batch"):
        samplers = [sampler for sampler in stages if sampler.role == "sampler"]
        sizes = [_count_sequences(sampler, trained=True) for sampler in samplers]
        sequences = sum(sizes)
        length = context_of(stages)
        limit = "engine.args.max_model_len"
    elif stage.number("epochs"):
        return "its epochs are of rows that are not read yet: set max_steps"
    else:
        batch = math.prod(
            stage.number(each) or 1 for each in ("per_device_train_batch_size", "max_steps")
        )
        kinds = stage.component.options.values() if stage.component else ()
        batch *= max(
            (kind.sequences for kind in kinds if issubclass(kind, TrainerOptions)), default=1
        )
        sequences = (
            batch * (stage.number("gradient_accumulation_steps") or 1) * stage.ranks * stage.nodes
        )
    if not (sequences and length):
        return f"nothing limits its tokens ({limit})"
    again = stage.flags.get("gradient_checkpointing") == "true"
    frozen = stage.flags.get("lora", "null") != "null"
    each = 6 + 2 * again - 2 * frozen
    took = each * model.parameters * sequences * length / (count * device.flops * COMPUTING)
    return took, f"{each} × {model.parameters:,} × {sequences:,.0f} × {length:g} tokens, on {count}"


def _generate(
    stage: Stage, servers: list[Stage], model: Model, context: int | None, device: Device
) -> tuple[float, str] | str:
    """Return the seconds of a stage that generates, itself or by `servers`, and how, or what is not known."""
    if "tasks" in stage.flags:
        return "its tasks decide how much it generates"
    engines = [stage] if stage.accelerators else servers
    count = sum(engine.accelerators * engine.nodes for engine in engines)
    if not count:
        return "it has no accelerator, and no server here has (cluster.sampler.gpus)"
    sequences = _count_sequences(stage)
    most = stage.number("max_tokens")
    if not (sequences and most and context):
        return "nothing limits its tokens (engine.args.max_model_len)"
    if most >= context:
        return "max_tokens leaves no room for a prompt in engine.args.max_model_len"
    arguments = engines[0].engine_args
    split, pipeline = (
        int(arguments.get(f"{each}_parallel_size") or 1) for each in ("tensor", "pipeline")
    )
    share = math.ceil(sequences / max(1, count // (split * pipeline)))
    at_once = min(share, int(arguments.get("max_num_seqs") or 256))
    steps = math.ceil(share / at_once) * most
    mean = context - most / 2
    read = 2 * model.parameters + at_once * mean * model.kv_bytes
    a_step = (
        max(
            read / device.bandwidth / READING,
            2 * model.parameters * at_once / device.flops / COMPUTING,
        )
        / split
    )
    asked = 2 * model.parameters * sequences * (context - most) / (count * device.flops * COMPUTING)
    how = f"{steps:,.0f} steps of {at_once} at once, each {format_size(read)} (2 × {model.parameters:,} + {at_once} × "
    how += f"{mean:g} × {model.kv_bytes:,}), and {sequences:,.0f} × {context - most:g} tokens of prompts, on {count}"
    return steps * a_step + asked, how


def _count_sequences(stage: Stage, trained: bool = False) -> float:
    """Count the completions of a pod without those that it carries on, or those of them that are trained on."""
    prompts = stage.number("prompts_per_iteration") if trained else count_prompts(stage)
    return (prompts or stage.number("limit") or 0) * (stage.number("n") or 1)
