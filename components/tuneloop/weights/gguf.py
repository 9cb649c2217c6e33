"""A model directory as one GGUF file, as llama.cpp's own conversion, which no package has, would write it."""

import json
import tomllib
from pathlib import Path

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.weights.layout import Checkpoint

KNOWN = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text())


def write_gguf(model: Path, target: Path, description: str) -> None:
    """Write `model` as `target`. Raises UserError: gguf is not installed, or llama.cpp may compute something else."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "gguf", error.name, "is not installed; pip install 'tuneloop[gguf]'"
        ) from None
    held, config = Checkpoint(model), json.loads((model / "config.json").read_text())
    config = {
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        **config,
        **config["rope_parameters"],
    }
    arch, size, file = config["model_type"], config["head_dim"], model / "tokenizer.json"
    text = json.loads(
        file.read_text() if file.is_file() else '{"model": {"type": "no tokenizer.json"}}'
    )
    bpe, split, added = text["model"], text.get("pre_tokenizer") or {}, text.get("added_tokens", [])
    said = {
        "ignore_merges": bpe.get("ignore_merges"),
        "normalizer": (text.get("normalizer") or {"type": ""})["type"],
    }
    said["split"] = [
        {k: v for k, v in p.items() if k != "trim_offsets"}
        for p in split.get("pretokenizers", [split])
    ]
    config["tokenizer"] = next(
        (name for name, same in KNOWN["tokenizers"].items() if same == said), said
    )
    config["strips"] = any(
        token[flag] for token in added for flag in ("lstrip", "rstrip", "single_word")
    )
    config["dtype"] = " ".join(sorted({place.dtype for place in held.tensors.values()}))
    config |= {
        "rope": f"{arch} {config['rope_type']}",
        "vocabulary": bpe["type"],
        "description": description,
    }
    for key, good in KNOWN["supported"].items():
        if config.get(key, good[0]) not in good:
            raise UserError(
                f"gguf: {key}", config[key], f"is not supported; {', '.join(map(str, good))} is"
            )
    tokens = {i: (word, 1) for word, i in bpe["vocab"].items()}  # by gguf.TokenType: normal
    tokens |= {
        each["id"]: (each["content"], 3 if each["special"] else 4) for each in added
    }  # control, user-defined
    words, kinds = zip(
        *(tokens.get(i, (f"[PAD{i}]", 5)) for i in range(config["vocab_size"]))
    )  # unused
    config |= {"tokenizer_model": "gpt2", "tokens": words, "token_types": kinds}
    writer, special = gguf.GGUFWriter(target, arch), gguf.SpecialVocab(model, load_merges=True)
    for name, setting in KNOWN["fields"].items():
        getattr(writer, f"add_{name}")(config[setting])
    special.add_special_token.setdefault(
        "bos", False
    )  # else llama.cpp adds one with some pre-tokenizers
    special.add_to_gguf(writer, quiet=True)
    if config["rope_type"] == "llama3":
        turns = config["original_max_position_embeddings"] / config["rope_theta"] ** (
            np.arange(0, size, 2) / size
        )
        bounds = 2 * np.pi * np.array([config["low_freq_factor"], config["high_freq_factor"]])
        writer.add_tensor(
            "rope_freqs.weight", np.float32(1 / np.interp(turns, bounds, [1 / config["factor"], 1]))
        )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for key, place in held.tensors.items():
        name, kind = (
            names.get_name(key, (".weight", ".bias")),
            gguf.GGMLQuantizationType[place.dtype],
        )
        data = held.view(key).view(f"u{place.width}").reshape(place.shape)
        if arch == "llama" and name.endswith(
            ("attn_q.weight", "attn_k.weight")
        ):  # a head's two halves, in turn
            data = data.reshape(-1, 2, size // 2, place.shape[1]).swapaxes(1, 2)
        elif data.ndim == 1:  # which llama.cpp wants in float32
            data, kind = gguf.dequantize(held.view(key), kind), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, data, raw_shape=place.shape, raw_dtype=kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
