"""What a model's class in transformers can compute, known from the model's configuration alone.

What these functions say decides which attention trains and samples: an answer that changes is
another way to compute, with other bits. `training/fsdp/attention.py`, `training/fsdp/policy.py` and
`inference/engines/transformers.py` ask them; `get_context` is also asked by `stages/base_model.py`,
`inference/chat.py` and `extensions/gateway/session.py`. Tests: `tests/unit/training/test_architectures.py`,
`tests/local/test_architectures.py`.
"""

from pathlib import Path
from typing import Any

FLASH = "flash_attention_2"
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers that transformers keeps from looking into another document of a packed row. Any
other kind of a model's ``layer_types`` counts as recurrent, and its rows are not packed. The
kernels for packed rows lack some of these (`training/fsdp/attention.py: LAYERS`)."""

UNBOUNDED = 1 << 30
"""The context of a model whose configuration names none, in tokens."""


def get_context(config: Any) -> int:
    """Get the context of a model, in tokens, from its configuration of transformers; `UNBOUNDED` if
    it names none.
    """
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(context or UNBOUNDED)


def find_model_class(directory: Path) -> Any:
    """Find transformers' class of a causal language model; None for one that it does not have."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ImportError, KeyError, OSError, ValueError):
        # Whoever loads the model says what is wrong with it.
        return None


def choose_dense_attention(model_class: Any) -> str:
    """Return transformers' name of the attention that a class has on every device: sdpa, or eager
    for the few without.

    gpt-oss is one of these: its attention has sinks."""
    return "sdpa" if supports_attention(model_class, "sdpa") else "eager"


def supports_attention(model_class: Any, name: str) -> bool:
    """Return whether a class of transformers has an attention.

    It is assumed of a class that is not known, and of kernels by other names."""
    if model_class is None:
        return True
    if name == "sdpa":
        return bool(model_class._supports_sdpa)
    if name == FLASH:
        # Newer versions list the kernels that a model with sinks, for one, can do with.
        kernels = getattr(model_class, "_compatible_flash_implementations", None)
        return bool(model_class._supports_flash_attn) and (kernels is None or name in kernels)
    return True


def find_recurrent_layers(directory: Path) -> list[str]:
    """Find the kinds of layers with a state that goes from token to token: linear attention,
    convolutions.

    In a packed row such a state would go on from one document into the next."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    # Older configurations, as Mamba's, name no kinds of layers.
    if not kinds and getattr(find_model_class(directory), "_is_stateful", False):
        kinds = {"recurrent"}
    return sorted(kinds)
