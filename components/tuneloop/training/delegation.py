"""Training by another backend in place of tuneloop's own trainer, with the same artifacts as input
and output.

The backend is given the directories ``model``, ``data`` (Parquet files) and ``out``, in this order.
In the last it writes ``checkpoint-<max_steps>``: a Hugging Face model, and the
``trainer_state.json`` of transformers' Trainer.

`config/pipeline.py: PipelineConfig` and `workflow/loop.py: StageSpec` find a stage with another
backend by the name of its parameter, `backend`. Tests: `tests/local/test_trl.py`, and
`tests/unit/training/test_backends.py`.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Params, Stage
from tuneloop.core.errors import (
    EXIT_RETRY,
    TERMINATION_LOG,
    UNAVAILABLE,
    Retryable,
    Unavailable,
    UserError,
)
from tuneloop.training.algorithm_lookup import list_stage_parameters
from tuneloop.training.backends import load_backend, run_here
from tuneloop.training.checkpoint import model_dir
from tuneloop.training.fetch import fetch_artifact
from tuneloop.training.options import TrainerOptions

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer


def _check_backend(name: str | None, info: ValidationInfo) -> str | None:
    """Refuse a backend that cannot train with the options before it; return None for native.

    pydantic validates fields in their order: options after `backend`, as those that a subclass
    adds, are not seen here. A dotted path is not checked, as only the stage's image need have its
    code.
    """
    if name in (None, "native"):
        if info.data.get("backend_args"):
            raise ValueError("has no backend_args: its options are the stage's own")
        return None
    if ":" not in name:
        parameters = dict(info.data)
        algorithm = parameters.get("algorithm")
        # The fields of a configuration's section are checked here, too.
        if isinstance(algorithm, BaseModel):
            parameters |= list_stage_parameters(algorithm)
        try:
            backend = load_backend(name)
        except UserError as error:
            # It names the family of backends; the setting is added to the message of a ValueError.
            raise ValueError(error.remedy) from error
        backend.build_for_stage(parameters)
    return name


WARMUP_TEXT = "optimizer steps in which the learning rate rises; with epochs a tenth of all at most"
"""What the setting `warmup_steps` is, of stages that train in epochs."""
WARMUP_PARTS = 10
"""Of so many equal parts of a run in epochs, the warm-up takes at most one. `WARMUP_TEXT` and
`config/choices.py: choose_warmup` say "a tenth".
"""


class BackendOptions(TrainerOptions):
    """Options of a stage that trains on fixed examples, in epochs, perhaps with another backend."""

    epochs: float | None = Field(
        None,
        gt=0,
        description="passes over the examples, in place of max_steps",
    )

    backend_args: dict[str, Any] | None = Field(
        None,
        description="options of another backend, under its own names",
    )
    backend: Annotated[str | None, AfterValidator(_check_backend)] = Field(
        None,
        description="the trainer: native (the default), trl, or pkg.mod:attr",
        validate_default=True,
    )

    @property
    def is_delegated(self) -> bool:
        """Whether another backend trains."""
        return bool(self.backend)

    @property
    def required_world_size(self) -> int | None:
        """The number of processes that must train; a backend starts its own from a single one."""
        return 1 if self.backend else self.expected_world_size

    def resolve_steps(self, examples: int, world_size: int) -> Self:
        """Return the options with the `max_steps` that `epochs` asks for, if it is set, and a
        warm-up that leaves most of them: a short file would end before the learning rate is
        reached.

        Args:
            examples: how many there are; a part of an epoch is rounded up to whole steps.
            world_size: the processes that train, each with a micro-batch of its own.
        """
        if self.epochs is None:
            return self
        batch = self.per_device_train_batch_size * self.gradient_accumulation_steps * world_size
        steps = max(1, math.ceil(self.epochs * examples / batch))
        warmup_steps = min(self.warmup_steps, steps // WARMUP_PARTS)
        return self.model_copy(update={"max_steps": steps, "warmup_steps": warmup_steps})


CONVERSATION_CHOICES = {"history": "as-rendered", "reasoning": "keep"}
"""Parameter of `data_prep` that decides how conversations are learned → its default, which
`stages/data_prep.py: DataOptions` has. `planning/limits.py: check_conversations` refuses other
values before a run, `check_conversation_choices` in the stage.
"""


def explain_undelegated(name: str, default: str) -> str:
    """Say that a choice of `CONVERSATION_CHOICES` does not reach another backend, with a remedy."""
    return (
        f"does not reach another backend, which renders conversations itself: leave data.{name} at "
        f"{default}, or leave sft.backend out"
    )


def check_conversation_choices(prompts: Artifact) -> None:
    """Check that demonstrations ask for nothing that only tuneloop's own rows can do. Raises
    UserError."""
    for name, default in CONVERSATION_CHOICES.items():
        value = prompts.manifest.facts.get(name, default)
        if value != default:
            raise UserError(f"data.{name}", value, explain_undelegated(name, default))


def _explain_end(name: str, code: int, last_line: str) -> UserError | Retryable:
    """Return what to raise for a backend that ended with `code`; one of ours leaves the reason as
    its last line.
    """
    kind, _, reason = last_line.partition(": ")
    if code == EXIT_RETRY and kind == UNAVAILABLE:
        return Unavailable(f"{name}: {reason}")
    outcome = f"ended with exit code {code}; its log says why"
    if 0 < code < EXIT_RETRY:
        return UserError("backend", name, outcome)
    return Retryable(f"{name} {outcome}")


def train_by_backend(
    stage: Stage[Params],
    trainer: "Trainer",
    policy: Artifact,
    prompts: Artifact,
    max_steps: int,
) -> float:
    """Train the model of `trainer` for `max_steps` with the stage's backend, on the split that has
    the stage's name (`sft`, `preference`).

    Returns the last loss. Raises UserError if the backend refuses or fails, Retryable if it was
    stopped: a retry begins from the start.
    """
    import torch

    from tuneloop.training.fsdp.attention import VARLEN
    from tuneloop.training.fsdp.loading import open_model

    attention = trainer.layout.attention
    options = stage.params.model_dump()
    # `varlen` is registered in our processes alone.
    options["attn_implementation"] = "sdpa" if attention == VARLEN else attention
    options["device"] = trainer.ranks.device.type
    options["max_steps"] = max_steps
    name = options["backend"]
    with tempfile.TemporaryDirectory() as work, stage.timed("train"):
        data = Path(work, "data")
        out = Path(work, "out")
        # Other trainers read chats as lists of messages.
        fetch_artifact(f"{prompts.ref}#{stage.name}.parquet", data, messages=True)
        backend = load_backend(name).build_for_stage(
            options,
            model=str(model_dir(policy)),
            data=str(data),
            out=str(out),
        )
        last_line = Path(work, "last-line")
        last_line.touch()
        code = run_here(backend, {TERMINATION_LOG: str(last_line)})
        if code:
            # A signal to this process has ended the backend, too, and is the reason then.
            stage.check_stop()
            raise _explain_end(name, code, last_line.read_text())
        directory = out / f"checkpoint-{max_steps}"
        # The checkpoint is written by our trainer, as after its own steps.
        trainer.model.load_state_dict(open_model(directory, torch.float32, "auto").state_dict())
        # transformers' Trainer logs the loss of each step there.
        rows = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    steps = [row for row in rows if "loss" in row]
    for row in steps:
        stage.metric(row.pop("step"), **row)
    trainer.step = max_steps
    stage.notes["world_size"] = backend.processes
    return float(steps[-1]["loss"])
