"""Whether the `target_modules` of adapters (LoRA) name modules that a model has.

Module names are read from the headers of the model's safetensors files. transformers renames or
fuses some modules while it loads them, so only what holds under any such change is refused here.
The stage that trains asks peft itself.

`planning/limits.py` is its only caller, and `tests/unit/planning/test_limits.py` tests it. What it
accepts is checked once more by the stage (`training/lora.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tuneloop.config.model_facts import Model, ModelFacts, read_json
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.weights.layout import read_header

MATRIX = (".weight", ".qweight")
"""Ends of the names of tensors that are matrices, the second in quantized files."""
EMBEDDINGS = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "score"}
"""Last parts of the names of modules that no adapter may have: a tied output layer would share an
embedding's. `training/lora.py` decides it by the loaded model, and knows no names."""
PREFIXES = ("", "model.", "transformer.")
"""What transformers may put before the names in a file, as where a base model's weights are loaded
into a model with an output layer.
"""


def check_target_modules(facts: ModelFacts, setting: str, lora: object) -> Iterator[UserError]:
    """Find target modules that the model does not have.

    Args:
        facts: of the base model. If its files are not here, nothing is found.
        setting: the key of the adapters' options, as ``trainer.lora``.
        lora: the options; None: no adapters.
    """
    targets = lora.get("target_modules") if isinstance(lora, Mapping) else None
    if not targets or targets == "all-linear":
        return
    modules = list_modules(facts)
    leaves = sorted({module.rpartition(".")[2] for module in modules} - EMBEDDINGS)
    # Nothing is known of the model, and nothing is refused.
    if not leaves:
        return
    setting = f"{setting}.target_modules"
    # A text is an expression over whole names, an entry of a list the end of a name.
    if isinstance(targets, str):
        is_renamed = is_multimodal(facts.directory)
        if not may_match(targets, modules, is_renamed=is_renamed):
            yield UserError(setting, targets, explain_expression(targets, leaves))
        return
    for target in targets:
        leaf = str(target).rpartition(".")[2]
        if leaf in EMBEDDINGS:
            yield UserError(setting, target, "leave embeddings and the output layer out")
        elif leaf not in leaves:
            remedy = f"names no layer of {facts.name}; it has {', '.join(leaves)}"
            yield UserError(setting, target, remedy)


def explain_expression(expression: str, leaves: Sequence[str]) -> str:
    """Say why a text names no module: it is an expression over whole names, not a name."""
    remedy = "is a regular expression that no module's whole name matches"
    if expression in leaves:
        return f"{remedy}; for all modules of this name write [{expression}]"
    return f"{remedy}, as model.layers.0.self_attn.q_proj; the model has {', '.join(leaves)}"


def may_match(expression: str, modules: Sequence[str], *, is_renamed: bool) -> bool:
    """Return whether a regular expression may match the whole name of a module.

    Args:
        expression: as peft takes it.
        modules: by their names in the model's files.
        is_renamed: transformers may give the modules names that are not known here.
    """
    if is_renamed:
        return True
    try:
        pattern = re.compile(expression)
    except re.error:
        return False
    # peft compares the whole name, as transformers has it.
    return any(pattern.fullmatch(prefix + module) for module in modules for prefix in PREFIXES)


def list_modules(facts: ModelFacts) -> list[str]:
    """List the modules with a matrix of weights, by their names in the model's files.

    It is empty where these are not here or cannot be read.
    """
    if facts.directory is None:
        # A tiny model of `base_model` has no files yet; its layers are Llama's. Any other model
        # without a directory has no linears, either.
        linears = facts.shape.linears if isinstance(facts.shape, Model) else {}
        return [f"model.layers.0.mlp.{name}" for name in linears]
    modules: dict[str, None] = {}
    for path in sorted(facts.directory.glob("*.safetensors")):
        try:
            tensors = read_header(path).tensors
        except Corrupt:
            # The stage that loads the file reports it.
            return []
        for name, tensor in tensors.items():
            # A norm has a weight, too, of one dimension.
            if name.endswith(MATRIX) and len(tensor.shape) > 1:
                modules[name.rpartition(".")[0]] = None
    return list(modules)


def is_multimodal(directory: Path | None) -> bool:
    """Return whether a model has several parts, which files and transformers name differently."""
    return directory is not None and "text_config" in read_json(directory / "config.json")
