"""The files of a Hugging Face model directory: which of them hold weights, and what lies beside
these.

Only names, sizes and JSON are read here, so this module needs no library of models.
"""

import fnmatch
import json
import shutil
from pathlib import Path

from tuneloop.core.json_types import JsonObject

WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
)
"""Patterns of the names of files that hold parameters, or say which file does. Whatever copies a
model without its weights leaves them out: `copy_companions`, `training/checkpoint.py`,
`training/pretrained.py`, `stages/reward_model.py`. Only ``.safetensors`` and ``.bin`` are loaded
(`REQUIRED_FILES`, `formats/stored_models.py: list_loaded_files`)."""
CARD = "README.md"
"""The model's card. A card of the base would say of the policy what is true of the base only."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Names of files with a vocabulary; a tokenizer has at least one of them."""
REQUIRED_FILES = {
    "config.json": ("config.json",),
    # Some tokenizers, as that of bytes, are nothing but a configuration.
    "tokenizer": (*TOKENIZER_FILES, "tokenizer_config.json"),
    "weights": ("*.safetensors", "*.bin"),
}
"""What a model's directory has to hold → patterns of the files that it may be in.
`planning/limits.py` checks it before a run, and `training/pretrained.py` in the stage."""
DEFAULT_SHARD_BYTES = 50 * 10**9
"""The maximum size of a file that transformers writes by default."""
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""torch's name of a dtype → bytes of one parameter, for all dtypes in which a checkpoint may be
saved (``save_dtype`` of `training/options.py` and `stages/base_model.py`). A further dtype also
needs `training/fsdp/export.py: DTYPE_NAMES` and `planning/checkpoint_size.py: choose_width`, which
takes all but float32 as two bytes."""
SAMPLING_SETTINGS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "top_h",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "penalty_alpha",
    "num_beams",
    "num_beam_groups",
    "length_penalty",
    "diversity_penalty",
    "guidance_scale",
    "dola_layers",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
)
"""The settings of generation_config.json that change the distribution of the next token. They are
removed from a policy that is trained, as it is not sampled by them while it trains
(`training/checkpoint.py`), and stated as ``facts.dropped_generation_settings``. A setting that a
new version of transformers brings belongs here: until then it stays, and changes how others
sample."""


def list_missing_parts(directory: Path) -> list[str]:
    """List what a model's directory lacks, each as the remedy of an error."""
    return [
        f"has no {part} ({' or '.join(patterns)}); add it"
        for part, patterns in REQUIRED_FILES.items()
        if not any(any(directory.glob(pattern)) for pattern in patterns)
    ]


def has_tokenizer(directory: Path) -> bool:
    """Return whether a tokenizer with a vocabulary lies in a directory."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def holds_weights(name: str) -> bool:
    """Return whether a file of this name holds parameters, or is the index of such files."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in WEIGHTS)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy what lies beside the weights of `source`, and return the names of the files copied.

    These are the processor's files of a multimodal model, licences, code, and whatever else its
    author put there. A file that `target` has already stays. Subdirectories, hidden files and the
    card are left out."""
    copied: list[str] = []
    # In order: the names go into the log.
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name == CARD:
            continue
        if holds_weights(path.name) or (target / path.name).exists():
            continue
        shutil.copyfile(path, target / path.name)
        copied.append(path.name)
    return copied


def read_dtype(directory: Path) -> str:
    """Read torch's name of the dtype that a model directory says its weights have; float32 where it
    says none."""
    # A multimodal model says it for its parts, and versions of transformers name it differently.
    for part in _read_configs(directory):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return "float32"


def _read_configs(directory: Path) -> list[JsonObject]:
    """Read a model's configuration, and of a multimodal model that of its language model, too."""
    config = json.loads((directory / "config.json").read_text())
    return [config, config.get("text_config") or {}]


def choose_shard_bytes(directory: Path, dtype: str) -> int:
    """Choose the maximum size in bytes of a weight file in `dtype`, so that they are cut as those
    in `directory` are.

    Where there are several files, it is the largest one's size in the new dtype. A greedy division
    at this limit gives the same division again."""
    files = list(directory.glob("*.safetensors")) or list(directory.glob("*.bin"))
    sizes = [_count_data_bytes(path) for path in files]
    if len(sizes) < 2:
        return max(DEFAULT_SHARD_BYTES, sum(sizes))
    return max(sizes) * ITEM_BYTES[dtype] // ITEM_BYTES.get(read_dtype(directory), 4)


def _count_data_bytes(path: Path) -> int:
    """Count the bytes of a weight file without the header, which would make room for a further
    small tensor."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return size
    # The format: eight bytes with the length of the header, the header, the tensors.
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return size - 8 - header


def read_vocabulary_size(directory: Path) -> int:
    """Read how many embeddings the model in a directory has: ids from this number on mean nothing
    to it."""
    config, text_config = _read_configs(directory)
    return int(config.get("vocab_size") or text_config["vocab_size"])


def drop_sampling_settings(directory: Path) -> JsonObject:
    """Remove the settings of sampling from ``generation_config.json``, and return those removed.

    Ids of special tokens stay. Nothing happens where there is no such file."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    settings: JsonObject = json.loads(path.read_text())
    values = {name: settings.pop(name, None) for name in SAMPLING_SETTINGS}
    # transformers writes null for what is not set.
    dropped = {name: value for name, value in values.items() if value is not None}
    if dropped:
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    return dropped
