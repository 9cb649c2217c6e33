"""Estimate the memory of a stage's pod, from its flags and the model's shape.

Memory of training, bytes a parameter: `tuneloop.argo.training_memory`, divided by the pods that FSDP shards over.
Activations a layer and token: those that torch saves for the backward pass (`count_layer_bytes`); with
gradient checkpointing, the input of each layer (4 × hidden), and one whole layer. Logits: 4 bytes each,
and their gradient, for as many as exist at once. KV cache a token: 2 × layers × KV heads × head size ×
bytes a number.

On a CPU, and for a server with `engine.snapshot`, a pod requests this memory and that of its programs
(`compute_memory_request`). With a GPU, which holds these, it requests memory for its programs, and one copy of weights
and optimizer state on their way from or to the store."""

import json
import math
from collections.abc import Sequence

from tuneloop.argo.claims import share_of
from tuneloop.argo.colocation import parse_resource_quantity
from tuneloop.argo.jobset import dump_manifest
from tuneloop.argo.training_memory import TRAINED_BYTES, WEIGHT_BYTES
from tuneloop.config.model_facts import (
    Model,
    ModelFacts,
    count_activation_bytes,
    count_layer_bytes,
    read_model_facts,
)
from tuneloop.core.json_types import JsonObject
from tuneloop.stages.base_model import TINY, base_model
from tuneloop.training.lora import Lora
from tuneloop.training.options import GPU_LOGITS, LOGITS, TrainerOptions
from tuneloop.workflow.manifest import labels_of, parse_applied_object
from tuneloop.workflow.pod_loop import expand_pod, find_pod
from tuneloop.workflow.rendered_stages import Stage, container_of, read_loop, read_stage
from tuneloop.workflow.settings import GROUP_LABEL, UNKNOWN

CPU_POOL = 1 << 30
"""Bytes of KV cache that our vLLM server asks for on a CPU, unless told otherwise."""
PROGRAM = {"server": 3 << 30, "gpu": 8 << 30, "": 1 << 30}
"""Bytes of a process without its model: vLLM's server (it ran in 4 GiB with its KV cache), any process with a GPU (for
CUDA's libraries and pinned buffers, not measured), one with torch (a peak of 0.5 GiB on a CPU, plus a reserve)."""
STEP = 1 << 28
"""Memory is requested in multiples of this."""


def model_of(stages: list[Stage]) -> Model | str:
    """Return the model of the stage `base_model`, or why it is unknown."""
    facts = facts_of(stages)
    return f"unknown: no stage {base_model.name}" if facts is None else facts.shape


def facts_of(stages: list[Stage]) -> ModelFacts | None:
    """Return what is known of the model of the stage `base_model`; None where there is no such stage."""
    base = next((stage for stage in stages if stage.component is base_model), None)
    if base is None:
        return None
    revision = base.flags.get("revision", "null")
    adapter_base = base.flags.get("adapter_base", "null")
    return read_model_facts(
        base.flags.get("model", TINY[0]),
        None if revision == "null" else revision,
        adapter_base=None if adapter_base == "null" else adapter_base,
        vocab_size=int(base.number("vocab_size") or 0) or None,
        max_position_embeddings=int(base.number("max_position_embeddings") or 0) or None,
    )


def count_adapter_parameters(stage: Stage, model: Model) -> int | None:
    """Count a stage's LoRA parameters, ``r × (inputs + outputs)`` an adapter; None where its layers are not known."""
    if (given := json.loads(stage.flags.get("lora") or "null")) is None:
        return 0
    lora = Lora(**given)
    named = model.linears if lora.target_modules == "all-linear" else lora.target_modules
    if not model.linears or isinstance(named, str) or not set(named) <= model.linears.keys():
        return None
    return model.layers * lora.r * sum(sum(model.linears[name]) for name in set(named))


def estimate_memory_parts(
    stage: Stage, model: Model, context: int | None
) -> list[tuple[str, float]]:
    """Estimate the parts of a pod's memory that follow from the model, as (description, bytes). `context` is the most
    tokens of a prompt and its completion, if they are limited."""
    if stage.role == "trainer":
        return _training_memory(stage, model, context)
    if stage.serves or (
        stage.role in ("sampler", "evaluator") and stage.flags.get("engine") == "transformers"
    ):
        return _sampling_memory(stage, model, context)
    if _only_holds(stage):
        return [(f"{model.parameters:,} × 4 weights", float(model.parameters * WEIGHT_BYTES))]
    return []


def is_memory_estimate_complete(stage: Stage, model: Model, context: int | None) -> bool:
    """Return whether `estimate_memory_parts` covers all parts, which needs a limit on the length of sequences."""
    if stage.role == "trainer":
        limited = (stage.number("max_length") or context) and stage.number(
            "per_device_train_batch_size"
        )
        return (
            bool(limited)
            and "backend" not in stage.flags
            and count_adapter_parameters(stage, model) is not None
        )
    return stage.serves or _only_holds(stage) or context is not None


def _only_holds(stage: Stage) -> bool:
    """Say whether a stage needs little memory besides a model's weights: it computes with torch, but does not train."""
    return (
        stage.component is not None
        and stage.component.image == "trainer"
        and stage.role != "trainer"
    )


def compute_memory_request(stages: Sequence[Stage], parts: Sequence[tuple[str, float]]) -> int:
    """Compute the bytes to request for a pod that runs `stages` one after another and holds `parts`."""
    kinds = ["gpu" if stage.accelerators else "server" if stage.serves else "" for stage in stages]
    program = max(PROGRAM[kind] * stage.ranks for kind, stage in zip(kinds, stages))
    torchrun = PROGRAM[""] / 2 if any(stage.ranks > 1 for stage in stages) else 0
    kept = [
        s for s in stages if s.serves and not s.engine_args.get("enable_sleep_mode")
    ]  # else vLLM drops it before
    host = "gpu" not in kinds or any(stage.engine_args.get("snapshot") for stage in kept)
    states = [count for text, count in parts if host or "weights" in text]
    return math.ceil((program + torchrun + sum(states)) / STEP) * STEP


def _training_memory(stage: Stage, model: Model, context: int | None) -> list[tuple[str, float]]:
    count = model.parameters
    ranks = stage.ranks
    shared = f" / {stage.nodes} pods" if stage.nodes > 1 else ""
    kept = "(4 weights + 4 gradients + 8 Adam)"
    added = count_adapter_parameters(stage, model)
    if added == 0:
        parts = [(f"{count:,} × {kept}{shared}", count * TRAINED_BYTES / stage.nodes)]
    else:
        parts = [(f"{count:,} × 4 weights{shared}", count * WEIGHT_BYTES / stage.nodes)]
        parts += (
            [(f"adapters' {added:,} × {kept}{shared}", added * TRAINED_BYTES / stage.nodes)]
            if added
            else []
        )
    if "reference" in stage.flags and json.loads(stage.flags.get("algorithm_args", "{}")).get(
        "beta"
    ):
        parts.append(
            (f"{count:,} × 4 weights of the reference{shared}", count * WEIGHT_BYTES / stage.nodes)
        )
    length = stage.number("max_length") or context
    batch = stage.number("per_device_train_batch_size")
    if length and batch:
        models = stage.component.options.values() if stage.component else ()
        batch *= max(
            (model.sequences for model in models if issubclass(model, TrainerOptions)), default=1
        )
        tokens = batch * length
        dtype = stage.flags.get("dtype", "float32")
        is_checkpointed = stage.flags.get("gradient_checkpointing") == "true"
        layer = count_layer_bytes(model, dtype)
        layers = f"{model.layers} layers × {layer:,}"
        if is_checkpointed:
            layers = f"({model.layers} layers × {4 * model.hidden:,} + {layer:,} of one)"
        each = f" × {ranks} ranks" if ranks > 1 else ""
        activations = tokens * count_activation_bytes(model, is_checkpointed, dtype)
        text = f"{batch:g} × {length:g} tokens × {layers}{each} activations"
        parts.append((text, activations * ranks))
        logits = tokens * model.vocab
        most = GPU_LOGITS if stage.accelerators else LOGITS
        whole = f"{batch:g} × {length:g} × {model.vocab}" if logits <= most else f"{most:,}"
        parts.append((f"{whole} logits at once × 8{each}", min(logits, most) * 8 * ranks))
    return parts


def _sampling_memory(stage: Stage, model: Model, context: int | None) -> list[tuple[str, float]]:
    arguments = stage.engine_args
    width = 2 if stage.serves or stage.accelerators else 4  # transformers on a CPU: float32
    parts = [(f"{model.parameters:,} × {width} weights", float(model.parameters * width))]
    if stage.serves:
        if not stage.accelerators or "kv_cache_memory_bytes" in arguments:
            pool = int(arguments.get("kv_cache_memory_bytes", CPU_POOL))
            parts.append(
                (
                    f"KV cache pool of {pool // model.kv_bytes:,} tokens × {model.kv_bytes}",
                    float(pool),
                )
            )
        return parts
    most = int(arguments.get("max_num_seqs", 256))
    sizes = map(stage.number, ("oversampled_prompts", "prompts_per_iteration", "limit"))
    prompts = next(filter(None, sizes), most)
    sequences = min(most, prompts * (stage.number("n") or 1))
    if context:
        each = model.kv_bytes * width // 2
        parts.append(
            (f"{sequences:g} × {context} tokens × {each} KV cache", sequences * context * each)
        )
    return parts


def context_of(stages: list[Stage]) -> int | None:
    """Return the maximum tokens of a prompt and its completion in the engine: vLLM's ``max_model_len``."""
    limits = [
        stage.engine_args["max_model_len"]
        for stage in stages
        if stage.engine_args.get("max_model_len")
    ]
    return max(map(int, limits), default=None)


def set_pod_memory(workflow: JsonObject) -> None:
    """Set the memory of pods that are rendered without a limit, since the memory of their role is ``auto``. Request and
    limit are set to the estimate; if the estimate is incomplete, only the request is set, and if there is none, neither
    is, since a guess must not kill a pod. Raises UserError if the model's configuration cannot be read."""
    found = (
        (template, parse_applied_object(template))
        for template in workflow["spec"].get("templates", [])
    )
    resources = (
        (template, job, container_of(template, job).get("resources", {})) for template, job in found
    )
    unlimited = [
        (t, j)
        for t, j, of in resources
        if "memory" in {*of.get("requests", {})} - {*of.get("limits", {})}
    ]
    if not unlimited:
        return
    pod = find_pod(workflow)
    within, _ = expand_pod(workflow)
    stages = {t["name"]: read_stage(t) for t in within["spec"]["templates"]}
    every = list(stages.values())
    model = model_of(every)
    context = context_of(every)
    if not isinstance(model, Model):
        return
    inner = [stages[name] for name in read_loop(within)]
    share = share_of(workflow)
    for template, job in unlimited:
        run = inner if template is pod else [stages[template["name"]]]
        parts = [part for stage in run for part in estimate_memory_parts(stage, model, context)]
        if parts:
            small = share.request if share and GROUP_LABEL in labels_of(job or template) else ""
            limited = all(is_memory_estimate_complete(stage, model, context) for stage in run)
            _ask(container_of(template, job), compute_memory_request(run, parts), limited, small)
        if job:
            template["resource"]["manifest"] = dump_manifest(job)


def _ask(container: JsonObject, amount: int, limited: bool, small: str) -> None:
    """Write `amount` bytes into `container`: as request and limit, or as a request that is at least the default. A
    request of `small` is kept if it is at most `amount`."""
    resources = container["resources"]
    text = f"{amount >> 20}Mi"
    if limited:
        resources["limits"] = {**resources.get("limits", {}), "memory": text}
    if small and amount >= parse_resource_quantity(small):
        return
    if limited or amount > parse_resource_quantity(UNKNOWN):
        resources["requests"]["memory"] = text
