"""The activations that `plan` counts, beside the tensors that torch saves for the backward pass."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from tuneloop.config.model_facts import Model, count_layer_bytes, shape_of

TOKENS = 80
"""Such that no activation has as many numbers as a weight, whose copies are left out."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def count_saved_bytes(config: LlamaConfig | Qwen3Config, dtype: str) -> int:
    """Count the bytes of the tensors, parameters and their copies left out, that a pass saves."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {parameter.numel() for parameter in model.parameters() if parameter.ndim == 2}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.numel() not in matrices:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    low = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), low:
        model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_a_layer_keeps_what_is_counted(kind, dtype):
    """Two layers more, so that what is not a layer's falls out. Llama has no norms of queries."""
    few = count_saved_bytes(kind(**SHAPE, num_hidden_layers=1), dtype)
    many = count_saved_bytes(kind(**SHAPE, num_hidden_layers=3), dtype)
    config = kind(**SHAPE, num_hidden_layers=3).to_dict()
    model = shape_of("m", config, None)
    assert isinstance(model, Model)
    ratio = count_layer_bytes(model, dtype) / ((many - few) / 2 / TOKENS)
    assert 0.9 < ratio < (1.15 if kind is Qwen3Config else 1.5)
