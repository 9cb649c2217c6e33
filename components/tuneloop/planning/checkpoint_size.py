"""What a checkpoint takes in the store: ``model/`` in the dtype in which it is saved, and ``trainer/``, the trainer's
state of what is trained."""

from tuneloop.argo.memory_estimate import count_adapter_parameters
from tuneloop.argo.training_memory import STATE_BYTES
from tuneloop.config.model_facts import Model
from tuneloop.runs.summary import format_size
from tuneloop.workflow.plan import StagePlan


def choose_width(stage: StagePlan, base_dtype: str | None) -> int:
    """Return the bytes a number of ``model/``: of `save_dtype`, by default the dtype that the base model has."""
    dtype = stage.parameters.get("save_dtype", "auto")
    if dtype == "auto":
        dtype = base_dtype or "bfloat16"
    return 4 if dtype == "float32" else 2


def count_served_bytes(stage: StagePlan, model: Model, base_dtype: str | None) -> float:
    """Return the bytes of a stage's ``model/``."""
    return float(model.parameters * choose_width(stage, base_dtype))


def count_state_bytes(stage: StagePlan, model: Model) -> float | None:
    """Return the bytes of a stage's trainer's state; None where the number of its adapters is not known."""
    adapters = count_adapter_parameters(stage, model)
    if adapters is None:
        return None
    return float((adapters or model.parameters) * STATE_BYTES)


def describe_checkpoint(stage: StagePlan, model: Model | str, base_dtype: str | None) -> str:
    """Describe what a checkpoint takes in the store, with the arithmetic.

    Args:
        stage: writes it.
        model: the base model, or why its shape is unknown.
        base_dtype: that the base model is saved in; None: not known.
    """
    if not isinstance(model, Model):
        return "not estimated"
    served = count_served_bytes(stage, model, base_dtype)
    width = choose_width(stage, base_dtype)
    text = f"model/ {model.parameters:,} × {width} = {format_size(served)}"
    state = count_state_bytes(stage, model)
    if state is None:
        return f"{text}, trainer/ not estimated"
    trained = state / STATE_BYTES
    text += f", trainer/ {trained:,.0f} × {STATE_BYTES} = {format_size(state)}"
    every = int(stage.number("state_every") or 1)
    if every == 1:
        return f"{text}, with both {format_size(served + state)}"
    mean = format_size(served + state / every)
    return f"{text} each {every} iterations: {mean} an iteration; a new process replays at most {every - 1} updates"
