"""The table of defaults that follow the base model and the machine.

`Pipeline.configure_for` applies it, and on KFP `config/explicit_values.py: configure_values`.

A rule that is added is an entry of `RULES`, its function in `config/choices.py`, and a line of the
table in docs/defaults.md. No test compares that table or the summaries;
`tests/unit/config/test_followed.py` tests the choices, and that `demo` has the defaults of some
stages (`config/followed.py: Rule`).
"""

from collections.abc import Mapping
from typing import Any, get_args

from tuneloop.config.choices import (
    TRAINERS,
    choose_accumulation,
    choose_chat,
    choose_checkpointing,
    choose_colocation,
    choose_context,
    choose_dtype,
    choose_engine_args,
    choose_epochs,
    choose_keep_every,
    choose_learning_rate,
    choose_limit,
    choose_max_length,
    choose_max_tokens,
    choose_micro_batch,
    choose_prompts,
    choose_target,
    choose_total_limit,
    choose_warmup,
)
from tuneloop.config.engines import ServingEngine
from tuneloop.config.followed import ENGINE_CONTEXT, Draft, Followed, Rule
from tuneloop.config.machine import Machine, describe_pods, has_pod_resources, read_machine
from tuneloop.config.model_facts import ModelFacts, read_model_facts
from tuneloop.core.json_types import JsonMapping


def follow_model(
    config: Any, values: JsonMapping, machine: Machine | None = None
) -> dict[str, Followed]:
    """Choose the settings that `values` leaves out, by the base model and by `machine`.

    Args:
        config: the class of the configuration.
        values: what the user has set; not validated yet.
        machine: what the run computes on; None: the pods that the section `cluster` describes.

    Returns:
        Setting → choice, in the order of the table.

    Raises:
        UserError: a file of the model cannot be read.
    """
    if "base_model" not in config.model_fields:
        return {}
    cluster = values.get("cluster")
    draft = Draft(
        config=config,
        values=values,
        facts=read_base_model(config, values),
        machine=machine or describe_pods(cluster if isinstance(cluster, Mapping) else {}),
    )
    # First, so that no rule is applied to a stage that is left out.
    _skip_tuning(draft)
    for rule in RULES:
        for followed in rule.apply(draft):
            draft.chosen[followed.setting] = followed
        if rule.setting == "args":
            _limit_context(draft)
    return draft.chosen


DEMO_SOURCE = "digits"
"""The value of `data.source` for the data that the demo trains on, which is its default."""


def list_unknowns(config: Any, values: JsonMapping) -> list[str]:
    """Return lines that say what of the base model is not known, so that settings cannot follow
    it."""
    if "base_model" not in config.model_fields:
        return []
    facts = read_base_model(config, values)
    if facts.is_demo:
        return []
    if facts.problem is not None:
        return [
            f"{facts.name}: its context, size and chat template are not known, and data.chat stays "
            f"as it is: it {facts.problem.remedy}"
        ]
    # Nothing is fetched from the hub for a plan, which has to work offline.
    if facts.directory is None:
        return [
            f"{facts.name} is not here: its context, size and chat template are not known, and "
            f"data.chat stays as it is; `hf download {facts.name} --include '*.json' '*.jinja'` "
            "brings what is read"
        ]
    return [facts.shape] if isinstance(facts.shape, str) else []


def list_doubts(config: Any, values: JsonMapping) -> list[str]:
    """Return lines about settings that work and are probably a mistake: a pretrained model on the
    sums of the demo, where no data is named."""
    if not {"base_model", "data"} <= set(config.model_fields):
        return []
    default = config.model_fields["data"].get_default(call_default_factory=True)
    # Another default is that of a pipeline which somebody made for data of his own.
    if getattr(default, "source", None) != DEMO_SOURCE:
        return []
    data = values.get("data", {})
    is_named = not isinstance(data, Mapping) or bool({"source", "mixture"} & data.keys())
    facts = read_base_model(config, values)
    if is_named or facts.is_demo:
        return []
    return [
        f"{facts.name} would be trained on sums of digits, the demo's data: name yours "
        "(data=FILE), or say data.source=digits"
    ]


def read_base_model(config: Any, values: JsonMapping) -> ModelFacts:
    """Read what is known of the base model that a configuration names.

    These are the parameters of the stage `base_model` that `read_model_facts` takes, found in a
    section called ``model``; `argo/memory_estimate.py: facts_of` reads the same ones from a plan.
    """
    # Nothing is validated yet: a wrong type is refused later, by its setting's name.
    name = values.get("base_model", config.model_fields["base_model"].get_default())
    section = values.get("model")
    options = section if isinstance(section, Mapping) else {}
    sizes: dict[str, int | None] = {}
    for option in ("vocab_size", "max_position_embeddings"):
        size = options.get(option)
        sizes[option] = size if isinstance(size, int) else None
    texts: dict[str, str | None] = {}
    for option in ("revision", "adapter_base"):
        text = options.get(option)
        texts[option] = None if text is None else str(text)
    return read_model_facts(
        str(name),
        texts["revision"],
        adapter_base=texts["adapter_base"],
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=sizes["max_position_embeddings"],
    )


def choose_machine(values: JsonMapping) -> Machine:
    """Return what a run of `values` is meant for, where a command does not say it: the pods that
    its section `cluster` describes, or this machine if that says nothing of them."""
    cluster = values.get("cluster")
    described = cluster if isinstance(cluster, Mapping) else {}
    return describe_pods(described) if has_pod_resources(described) else read_machine()


def _skip_tuning(draft: Draft) -> None:
    """Leave out the SFT of a pipeline whose section ``sft`` may be null, for any model but the
    demo's: it has been trained before. A user who sets anything of the section keeps it."""
    if draft.facts.is_demo or "sft" in draft.values or "sft" not in draft.config.model_fields:
        return
    is_optional = type(None) in get_args(draft.config.model_fields["sft"].annotation)
    if is_optional:
        reason = "the base model is trained already; any setting of sft brings it back"
        draft.chosen["sft"] = Followed("sft", None, reason)


def _limit_context(draft: Draft) -> None:
    """Add the context to arguments of a server (`engine.args`) that the user has set without one: a
    pretrained model's own context may need more cache than there is."""
    if draft.facts.is_demo or not draft.is_set("engine", "args"):
        return
    args = draft.get("engine", "args")
    engine = draft.find_class("engine")
    if engine is None or not issubclass(engine, ServingEngine) or not isinstance(args, Mapping):
        return
    context = choose_context(draft)
    # Engines have other names for it, or no such limit.
    chosen_args = engine.choose_args(context.value, captures_graphs=True)
    if "max_model_len" in chosen_args and "max_model_len" not in args:
        draft.chosen[ENGINE_CONTEXT] = Followed(ENGINE_CONTEXT, context.value, context.reason)


# The order counts: a rule reads what those before it chose. The context of the engine is added
# right after the rule for `args`, which comes after that for `max_tokens`; lengths and gradient
# checkpointing come before the micro-batch, and this before the accumulation.
RULES: tuple[Rule, ...] = (
    Rule(
        ("trainer", *TRAINERS, "reference_logprobs"),
        "dtype",
        ("float32",),
        choose_dtype,
        "`bfloat16` on accelerators, unless the weights are float32; `float32` on CPUs",
    ),
    Rule(
        ("data_prep",),
        "chat",
        (False,),
        choose_chat,
        "true where the model has a chat template: plain prompts become the user's message",
    ),
    Rule(
        ("rollout", "evaluate"),
        "max_tokens",
        (8,),
        choose_max_tokens,
        "512 on accelerators, 128 on CPUs, at most half the context; `evaluate` as `rollout`",
    ),
    Rule(
        ("rollout",),
        "prompts_per_iteration",
        (16,),
        choose_prompts,
        "8 on CPUs",
    ),
    Rule(("evaluate",), "limit", (256,), choose_limit, "64 on CPUs"),
    Rule(
        ("engine",),
        "args",
        (None,),
        choose_engine_args,
        "of vLLM: `max_model_len` 2048 (CPUs: 1024) or twice `max_tokens`, at most the model's "
        "context",
        for_demo=True,
    ),
    Rule(
        ("engine",),
        "colocate",
        (False,),
        choose_colocation,
        "true where this machine has one GPU for trainer and vLLM",
    ),
    Rule(
        ("sft", "preference"),
        "epochs",
        (None,),
        choose_epochs,
        "3 passes over the examples, unless `max_steps` is set",
    ),
    Rule(("sft",), "warmup_steps", (20,), choose_warmup, "5"),
    Rule(
        ("sft", "preference", "reward_model"),
        "max_length",
        (256,),
        choose_max_length,
        "2048 (CPUs: 1024), at most the model's context",
    ),
    Rule(
        TRAINERS,
        "learning_rate",
        # Those of sft, of preference and the reward model, and of policy_update.
        (1e-3, 1e-4, 5e-4),
        choose_learning_rate,
        "TRL's: sft 2e-5, preference 1e-6, policy_update 1e-6, reward_model 1e-4; with LoRA ten "
        "times that",
    ),
    Rule(
        ("trainer", *TRAINERS),
        "gradient_checkpointing",
        (False,),
        choose_checkpointing,
        "true on accelerators from a billion parameters on, and where one example would not fit "
        "without",
    ),
    Rule(
        ("trainer", *TRAINERS),
        "per_device_train_batch_size",
        # None is the trainer's; the numbers are those of stages that have their own.
        (None, 32, 128),
        choose_micro_batch,
        "the largest power of two whose activations fit in each stage, by the arithmetic of `plan`",
    ),
    Rule(
        ("sft", "preference", "reward_model"),
        "gradient_accumulation_steps",
        (1,),
        choose_accumulation,
        "as many as make a step of 8 examples in each process",
    ),
    Rule(
        ("loop",),
        "target_reward",
        (0.98,),
        choose_target,
        "none: the loop ends after its iterations",
    ),
    Rule(
        ("policy_update",),
        "save_total_limit",
        (None,),
        choose_total_limit,
        "2 where the model's weights take more than 50 MB",
    ),
    Rule(
        ("policy_update",),
        "keep_every",
        (None,),
        choose_keep_every,
        "10 where `save_total_limit` is 2 by the rule above",
    ),
)
