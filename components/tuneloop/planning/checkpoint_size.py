"""What a checkpoint takes in the store.

``model/`` has all weights, in the dtype of the setting `save_dtype`. ``trainer/`` has the trainer's
state of the parameters that are trained, in full precision.

`planning/plan.py` prints it, and `planning/disk.py` adds it up for a run. What is written, and in
which dtype, is decided by `training/checkpoint.py`: a file that it adds is not counted until it is
added here.
"""

from dataclasses import dataclass

from tuneloop.argo.memory_estimate import count_adapter_parameters
from tuneloop.argo.training_memory import STATE_BYTES
from tuneloop.config.model_facts import Model
from tuneloop.core.wording import format_count
from tuneloop.runs.summary import format_size
from tuneloop.workflow.plan import StagePlan


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint.

    Attributes:
        width: of a number in ``model/``.
        model: of ``model/``.
        state: of ``trainer/``; None: not known, as the number of adapters is not.
    """

    width: int
    model: float
    state: float | None


def estimate_checkpoint(stage: StagePlan, model: Model, base_dtype: str | None) -> CheckpointSize:
    """Estimate one checkpoint of a stage, with the trainer's state: callers count how often that is
    written (`state_every`).

    Args:
        stage: trains, or saves a model.
        model: the base model.
        base_dtype: that the base model is saved in; None: not known.
    """
    adapters = count_adapter_parameters(stage, model)
    state: float | None = None
    if adapters is not None:
        # Without adapters all parameters are trained.
        state = float((adapters or model.parameters) * STATE_BYTES)
    width = choose_width(stage, base_dtype)
    return CheckpointSize(
        width=width,
        model=float(model.parameters * width),
        state=state,
    )


def choose_width(stage: StagePlan, base_dtype: str | None) -> int:
    """Return the bytes of a number in ``model/``: those of `save_dtype`, by default of the base
    model's dtype.
    """
    dtype = stage.parameters.get("save_dtype", "auto")
    if dtype == "auto":
        # Of a model whose dtype is not known: most are published in bfloat16.
        dtype = base_dtype or "bfloat16"
    return 4 if dtype == "float32" else 2


def describe_checkpoint(stage: StagePlan, model: Model | str, base_dtype: str | None) -> str:
    """Describe what a checkpoint takes in the store, with the arithmetic.

    Args:
        stage: writes it.
        model: the base model, or why its shape is unknown.
        base_dtype: that the base model is saved in; None: not known.
    """
    if not isinstance(model, Model):
        return "not estimated"
    size = estimate_checkpoint(stage, model, base_dtype)
    served = format_size(size.model)
    text = f"model {served} ({model.parameters:,} parameters × {size.width} bytes)"
    if size.state is None:
        return f"{text}; trainer's state not estimated"
    trained = size.state / STATE_BYTES
    state = format_size(size.state)
    text += f" + trainer's state {state} ({trained:,.0f} parameters × {STATE_BYTES} bytes)"
    every = int(stage.number("state_every") or 1)
    if every == 1:
        total = format_size(size.model + size.state)
        return f"{total} = {text}"
    # Iterations between two states write only a model. After a restart their updates are replayed.
    mean = format_size(size.model + size.state / every)
    return (
        f"{text}, the state once in {every} iterations: {mean} an iteration in the mean; "
        f"a resume repeats at most {format_count(every - 1, 'update')}"
    )
