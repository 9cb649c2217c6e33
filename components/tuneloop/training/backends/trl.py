"""TRL's trainers, by the modules behind its command line.

``trl sft`` starts ranks by accelerate, which ignores torchrun's ``PET_*`` variables: in a TrainJob every pod would
train alone and say nothing (kubeflow/trainer#3930). Here torchrun runs the script, by `tuneloop.training.rank`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core.component import TORCHRUN
from tuneloop.core.errors import UserError
from tuneloop.rewards.scoring import score_all
from tuneloop.training.backends import LLMBackend, build_flags, register_backend

TRAINERS = {"sft": (), "dpo": (), "kto": (), "grpo": ("reward_funcs",)}
"""Trainer → the options that it requires in addition to those that all require."""
MESSAGES = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""TRL's reward functions that read messages: on plain prompts they fail with "string indices must be integers"."""
OTHERS = ("get_soft_overlong_punishment",)
COLUMNS = {
    "accuracy_reward": ("solution",),
    "reasoning_accuracy_reward": ("solution",),
    "tuneloop.training.backends.trl.score": ("answer", "reward", "metadata"),
}
"""Reward function → the columns that it reads."""
LOSSES = {
    None: ("sft", None),
    "dpo": ("dpo", "sigmoid"),
    "ipo": ("dpo", "ipo"),
    "kto": ("kto", "kto"),
}
"""Algorithm of the stage `preference` (None: `sft`) → TRL's trainer and its loss."""
SAME = (
    *(
        "max_steps",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "warmup_steps",
    ),
    *(
        "lr_scheduler_type",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "max_grad_norm",
        "max_length",
    ),
    *("gradient_checkpointing", "torch_compile", "use_liger_kernel", "attn_implementation", "seed"),
)
"""Parameters of tuneloop's stages → their names in TRL."""
PLACES = ("model_name_or_path", "dataset_name", "output_dir")
STEADY = {"dtype": "float32", "logging_steps": 1, "save_only_model": True, "report_to": "none"}
LACKS = {"packing": "auto", "lora": None, "cpu_offload": False, "save_steps": 0}
"""Parameters that TRL does not support → the value that means they are not used."""


@register_backend("trl")
@dataclass(frozen=True, kw_only=True)
class Trl(LLMBackend):
    """A TRL script under torchrun; `trainer` is ``sft``, ``dpo``, ``kto`` or ``grpo``.

    `args` are those of the script, ModelConfig and the trainer's config, under their own names. ``dataset_name`` may be
    a directory of Parquet files. ``reward_funcs`` are names of TRL's functions, or dotted paths; the function for rows
    of `data_prep` is ``tuneloop.training.backends.trl.score``."""

    trainer: str = "sft"

    @classmethod
    def build_for_stage(cls, options: Mapping[str, Any], **places: str) -> "Trl":
        for name, absent in LACKS.items():
            if (value := options.get(name, absent)) != absent:
                raise UserError(
                    "",
                    "trl",
                    f"does not support {name}, which is {value!r}: leave it out, or use native",
                )
        if (algorithm := options.get("algorithm")) not in LOSSES:
            raise UserError(
                "", "trl", f"has no algorithm {algorithm}: choose dpo, ipo or kto, or use native"
            )
        trainer, loss = LOSSES[algorithm]
        args = {
            **{name: options.get(name) for name in SAME},
            **options.get("algorithm_args", {}),
            **STEADY,
        }
        args |= zip(PLACES, places.values())
        args |= {
            "bf16": options.get("dtype") == "bfloat16",
            "use_cpu": options.get("device") == "cpu",
        }
        args |= {"loss_type": loss, "save_steps": args["max_steps"]}
        if args["lr_scheduler_type"] == "constant":  # tuneloop's constant schedule has a warm-up
            args["lr_scheduler_type"] = "constant_with_warmup"
        if (
            trainer == "kto" and args["per_device_train_batch_size"]
        ):  # TRL counts completions here, two in a pair
            args["per_device_train_batch_size"] *= 2
        files = Path(places["data"]).glob("*.parquet") if places else ()
        if any("messages" in pq.read_schema(path).names for path in files):  # whole conversations
            args["assistant_only_loss"] = True
        more = options.get("backend_args") or {}
        own = {*args, *PLACES, "save_strategy", "logging_strategy", "use_peft"} - {"report_to"}
        if taken := sorted(own & {*more}):
            raise UserError(
                "", "trl", f"gets {taken[0]} from the stage: leave it out of backend_args"
            )
        args |= more
        return cls(trainer=trainer, processes=options.get("expected_world_size") or 1, args=args)

    def framework(self) -> str:
        return "trl"

    def to_command(self) -> list[str]:
        return [*TORCHRUN, "-m", "tuneloop.training.rank", f"trl.scripts.{self.trainer}"]

    def to_args(self) -> list[str]:
        return build_flags(self.args)

    def validate(self) -> None:
        if self.trainer not in TRAINERS:
            raise UserError(
                "trainer",
                self.trainer,
                f"is not one of TRL's scripts known here: {', '.join(TRAINERS)}",
            )
        self.require("model_name_or_path", "dataset_name", "output_dir", *TRAINERS[self.trainer])
        given = self.args.get("reward_funcs") or []
        functions: list[str] = [given] if isinstance(given, str) else list(given)
        for name in functions:
            if name not in MESSAGES + OTHERS and ("." not in name or ":" in name):
                remedy = f"is neither one of {', '.join(MESSAGES + OTHERS)} nor a dotted path: package.module.function"
                raise UserError("args.reward_funcs", name, remedy)
        here = Path(
            self.args["dataset_name"]
        )  # where it lies on this machine; of several files TRL reads "train"
        for path in sorted(here.glob("train*.parquet")) or sorted(here.glob("*.parquet")):
            _check(path, functions)


def score(
    completions: Sequence[Any],
    answer: Sequence[str],
    reward: Sequence[str],
    metadata: Sequence[str],
    **_: Any,
) -> list[float | None]:
    """Score rows of ``train.parquet`` for TRL's GRPO, as the stage `reward` does; None where there is no score, which
    TRL leaves out of baselines and loss. A completion is text, or in a chat a list of messages."""
    said = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    columns = zip(said, answer, reward, metadata, strict=True)
    names = ("completion", "answer", "reward_spec", "metadata")
    return [
        outcome.score
        for outcome in score_all([dict(zip(names, row)) for row in columns], timeout_s=5.0)
    ]


def _check(path: Path, functions: Sequence[str]) -> None:
    """Check that TRL reads the rows of a file correctly, and that its reward functions find the columns they need."""
    table = pq.ParquetFile(path)
    schema = table.schema_arrow
    plain = "prompt" in schema.names and pa.types.is_string(schema.field("prompt").type)
    marked = plain and "chat" in schema.names and pa.types.is_boolean(schema.field("chat").type)
    chats = table.iter_batches(columns=["chat"]) if marked else ()
    if any(pc.any(batch["chat"]).as_py() for batch in chats):
        remedy = "holds chats as JSON, which TRL reads as plain text; fetch it by `tuneloop.training.fetch --messages`"
        raise UserError("args.dataset_name", str(path), remedy)
    for name in functions:
        if plain and name in MESSAGES:
            raise UserError(
                "args.reward_funcs", name, f"reads messages, and prompts in {path} are plain text"
            )
        for column in COLUMNS.get(name, ()):
            if column not in schema.names:
                raise UserError(
                    "args.reward_funcs",
                    name,
                    f"reads the column {column}, which {path} does not have",
                )
