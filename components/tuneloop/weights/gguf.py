"""Write a model directory as one GGUF file, as llama.cpp's own conversion would write it.

No package has that conversion. What it does is taken from ``convert_hf_to_gguf.py`` of llama.cpp
(https://github.com/ggml-org/llama.cpp) for the architectures of ``gguf.toml``.

`stages/export.py` writes one where its parameter `gguf` asks for it. An architecture that is added
is an entry in ``gguf.toml`` of ``architectures`` and of ``rope``, and a branch of `_add_tensors`
where llama.cpp orders rows in another way, as of llama. It is compared by hand with what
llama.cpp's own conversion writes (``docs/commands.md`` says how); `tests/unit/weights/test_gguf.py`
only reads files back, with transformers and gguf.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.weights.layout import Checkpoint

_RULES = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text())

# Values of gguf.TokenType.
_NORMAL_TOKEN = 1
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4
_UNUSED_TOKEN = 5


def write_gguf(model: Path, target: Path, description: str) -> None:
    """Write the model directory `model` as the file `target`, with `description` in its metadata.

    Raises:
        UserError: gguf is not installed, or llama.cpp may compute something else of this model.
    """
    try:
        import gguf
    except ImportError as error:
        remedy = "is not installed; pip install 'tuneloop[gguf]'"
        raise UserError("gguf", error.name, remedy) from None

    checkpoint = Checkpoint(model)
    tokenizer_file = model / "tokenizer.json"
    tokenizer = json.loads(tokenizer_file.read_text()) if tokenizer_file.is_file() else None
    settings = _read_settings(model)
    settings["description"] = description
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values()}
    settings["dtype"] = " ".join(sorted(dtypes))
    settings |= _describe_tokenizer(tokenizer)
    for name, supported in _RULES["supported"].items():
        # config.json may leave a setting out. transformers then takes its default, which gguf.toml
        # lists first.
        value = settings.get(name, supported[0])
        if value not in supported:
            choices = ", ".join(map(str, supported))
            remedy = f"is not supported; {choices} is"
            raise UserError(f"gguf: {name}", value, remedy)
    settings |= _list_tokens(tokenizer, settings["vocab_size"])

    writer = gguf.GGUFWriter(target, settings["model_type"])
    for field, setting in _RULES["fields"].items():
        add_field = getattr(writer, f"add_{field}")
        add_field(settings[setting])
    special_tokens = gguf.SpecialVocab(model, load_merges=True)
    # Without this field llama.cpp adds a BOS token with some pre-tokenizers.
    special_tokens.add_special_token.setdefault("bos", False)
    special_tokens.add_to_gguf(writer, quiet=True)
    if settings["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _compute_rope_factors(settings))
    _add_tensors(writer, checkpoint, settings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_settings(model: Path) -> JsonObject:
    """Read ``config.json``, with the parameters of RoPE beside the other settings."""
    settings = json.loads((model / "config.json").read_text())
    head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    settings.setdefault("head_dim", head_dim)
    settings |= settings["rope_parameters"]
    settings["rope"] = f"{settings['model_type']} {settings['rope_type']}"
    return dict(settings)


def _describe_tokenizer(tokenizer: Any) -> JsonObject:
    """Return the settings of ``tokenizer.json`` (None: there is none) that llama.cpp has to share.

    ``tokenizer`` is llama.cpp's name of the pre-tokenizer. Where llama.cpp has none that does the
    same, it is a description of the tokenizer: the caller refuses it, and prints this.
    """
    if tokenizer is None:
        return {"vocabulary": "no tokenizer.json"}
    pre_tokenizer = tokenizer.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for step in steps:
        # Offsets into the text do not change the tokens.
        step.pop("trim_offsets", None)
    normalizer = tokenizer.get("normalizer") or {"type": ""}
    behavior = {
        "ignore_merges": tokenizer["model"].get("ignore_merges"),
        "normalizer": normalizer["type"],
        "split": steps,
    }
    names = [name for name, rule in _RULES["tokenizers"].items() if rule == behavior]
    return {
        "vocabulary": tokenizer["model"]["type"],
        "tokenizer_model": "gpt2",
        "tokenizer": names[0] if names else behavior,
        "strips": any(
            token[flag]
            for token in tokenizer.get("added_tokens", [])
            for flag in ("lstrip", "rstrip", "single_word")
        ),
    }


def _list_tokens(tokenizer: Any, size: int) -> JsonObject:
    """Return ``tokens``, the text of each of `size` tokens, and ``token_types``, their TokenType."""
    vocabulary = tokenizer["model"]["vocab"]
    tokens = {token_id: (text, _NORMAL_TOKEN) for text, token_id in vocabulary.items()}
    for token in tokenizer.get("added_tokens", []):
        token_type = _CONTROL_TOKEN if token["special"] else _USER_DEFINED_TOKEN
        text = token["content"]
        tokens[token["id"]] = (text, token_type)
    # The embedding may have more rows than the tokenizer has tokens.
    rows = [tokens.get(row, (f"[PAD{row}]", _UNUSED_TOKEN)) for row in range(size)]
    return {
        "tokens": [text for text, _ in rows],
        "token_types": [token_type for _, token_type in rows],
    }


def _compute_rope_factors(settings: JsonMapping) -> Any:
    """Compute the factors by which llama3's RoPE divides frequencies: float32 of ``head_dim`` / 2.

    Dimensions that turn often within the original context keep their frequency (1), and those that
    turn rarely are slowed down by ``factor``. Between the bounds, 1 / factor is interpolated.
    """
    size = settings["head_dim"]
    exponents = np.arange(0, size, 2) / size
    context = settings["original_max_position_embeddings"]
    radians = context / settings["rope_theta"] ** exponents
    bounds = np.array(
        [
            settings["low_freq_factor"],
            settings["high_freq_factor"],
        ]
    )
    frequencies = np.interp(
        radians,
        2 * np.pi * bounds,
        [1 / settings["factor"], 1],
    )
    return np.float32(1 / frequencies)


def _add_tensors(
    writer: Any,
    checkpoint: Checkpoint,
    settings: JsonMapping,
) -> None:
    """Add all tensors of the checkpoint to the `writer`, a GGUFWriter, under llama.cpp's names.

    Raises:
        KeyError: gguf does not know the architecture, or the type of a tensor.
    """
    import gguf

    architecture = settings["model_type"]
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()],
        settings["num_hidden_layers"],
    )
    for key, tensor in checkpoint.tensors.items():
        name = names.get_name(key, (".weight", ".bias"))
        dtype = gguf.GGMLQuantizationType[tensor.dtype]
        # numpy has no bfloat16: integers of the same width carry the bytes.
        integers = checkpoint.view(key).view(f"u{tensor.width}")
        data = integers.reshape(tensor.shape)
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            # llama.cpp rotates neighbouring rows of a head, transformers its two halves.
            half = settings["head_dim"] // 2
            halves = data.reshape(-1, 2, half, tensor.shape[1])
            data = halves.swapaxes(1, 2)
        elif data.ndim == 1:
            # llama.cpp wants norms and biases in float32.
            data = gguf.dequantize(checkpoint.view(key), dtype)
            dtype = gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            name,
            data,
            raw_shape=tensor.shape,
            raw_dtype=dtype,
        )
