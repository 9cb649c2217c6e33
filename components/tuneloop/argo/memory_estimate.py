"""Estimate the memory of a stage's pod, from its parameters and the model's shape.

Memory of training, bytes a parameter: `tuneloop.argo.training_memory`, divided by the pods that
FSDP shards over, as no rank loads more than its rows (`training/fsdp/loading.py`). The first rank
alone opens a whole model, which it has written, to compute the canary. Activations a layer and
token: those that torch saves for the backward pass (`count_layer_bytes`); with gradient
checkpointing, the input of each layer (4 × hidden), and one whole layer. Logits: 4 bytes each, and
their gradient, for as many as exist at once. `config/choices.py` (`estimate_sequence_bytes`,
`find_activation_budget`) estimates both again to choose the batch: they change together. KV cache a
token: 2 × layers × KV heads × head size × bytes a number.

On a CPU, and for a server with `engine.snapshot`, a pod requests this memory and that of its
programs (`compute_memory_request`). With a GPU, which holds these, it requests memory for its
programs, and one copy of weights and optimizer state on their way from or to the store.

Readers beside the rendering: `planning/` (`plan`, `limits`, what a checkpoint takes) and
`kfp/task_plan.py: _estimate_memory`. What is estimated of a stage goes by its role and its
parameters: a stage of another role, or an option that takes memory, is not counted until it has a
part here, and `is_memory_estimate_complete` must not promise a limit for it, which would kill the
pod. Tests: `tests/unit/argo/test_memory.py`, `tests/unit/planning/test_plan.py`,
`tests/unit/training/test_lora.py`.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from tuneloop.argo.training_memory import GRADIENT_BYTES, TRAINED_BYTES, WEIGHT_BYTES
from tuneloop.config.model_facts import (
    Model,
    ModelFacts,
    count_activation_bytes,
    count_layer_bytes,
    read_model_facts,
)
from tuneloop.stages.base_model import TINY, base_model
from tuneloop.training.lora import Lora
from tuneloop.training.options import GPU_LOGITS, LOGITS, TrainerOptions
from tuneloop.workflow.plan import NATIVE, VLLM, PodPlan, RunPlan, ServerPlan, StagePlan
from tuneloop.workflow.pod_hook import choose_memory_request
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import UNKNOWN, Cluster

CPU_POOL = 1 << 30
"""Bytes of KV cache that our vLLM server asks for on a CPU, unless told otherwise: the number is
set in `inference/engines/_vllm_start.py`."""
SERVER_PROGRAM = 3 << 30
"""Bytes of vLLM's server without its model: it ran in 4 GiB with its KV cache. With `CPU_POOL` it
is `SERVER_BYTES` of `config/choices.py`."""
GPU_PROGRAM = 8 << 30
"""Bytes of any process with a GPU, for CUDA's libraries and pinned buffers; not measured."""
TORCH_PROGRAM = 1 << 30
"""Bytes of a process with torch: a peak of 0.5 GiB on a CPU, plus a reserve."""
STEP = 1 << 28
"""Bytes (256 MiB). Memory is requested in multiples of this."""
SEQUENCES = 256
"""Sequences that vLLM computes at once at most, unless told otherwise (its ``max_num_seqs``). That
of `inference/engines/transformers.py: Transformers` has the same default. `planning/arithmetic.py`
reads it, too."""
Pod = TypeVar("Pod", bound=PodPlan)


PartKind = Literal["weights", "activations", "logits", "kv_cache"]
"""What the bytes of a `Part` are. Weights are also those that are trained, with their gradients and
the optimizer's moments. Of a pod with a GPU only weights count for its host memory
(`compute_memory_request`). A further kind needs a setting in `planning/limits.py: name_largest`,
which otherwise names the base model."""


class Part(NamedTuple):
    """A part of a pod's memory.

    Attributes:
        kind: of the bytes. `planning/limits.py` finds by it the setting that would make them fewer.
        label: what they are, for the user.
        factors: whose product is `size`, for the user.
        size: bytes.
    """

    kind: PartKind
    label: str
    factors: str
    size: float


UNKNOWN_MODEL = f"unknown: no stage {base_model.name}"
"""What stands for the model where no stage brings one."""


def model_of(pods: Iterable[PodPlan]) -> Model | str:
    """Return the model of the stage `base_model`, or why it is unknown."""
    facts = facts_of(pods)
    return UNKNOWN_MODEL if facts is None else facts.shape


def facts_of(pods: Iterable[PodPlan]) -> ModelFacts | None:
    """Return what is known of the model of the stage `base_model`; None where there is no such
    stage. `config/rules.py: read_base_model` reads the same parameters from settings.
    """
    for pod in pods:
        if isinstance(pod, StagePlan) and pod.component is base_model:
            parameters = pod.parameters
            return read_model_facts(
                parameters.get("model", TINY[0]),
                parameters.get("revision"),
                adapter_base=parameters.get("adapter_base"),
                vocab_size=parameters.get("vocab_size") or None,
                max_position_embeddings=parameters.get("max_position_embeddings") or None,
            )
    return None


def count_adapter_parameters(stage: StagePlan, model: Model) -> int | None:
    """Count a stage's LoRA parameters, ``r × (inputs + outputs)`` an adapter; None where its layers
    are not known.
    """
    options = stage.parameters.get("lora")
    if options is None:
        return 0
    lora = Lora(**options)
    targets = model.linears if lora.target_modules == "all-linear" else lora.target_modules
    # A text is a pattern of peft's, which only the loaded model can resolve.
    if not model.linears or isinstance(targets, str) or not set(targets) <= model.linears.keys():
        return None
    width = 0
    for name in set(targets):
        width += sum(model.linears[name])
    return model.layers * lora.r * width


def count_batch_sequences(stage: StagePlan) -> float | None:
    """Count the sequences of a rank's micro-batch: a pair of preferences has two
    (`TrainerOptions.sequences`). None where the batch is not known.
    """
    batch = stage.number("per_device_train_batch_size")
    if not batch:
        return None
    sequences = 1
    if stage.component:
        for options in stage.component.options.values():
            if issubclass(options, TrainerOptions):
                sequences = max(sequences, options.sequences)
    return batch * sequences


def estimate_memory_parts(pod: PodPlan, model: Model, context: int | None) -> list[Part]:
    """Estimate the parts of a pod's memory that follow from the model; none for a pod of another
    kind than those that are named here.

    Args:
        pod: of a stage or a server.
        model: the base model.
        context: the most tokens of a prompt and its completion, if they are limited.
    """
    if isinstance(pod, ServerPlan):
        return _estimate_server(pod, model)
    if not isinstance(pod, StagePlan):
        return []
    if pod.role == "trainer":
        return _estimate_training(pod, model, context)
    if pod.role in ("sampler", "evaluator") and pod.parameters.get("engine") == "transformers":
        return _estimate_sampling(pod, model, context)
    if _only_holds(pod):
        return [_estimate_weights(model, WEIGHT_BYTES)]
    return []


def is_memory_estimate_complete(pod: PodPlan, model: Model, context: int | None) -> bool:
    """Return whether `estimate_memory_parts` covers all parts, which needs a limit on the length of
    sequences. Only then the estimate becomes the limit of a pod (`_request_memory`).
    """
    if isinstance(pod, ServerPlan):
        # What the server of another engine takes was not measured.
        return pod.kind == VLLM
    if not isinstance(pod, StagePlan):
        return False
    if pod.role == "trainer":
        has_limit = bool(pod.number("max_length") or context)
        has_batch = bool(pod.number("per_device_train_batch_size"))
        is_counted = count_adapter_parameters(pod, model) is not None
        # How much memory another backend takes is not known.
        return has_limit and has_batch and is_counted and pod.backend == NATIVE
    return _only_holds(pod) or context is not None


def _only_holds(stage: StagePlan) -> bool:
    """Say whether a stage needs little memory besides a model's weights: it has the image
    ``trainer`` but does not train, as `base_model` and `reference_logprobs`.
    """
    component = stage.component
    return component is not None and component.image == "trainer" and stage.role != "trainer"


def compute_memory_request(pods: Sequence[PodPlan], parts: Sequence[Part]) -> int:
    """Compute the bytes to request for a pod that runs the stages of `pods` one after another and
    holds `parts`.
    """
    programs = 0.0
    launcher = 0.0
    is_on_host = True
    for pod in pods:
        ranks = pod.ranks if isinstance(pod, StagePlan) else 1
        # Stages that follow one another give their memory back: the largest counts.
        programs = max(programs, _choose_program(pod) * ranks)
        if ranks > 1:
            # torchrun itself imports torch, and computes nothing.
            launcher = TORCH_PROGRAM / 2
        if pod.resources.accelerators:
            is_on_host = False
    if _keeps_cache_on_host(pods):
        is_on_host = True
    # Weights pass through host memory also where a GPU holds everything.
    sizes = [part.size for part in parts if is_on_host or part.kind == "weights"]
    return math.ceil((programs + launcher + sum(sizes)) / STEP) * STEP


def _choose_program(pod: PodPlan) -> int:
    """Return the bytes of a pod's process without its model."""
    if pod.resources.accelerators:
        return GPU_PROGRAM
    return SERVER_PROGRAM if isinstance(pod, ServerPlan) else TORCH_PROGRAM


def _keeps_cache_on_host(pods: Sequence[PodPlan]) -> bool:
    """Say whether one of the pods is a server whose snapshot holds its KV cache."""
    for pod in pods:
        if not isinstance(pod, ServerPlan):
            continue
        # vLLM drops its cache before it sleeps. A server that does not sleep keeps it. Another
        # engine has no such option.
        if pod.engine_args.get("snapshot") and not pod.engine_args.get("enable_sleep_mode"):
            return True
    return False


def _estimate_weights(model: Model, width: int, pods: int = 1) -> Part:
    """Estimate weights of `width` bytes each, divided equally among `pods` pods."""
    factors = f"{model.parameters:,} parameters × {width} bytes{_describe_pods(pods)}"
    return Part("weights", "weights", factors, model.parameters * width / pods)


def _describe_pods(pods: int) -> str:
    return f" / {pods} pods" if pods > 1 else ""


def _estimate_training(stage: StagePlan, model: Model, context: int | None) -> list[Part]:
    parts = _estimate_states(stage, model)
    length = stage.number("max_length") or context
    sequences = count_batch_sequences(stage)
    if length and sequences:
        parts += _estimate_step(stage, model, sequences, length)
    return parts


def _estimate_states(stage: StagePlan, model: Model) -> list[Part]:
    """Estimate the weights, gradients and moments that a trainer holds, and the weights of its
    reference.
    """
    adapters = count_adapter_parameters(stage, model)
    # Without adapters the weights themselves are trained.
    subject = "" if adapters == 0 else "adapters' "
    label = f"{subject}weights, gradients and optimizer"
    trained = model.parameters if adapters == 0 else adapters
    weights = _estimate_weights(model, WEIGHT_BYTES, stage.nodes)
    parts: list[Part] = []
    if adapters != 0:
        parts.append(weights)
    if trained:
        factors = f"{trained:,} parameters × {TRAINED_BYTES} bytes{_describe_pods(stage.nodes)}"
        size = trained * TRAINED_BYTES / stage.nodes
        parts.append(Part("weights", label, factors, size))
    gradient_bytes = GRADIENT_BYTES if adapters == 0 else 0
    parts += _estimate_written(stage, model, gradient_bytes)
    algorithm = stage.parameters.get("algorithm_args", {})
    # Without a KL term the reference is never loaded.
    if "reference" in stage.wired and algorithm.get("beta"):
        parts.append(weights._replace(label="weights of the reference"))
    return parts


def _estimate_written(stage: StagePlan, model: Model, gradient_bytes: int) -> list[Part]:
    """Estimate the whole model that the first rank opens once it is written, for its canary.

    It takes the place of gradients, which are gone by then. In one pod these are as large.

    Args:
        gradient_bytes: of a parameter of the model, before they are divided by the pods.
    """
    width = 4 if stage.parameters.get("save_dtype") == "float32" else 2
    surplus = width - gradient_bytes / stage.nodes
    if stage.nodes == 1 or surplus <= 0:
        return []
    factors = f"{model.parameters:,} parameters × {width} bytes"
    if gradient_bytes:
        factors += f", less {gradient_bytes} bytes of gradients{_describe_pods(stage.nodes)}"
    return [Part("weights", "the written model", factors, model.parameters * surplus)]


def _estimate_step(stage: StagePlan, model: Model, sequences: float, length: float) -> list[Part]:
    """Estimate the activations and the logits of a step on so many sequences of `length` tokens."""
    tokens = sequences * length
    dtype = stage.parameters.get("dtype", "float32")
    is_checkpointed = stage.parameters.get("gradient_checkpointing") is True
    layer = count_layer_bytes(model, dtype)
    layers = f"{model.layers} layers × {layer:,} bytes"
    if is_checkpointed:
        layers = f"({model.layers} layers × {4 * model.hidden:,} + {layer:,} of one layer) bytes"
    # Each rank computes a batch of its own, and all ranks of a pod share its memory.
    ranks = f" × {stage.ranks} ranks" if stage.ranks > 1 else ""
    token_bytes = count_activation_bytes(model, is_checkpointed, dtype)
    activations = tokens * token_bytes * stage.ranks
    # The trainer computes the logits in parts that are no larger than this.
    largest = GPU_LOGITS if stage.resources.accelerators else LOGITS
    logits = tokens * model.vocab
    batch = f"{sequences:g} sequences × {length:,g} tokens"
    numbers = f"{batch} × {model.vocab:,}"
    if logits > largest:
        logits = largest
        numbers = f"{largest:,}"
    return [
        Part("activations", "activations", f"{batch} × {layers}{ranks}", activations),
        # float32 logits and their gradient.
        Part(
            "logits",
            "logits",
            f"{numbers} × 8 bytes{ranks}",
            logits * 8 * stage.ranks,
        ),
    ]


def _estimate_server(server: ServerPlan, model: Model) -> list[Part]:
    options = server.engine_args
    if server.kind != VLLM:
        return [_estimate_weights(model, 2 if server.resources.accelerators else WEIGHT_BYTES)]
    parts = [_estimate_weights(model, 2)]
    # On a GPU vLLM takes what its memory leaves, unless it is told a size.
    if not server.resources.accelerators or "kv_cache_memory_bytes" in options:
        pool = int(options.get("kv_cache_memory_bytes", CPU_POOL))
        tokens = pool // model.kv_bytes
        factors = f"{tokens:,} tokens × {model.kv_bytes:,} bytes"
        parts.append(Part("kv_cache", "KV cache", factors, pool))
    return parts


def _estimate_sampling(stage: StagePlan, model: Model, context: int | None) -> list[Part]:
    # transformers computes on a CPU in float32.
    width = 2 if stage.resources.accelerators else 4
    parts = [_estimate_weights(model, width)]
    if context:
        largest = int(stage.engine_args.get("max_num_seqs", SEQUENCES))
        # An engine that is told no number of prompts computes as many at once as it can.
        prompts: float = largest
        # The setting that says most precisely how many prompts a batch has comes first.
        for name in ("oversampled_prompts", "prompts_per_iteration", "limit"):
            number = stage.number(name)
            if number:
                prompts = number
                break
        sequences = min(largest, prompts * (stage.number("n") or 1))
        token_bytes = model.kv_bytes * width // 2
        factors = f"{sequences:g} sequences × {context:,} tokens × {token_bytes:,} bytes"
        parts.append(Part("kv_cache", "KV cache", factors, sequences * context * token_bytes))
    return parts


def context_of(pods: Iterable[PodPlan]) -> int | None:
    """Return the most tokens of a prompt and its completion in the engine, by its option
    ``max_model_len``; None if no engine has it. An engine whose option has another name limits
    nothing here.
    """
    limits: list[int] = []
    for pod in pods:
        if isinstance(pod, StagePlan | ServerPlan) and pod.engine_args.get("max_model_len"):
            limits.append(int(pod.engine_args["max_model_len"]))
    return max(limits, default=None)


def plan_memory(plan: RunPlan, cluster: Cluster) -> RunPlan:
    """Return the plan with the memory of pods that have no limit yet, since the memory of their
    role is ``auto``. `kfp/task_plan.py: _estimate_memory` does this for the tasks of KFP.

    Request and limit are set to the estimate. If the estimate is incomplete, only the request is
    set, and if there is none, neither is, since a guess must not kill a pod.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    if all(pod.resources.memory_limit for pod in plan.pods):
        return plan
    processes: list[StagePlan | ServerPlan] = list(plan.stages.values())
    processes += plan.servers.values()
    model = model_of(processes)
    # Without its shape nothing is estimated: pods keep the requests of their roles.
    if not isinstance(model, Model):
        return plan
    context = context_of(processes)
    estimate = partial(estimate_pod, model=model, context=context, cluster=cluster)
    stages = {name: estimate(stage, [stage]) for name, stage in plan.stages.items()}
    servers = {name: estimate(server, [server]) for name, server in plan.servers.items()}
    loop = plan.loop
    if loop and loop.pod:
        pod = estimate(loop.pod, [plan.stages[name] for name in loop.stages])
        loop = loop.model_copy(update={"pod": pod})
        # The stages of an iteration have the pod's memory together.
        for name in loop.stages:
            stage = plan.stages[name]
            stages[name] = stage.model_copy(update={"resources": pod.resources})
    return plan.model_copy(update={"stages": stages, "servers": servers, "loop": loop})


def estimate_pod(
    pod: Pod, inner: Sequence[PodPlan], *, model: Model, context: int | None, cluster: Cluster
) -> Pod:
    """Return a pod with the memory of the stages or the server that run in it, unless it has a
    limit.

    Args:
        pod: what gets the memory.
        inner: the stages or the server that run in it.
        model: the base model.
        context: the most tokens of a prompt and its completion, if they are limited.
        cluster: where it runs.
    """
    if pod.resources.memory_limit:
        return pod
    parts: list[Part] = []
    is_complete = True
    for process in inner:
        parts += estimate_memory_parts(process, model, context)
        is_complete &= is_memory_estimate_complete(process, model, context)
    if not parts:
        return pod
    amount = compute_memory_request(inner, parts)
    request = choose_memory_request(cluster, pod.resource_role)
    return _request_memory(pod, amount, is_complete, request)


def _request_memory(pod: Pod, amount: int, is_complete: bool, own_request: str) -> Pod:
    """Return a pod that requests memory.

    Args:
        pod: without a limit.
        amount: bytes.
        is_complete: whether the amount covers all that the pod holds: only then it is the limit,
            too, and only then the request may be less than the default.
        own_request: the memory that an extension requests, which is kept if it is less; may be
            empty.
    """
    text = f"{amount >> 20}Mi"
    update: dict[str, str] = {}
    if is_complete:
        update["memory_limit"] = text
    if own_request and amount >= parse_resource_quantity(own_request):
        # The scheduler adds the requests of all runs, which is why this one was set lower.
        is_requested = False
    else:
        is_requested = is_complete or amount > parse_resource_quantity(UNKNOWN)
    if is_requested:
        update["memory_request"] = text
    return pod.model_copy(update={"resources": pod.resources.model_copy(update=update)})
