"""The values that settings get which follow the base model and the machine, each with its reason.

Learning rates are TRL's, from the dataclasses of its release 1.16: SFTConfig 2e-5, DPOConfig 1e-6,
GRPOConfig 1e-6 and RewardConfig 1e-4, each for training all parameters. Adapters take ten times
that, as measured by Schulman et al., "LoRA Without Regret" (2025), and as TRL's guide of that name
does. Completions of 512 tokens are GRPOConfig's `max_completion_length`.

`config/rules.py` names the function of each setting. A function gets the draft so far, so that it
may read what rules before its own have chosen. What it reads of the user's values is not validated
yet and may be of any type.

The numbers here are stated again for people: in the summary of the rule (`config/rules.py`) and in
docs/defaults.md. `tests/unit/config/test_followed.py` tests the choices, not these texts.
"""

from tuneloop.config.engines import ServingEngine
from tuneloop.config.followed import Choice, Draft
from tuneloop.config.model_facts import Model, ModelFacts, count_activation_bytes
from tuneloop.config.sections import read_kind
from tuneloop.core.wording import format_count
from tuneloop.training.options import LOGITS

TRAINERS = ("sft", "preference", "reward_model", "policy_update")
"""The stages that train, by the names of their components.

A further one needs a rate in `LEARNING_RATES`; `choose_stage_batch` and `estimate_sequence_bytes`
name stages, too. Its own defaults have to be among the `demo` values of the rules, which otherwise
leave it alone. The sections of settings are found by the stage (`config/followed.py:
is_section_of`), not by their keys: that of `policy_update` is called ``update``.
"""
LEARNING_RATES = {"sft": 2e-5, "preference": 1e-6, "reward_model": 1e-4, "policy_update": 1e-6}
"""Stage → TRL's learning rate for training all parameters."""
ADAPTER_FACTOR = 10
"""Learning rate of adapters (LoRA), divided by that for training all parameters (source: the
docstring of this module)."""
CHECKPOINTED_PARAMETERS = 1_000_000_000
"""Models with at least as many parameters are trained with gradient checkpointing on
accelerators."""
KEPT_BYTES = 50_000_000
"""Bytes of weights. Of a smaller model a run keeps every version; of a larger one the newest two
(`choose_total_limit`) and the model of each tenth iteration (`choose_keep_every`)."""
UNKNOWN_GPU = 80_000_000_000
"""Bytes of memory that are assumed of an accelerator whose memory is not known, as that of a
pod."""
UNKNOWN_BUDGET = 4 << 30
"""Bytes for a micro-batch where neither a machine's nor a device's memory limits it."""
SERVER_BYTES = 4 << 30
"""Bytes of a rollout server on a CPU, with its cache and without weights, as vLLM's takes: the sum
of `SERVER_PROGRAM` and `CPU_POOL` of `argo/memory_estimate.py`, which this layer cannot import."""
STEP_EXAMPLES = 8
"""Examples of each process in an optimizer step of SFT and of preference optimization: TRL's
`per_device_train_batch_size`, for which its learning rates are chosen. A file of 30 rows then gives
11 steps in 3 epochs."""


def choose_dtype(draft: Draft, section: str) -> Choice | None:
    """Choose the dtype of a stage that trains, or scores with the policy. The engine's own dtype is
    not
    chosen: engines take that of the weights."""
    if draft.machine.is_cpu or draft.facts.dtype == "float32":
        return None
    stored = draft.facts.dtype or "not known"
    return Choice("bfloat16", f"accelerators compute in it; the weights' dtype is {stored}")


def choose_chat(draft: Draft, section: str) -> Choice | None:
    if not draft.facts.has_chat_template:
        return None
    return Choice(True, "the model has a chat template")


def choose_max_tokens(draft: Draft, section: str) -> Choice | None:
    """Choose the most tokens of a completion; an evaluation gets those of the rollouts."""
    # An evaluation is to measure what the loop trains.
    for sampler in draft.find_sections("rollout"):
        tokens = draft.get_count(sampler, "max_tokens")
        if sampler != section and tokens:
            return Choice(tokens, f"as {sampler}.max_tokens")
    usual = 128 if draft.machine.is_cpu else 512
    reason = "fewer than on a GPU" if draft.machine.is_cpu else "the default of the library TRL"
    context = draft.facts.context
    # The prompt needs room, too.
    if context and context // 2 < usual:
        return Choice(max(1, context // 2), f"half of the model's context of {context:,}")
    return Choice(usual, reason)


def find_longest_completion(draft: Draft) -> int:
    """Return the most tokens of a completion that a stage here asks the engine for."""
    stages = [*draft.find_sections("rollout"), *draft.find_sections("evaluate")]
    return max((draft.get_count(name, "max_tokens") or 0 for name in stages), default=0)


def choose_context(draft: Draft) -> Choice:
    """Return the tokens of a prompt with its completion, as the engine is to take them. The 256 of
    the demo are also the engine's default (`config/engines.py: SHORT_CONTEXT`)."""
    longest = find_longest_completion(draft)
    usual = 256 if draft.facts.is_demo else 1024 if draft.machine.is_cpu else 2048
    # Prompts get as much room as completions.
    target = max(usual, 2 * longest)
    context = draft.facts.context
    if context and context < target:
        return Choice(context, "the model's own context")
    if target > usual:
        return Choice(target, f"twice the {format_count(longest, 'token')} of a completion")
    room = f"leaves {format_count(target - longest, 'token')} for a prompt"
    return Choice(target, room if context else f"{room}; the model's context is not known here")


def choose_engine_args(draft: Draft, section: str) -> Choice | None:
    """Choose all arguments of a server's engine, where the user sets none; which they are, the
    class of the engine decides (`ServingEngine.choose_args`)."""
    engine = draft.find_class(section)
    if engine is None or not issubclass(engine, ServingEngine):
        return None
    context = choose_context(draft)
    # Completions of the demo fit twice into the engine's default, whose context is 256.
    if draft.facts.is_demo and context.value <= 256:
        return None
    # The demo is over before capturing has paid, and without GPUs there are no CUDA graphs.
    captures_graphs = not draft.facts.is_demo and draft.machine.sampler_gpus != 0
    args = engine.choose_args(context.value, captures_graphs=captures_graphs)
    return Choice(args, context.reason) if args else None


def choose_colocation(draft: Draft, section: str) -> Choice | None:
    is_loading = read_kind(draft.get(section, "weights")) == "load"
    is_single = draft.get_count(section, "replicas") == 1
    # Both of these settings exclude one GPU for trainer and server (`config/loop.py`).
    is_divided = draft.get("loop", "asynchronous") or draft.get_count("loop", "iterations_per_pod")
    if draft.machine.has_shared_gpu and is_loading and is_single and not is_divided:
        return Choice(True, "trainer and vLLM share the one GPU here")
    return None


def choose_max_length(draft: Draft, section: str) -> Choice | None:
    tokens = 1024 if draft.machine.is_cpu else 2048
    context = draft.facts.context
    if context and context < tokens:
        return Choice(context, "the model's own context")
    reason = "fewer than on a GPU" if draft.machine.is_cpu else "at most; the model has more"
    return Choice(tokens, reason)


def choose_epochs(draft: Draft, section: str) -> Choice | None:
    # With epochs, `max_steps` has no effect: the user's own choice of either stands.
    if draft.is_set(section, "max_steps"):
        return None
    return Choice(
        3.0, "passes over the rows, the default of the library TRL; more of them train longer"
    )


def choose_warmup(draft: Draft, section: str) -> Choice | None:
    return Choice(5, "at most a tenth of the steps, as a short file gives few")


def choose_learning_rate(draft: Draft, section: str) -> Choice | None:
    stage = find_stage(draft, section)
    rate = LEARNING_RATES[stage]
    if not has_adapters(draft, section):
        return Choice(rate, "the default of the library TRL for training all parameters")
    # Written as a decimal, so that 10 × 2e-5 is 0.0002.
    return Choice(
        float(f"{rate * ADAPTER_FACTOR:.6g}"),
        "ten times the default for training all parameters, as adapters (LoRA) need",
    )


def find_stage(draft: Draft, section: str) -> str:
    """Return the stage of TRAINERS that a section configures. There has to be one: a rule for the
    settings of a trainer names stages of TRAINERS alone."""
    return next(stage for stage in TRAINERS if section in draft.find_sections(stage))


def has_adapters(draft: Draft, section: str) -> bool:
    """Return whether a stage trains adapters (LoRA): by its own setting, or that of ``trainer``."""
    return draft.get(draft.find_holder(section, "lora"), "lora") is not None


def list_training(draft: Draft, section: str, setting: str) -> list[str]:
    """Return the sections of the stages that a setting of `section` is for: the stage's own, or for
    ``trainer`` all stages that train and have no such setting themselves."""
    if section != "trainer":
        return [section]
    stages = [name for stage in TRAINERS for name in draft.find_sections(stage)]
    return [name for name in stages if not draft.has_field(name, setting)]


def choose_checkpointing(draft: Draft, section: str) -> Choice | None:
    """Choose gradient checkpointing for large models, and where one example would not fit without
    it."""
    shape = draft.facts.shape
    if not isinstance(shape, Model):
        return None if draft.machine.is_cpu else Choice(True, "the model's size is not known here")
    if not draft.machine.is_cpu and shape.parameters >= CHECKPOINTED_PARAMETERS:
        return Choice(True, f"{shape.parameters / 1e9:.1f} billion parameters on accelerators")
    for stage in list_training(draft, section, "gradient_checkpointing"):
        single = estimate_sequence_bytes(draft, stage, shape, is_checkpointed=False)
        if single > find_activation_budget(draft, stage, shape):
            size = format_gb(single)
            return Choice(True, f"without it one example of {stage} takes {size} of activations")
    return None


def choose_micro_batch(draft: Draft, section: str) -> Choice | None:
    """Choose the examples that a process computes at once. It changes memory and time, and no
    result."""
    stages = list_training(draft, section, "per_device_train_batch_size")
    choices = [choose_stage_batch(draft, stage) for stage in stages]
    # The section `trainer` has one number for all stages, so the smallest of their choices counts.
    return min(choices, key=lambda choice: int(choice.value), default=None)


def choose_stage_batch(draft: Draft, section: str) -> Choice:
    """Choose the micro-batch of one stage."""
    stage = find_stage(draft, section)
    # Except for rollouts, a process has at most `STEP_EXAMPLES` in a step, so no more at once
    # either.
    limit = 128 if stage == "policy_update" else STEP_EXAMPLES
    unit = {"policy_update": "rollout", "sft": "demonstration"}.get(stage, "pair")
    shape = draft.facts.shape
    if not isinstance(shape, Model):
        return Choice(min(limit, 4), "the model's size is not known here")
    holder = draft.find_holder(section, "gradient_checkpointing")
    is_checkpointed = draft.get(holder, "gradient_checkpointing") is True
    single = estimate_sequence_bytes(draft, section, shape, is_checkpointed=is_checkpointed)
    budget = find_activation_budget(draft, section, shape)
    batch = 1
    while batch * 2 <= limit and batch * 2 * single <= budget:
        batch *= 2
    length = find_training_length(draft, section)
    examples = format_count(batch, unit)
    memory = f"{format_gb(batch * single)} of memory, of {format_gb(budget)} that are free for it"
    return Choice(batch, f"{examples} of {length:,} tokens at once: {memory}")


def choose_accumulation(draft: Draft, section: str) -> Choice | None:
    """Choose the micro-batches of an optimizer step, so that a process has `STEP_EXAMPLES` in it.
    If the user sets the micro-batch, nothing is chosen."""
    holder = draft.find_holder(section, "per_device_train_batch_size")
    if draft.is_set(holder, "per_device_train_batch_size"):
        return None
    batch = draft.get_count(holder, "per_device_train_batch_size") or 1
    number = max(1, STEP_EXAMPLES // batch)
    examples = format_count(number * batch * count_ranks(draft), "example")
    return Choice(number, f"an optimizer step takes {examples}")


def count_ranks(draft: Draft) -> int:
    """Return the processes that train together."""
    # Nothing is validated yet: a wrong number is refused later, by its setting's name.
    ranks = 1
    for name in ("processes", "nodes"):
        number = draft.values.get(name, 1)
        ranks *= number if isinstance(number, int) and number > 0 else 1
    return ranks


def find_training_length(draft: Draft, section: str) -> int:
    """Return the tokens of the longest sequence that a stage trains on."""
    length = draft.get_count(section, "max_length")
    if length:
        return length
    # Rollouts are as long as the engine's context at most.
    stated = draft.get_engine_args().get("max_model_len")
    return stated if isinstance(stated, int) else int(choose_context(draft).value)


def estimate_sequence_bytes(
    draft: Draft, section: str, shape: Model, *, is_checkpointed: bool
) -> float:
    """Estimate the bytes of activations of one example of a stage, without logits, which do not
    grow with the batch. A rendered plan estimates the same in `argo/memory_estimate.py:
    _estimate_step`."""
    # A pair is a chosen and a rejected completion: `TrainerOptions.sequences` of the stage's
    # options.
    sequences = 2 if find_stage(draft, section) in ("preference", "reward_model") else 1
    tokens = find_training_length(draft, section) * sequences
    dtype = str(draft.get(draft.find_holder(section, "dtype"), "dtype"))
    return tokens * count_activation_bytes(shape, is_checkpointed, dtype)


def find_activation_budget(draft: Draft, section: str, shape: Model) -> float:
    """Return the bytes that a stage's activations may take: half of what weights, gradients and
    optimizer leave of a device; of a machine without devices a quarter at most, since a server and
    the system are there, too."""
    machine = draft.machine
    # In float32: weights, gradients and AdamW's two moments; of adapters the weights alone count.
    # These are WEIGHT_BYTES and TRAINED_BYTES of `argo/training_memory.py`, which this layer cannot
    # import.
    states = shape.parameters * (4 if has_adapters(draft, section) else 16)
    if not machine.is_cpu:
        memory = machine.gpu_memory or UNKNOWN_GPU
        shard = states / count_ranks(draft)
        return max(memory / 16, (0.9 * memory - shard) / 2)
    if machine.memory is None:
        return UNKNOWN_BUDGET
    is_served = draft.find_engine().serves
    # A server holds weights in two bytes a number.
    server = SERVER_BYTES + shape.parameters * 2 if is_served else 0
    free = machine.memory - states - server - LOGITS * 8
    return max(machine.memory / 64, min(machine.memory / 4, 0.8 * free))


def format_gb(count: float) -> str:
    """Format bytes as ``4.7 GB``."""
    return f"{count / 1e9:.2g} GB" if count < 1e10 else f"{count / 1e9:,.0f} GB"


def choose_target(draft: Draft, section: str) -> Choice | None:
    return Choice(None, "no reward ends the loop early: 0.98 is the demo's goal")


def choose_prompts(draft: Draft, section: str) -> Choice | None:
    if not draft.machine.is_cpu:
        return None
    # A user who samples more prompts than a batch has chosen its size, too.
    size = draft.get_count(section, "oversampled_prompts")
    return None if size else Choice(8, "fewer than on a GPU")


def choose_limit(draft: Draft, section: str) -> Choice | None:
    return Choice(64, "prompts, fewer than on a GPU") if draft.machine.is_cpu else None


def count_model_bytes(facts: ModelFacts) -> int | None:
    """Return the bytes of a model's weights in the dtype that they were published in; None where
    its size is not known. `save_dtype` does not count here, as it does in
    `planning/checkpoint_size.py: choose_width`."""
    if not isinstance(facts.shape, Model):
        return None
    return facts.shape.parameters * (4 if facts.dtype == "float32" else 2)


def is_pruned(draft: Draft) -> bool:
    """Return whether a run keeps only some of its versions by default."""
    size = count_model_bytes(draft.facts)
    # A model whose size is not known may be a large one.
    return size is None or size > KEPT_BYTES


def choose_total_limit(draft: Draft, section: str) -> Choice | None:
    if not is_pruned(draft):
        return None
    return Choice(2, "a resume needs the newest two checkpoints with the trainer's state")


def choose_keep_every(draft: Draft, section: str) -> Choice | None:
    # A user who sets a limit has decided which checkpoints stay.
    if draft.is_set(section, "save_total_limit") or not is_pruned(draft):
        return None
    return Choice(10, "the model of iterations 10, 20, 30, … stays")
