"""TRL's trainers, by the modules behind its command line.

``trl sft`` starts ranks by accelerate, which ignores torchrun's ``PET_*`` variables: in a TrainJob
every pod would train alone and say nothing (kubeflow/trainer#3930). Here torchrun runs the script,
by `tuneloop.training.rank`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core.component import TORCHRUN
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.scoring import score_all
from tuneloop.rewards.stage_scoring import DEFAULT_MEMORY_MB
from tuneloop.training.backends import LLMBackend, build_flags, register_backend

PATHS = ("model_name_or_path", "dataset_name", "output_dir")
"""Options that every script requires, in the order model, data, output, on which `build_for_stage`
relies.
"""
TRAINERS: Mapping[str, tuple[str, ...]] = {
    "sft": (),
    "dpo": (),
    "kto": (),
    "grpo": ("reward_funcs",),
}
"""Trainer → the options that it requires in addition to `PATHS`. A trainer is a module of
``trl.scripts``.
"""
MESSAGE_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""TRL's reward functions that read messages: on plain prompts they fail with "string indices must
be integers".
"""
REWARDS = (*MESSAGE_REWARDS, "get_soft_overlong_punishment")
"""TRL's reward functions."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "accuracy_reward": ("solution",),
    "reasoning_accuracy_reward": ("solution",),
    "tuneloop.training.backends.trl.score": ("answer", "reward", "metadata"),
}
"""Reward function → the columns that it reads."""
LOSSES: Mapping[str | None, tuple[str, str | None]] = {
    None: ("sft", None),
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "kto": ("kto", "kto"),
}
"""Algorithm of the stage `preference` (None: `sft`) → TRL's trainer and its loss.

A preference algorithm that is not here is refused with this backend. The algorithm's own options go
to TRL under their names (``algorithm_args``), so they have to be TRL's.
"""
SHARED_OPTIONS = (
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "max_length",
    "gradient_checkpointing",
    "torch_compile",
    "use_liger_kernel",
    "attn_implementation",
    "seed",
)
"""Parameters of tuneloop's stages that TRL has under the same names.

A parameter of `training/options.py: TrainerOptions` that is neither here, nor in `UNSUPPORTED`, nor
translated in `build_for_stage`, is ignored without a word. Translated are `dtype`, `device` and
`expected_world_size`. `save_dtype` is the stage's own, which writes the checkpoint.
"""
FIXED_OPTIONS: JsonMapping = {
    # Of the parameters, as in tuneloop's own trainer; ``bf16`` says how TRL computes.
    "dtype": "float32",
    # `delegation.train_by_backend` reads the loss of every step from ``trainer_state.json``.
    "logging_steps": 1,
    "save_only_model": True,
}
"""Options of TRL that a stage does not let the user choose."""
DEFAULTS: JsonMapping = {"report_to": "none"}
"""Options of TRL that have another default here; ``backend_args`` may set them."""
UNSUPPORTED: JsonMapping = {"packing": "auto", "lora": None, "cpu_offload": False, "save_steps": 0}
"""Parameters that TRL does not support → the value that means they are not used."""
UNCHANGEABLE = ("save_strategy", "logging_strategy", "use_peft")
"""Options of TRL that a user may not set in ``backend_args``: `delegation.train_by_backend` would
no longer find the model and the losses.
"""


@register_backend("trl")
@dataclass(frozen=True, kw_only=True)
class Trl(LLMBackend):
    """A TRL script under torchrun.

    `args` are those of the script, ModelConfig and the trainer's config, under their own names.
    ``dataset_name`` may be a directory of Parquet files. ``reward_funcs`` are names of TRL's
    functions, or dotted paths; the function for rows of `data_prep` is
    ``tuneloop.training.backends.trl.score``.

    Attributes:
        trainer: ``sft``, ``dpo``, ``kto`` or ``grpo``.
    """

    trainer: str = "sft"

    @classmethod
    def build_for_stage(
        cls,
        options: JsonMapping,
        *,
        model: str | None = None,
        data: str | None = None,
        out: str | None = None,
    ) -> "Trl":
        """Build the trainer for a stage's parameters; see `LLMBackend`."""
        for name, unused_value in UNSUPPORTED.items():
            value = options.get(name, unused_value)
            if value != unused_value:
                remedy = f"does not support {name}, which is {value!r}: leave it out, or use native"
                raise UserError("", "trl", remedy)
        algorithm = options.get("algorithm")
        if algorithm not in LOSSES:
            remedy = f"has no algorithm {algorithm}: choose dpo, ipo or kto, or use native"
            raise UserError("", "trl", remedy)
        trainer, loss = LOSSES[algorithm]
        args: JsonObject = {name: options.get(name) for name in SHARED_OPTIONS}
        args.update(options.get("algorithm_args", {}))
        args.update(FIXED_OPTIONS)
        for name, path in zip(PATHS, (model, data, out)):
            if path is not None:
                args[name] = path
        args["bf16"] = options.get("dtype") == "bfloat16"
        args["use_cpu"] = options.get("device") == "cpu"
        args["loss_type"] = loss
        # The checkpoint of the last step is the one that the stage reads.
        args["save_steps"] = args["max_steps"]
        # tuneloop's constant schedule has a warm-up.
        if args["lr_scheduler_type"] == "constant":
            args["lr_scheduler_type"] = "constant_with_warmup"
        # TRL's KTO counts completions in a batch, two in a pair.
        if trainer == "kto" and args["per_device_train_batch_size"]:
            args["per_device_train_batch_size"] *= 2
        if data is not None and _has_conversations(Path(data)):
            args["assistant_only_loss"] = True
        backend_args = options.get("backend_args") or {}
        stage_args = set(args).union(PATHS, UNCHANGEABLE)
        repeated = sorted(stage_args & backend_args.keys())
        if repeated:
            remedy = f"gets {repeated[0]} from the stage: leave it out of backend_args"
            raise UserError("", "trl", remedy)
        args.update(DEFAULTS)
        args.update(backend_args)
        return cls(trainer=trainer, processes=options.get("expected_world_size") or 1, args=args)

    def framework(self) -> str:
        """Return the framework of Kubeflow Trainer's runtime for TRL."""
        return "trl"

    def to_command(self) -> list[str]:
        """Return torchrun with TRL's script."""
        return [*TORCHRUN, "-m", "tuneloop.training.rank", f"trl.scripts.{self.trainer}"]

    def to_args(self) -> list[str]:
        """Return the script's flags."""
        return build_flags(self.args)

    def validate(self) -> None:
        """Check the script, its options, and that it can read the files that lie here."""
        if self.trainer not in TRAINERS:
            remedy = f"is not one of TRL's scripts known here: {', '.join(TRAINERS)}"
            raise UserError("trainer", self.trainer, remedy)
        self.require(*PATHS, *TRAINERS[self.trainer])
        rewards = self.args.get("reward_funcs") or []
        if isinstance(rewards, str):
            rewards = [rewards]
        for name in rewards:
            is_dotted_path = "." in name and ":" not in name
            if name not in REWARDS and not is_dotted_path:
                remedy = (
                    f"is neither one of {', '.join(REWARDS)} nor a dotted path: "
                    "package.module.function"
                )
                raise UserError("args.reward_funcs", name, remedy)
        # On another machine the directory may be missing here. Of several files TRL reads those
        # that are called train.
        directory = Path(self.args["dataset_name"])
        paths = sorted(directory.glob("train*.parquet")) or sorted(directory.glob("*.parquet"))
        for path in paths:
            _check_rows(path, rewards)


def score(
    completions: Sequence[str | Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    reward: Sequence[str],
    metadata: Sequence[str],
    **_: Any,
) -> list[float | None]:
    """Score rows of ``train.parquet`` for TRL's GRPO, by the rewards that the stage `reward` has.

    The settings of that stage do not reach this function: a call of a reward may take five seconds,
    and as much memory as there by default.

    Args:
        completions: texts, or in a chat lists of messages.
        answer: the column of this name of each completion's row, as the next two.
        reward: which rewards score it (`parse_spec`).
        metadata: JSON.

    Returns:
        One score a completion; None where there is none, which TRL leaves out of baselines and
        loss.
    """
    rows: list[JsonObject] = []
    for completion, row_answer, spec, row_metadata in zip(
        completions, answer, reward, metadata, strict=True
    ):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        rows.append(
            {
                "completion": text,
                "answer": row_answer,
                "reward_spec": spec,
                "metadata": row_metadata,
            }
        )
    outcomes = score_all(rows, timeout_s=5.0, memory=DEFAULT_MEMORY_MB << 20)
    return [outcome.score for outcome in outcomes]


def _has_conversations(directory: Path) -> bool:
    """Tell whether rows of a directory are whole conversations, and not prompts with answers."""
    return any("messages" in pq.read_schema(path).names for path in directory.glob("*.parquet"))


def _check_rows(path: Path, rewards: Sequence[str]) -> None:
    """Check that TRL reads the rows of a file correctly, and that its reward functions find the
    columns they need. Raises UserError.
    """
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    is_plain = "prompt" in schema.names and pa.types.is_string(schema.field("prompt").type)
    if is_plain and "chat" in schema.names and pa.types.is_boolean(schema.field("chat").type):
        for batch in file.iter_batches(columns=["chat"]):
            if pc.any(batch["chat"]).as_py():
                remedy = (
                    "holds chats as JSON, which TRL reads as plain text; "
                    "fetch it by `tuneloop.training.fetch --messages`"
                )
                raise UserError("args.dataset_name", str(path), remedy)
    for name in rewards:
        if is_plain and name in MESSAGE_REWARDS:
            remedy = f"reads messages, and prompts in {path} are plain text"
            raise UserError("args.reward_funcs", name, remedy)
        for column in COLUMNS.get(name, ()):
            if column not in schema.names:
                remedy = f"reads the column {column}, which {path} does not have"
                raise UserError("args.reward_funcs", name, remedy)
