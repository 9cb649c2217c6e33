"""The role of each tensor of a model, so that a reader that needs a part reads only that part (`read_tensors`).

``embedding`` and ``head`` have one row for each token. For ``attention``, ``mlp`` and ``expert``, the ranks of tensor
parallelism split the rows of a ``…_column`` and the columns of a ``…_row``. Each rank needs the whole of a ``norm``, a
``router``, a ``scale`` (of a quantized matrix), and of ``replicated`` tensors, for which no split is known."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_PATTERNS = [
    (r"scale(_inv)?$", "scale"),
    (r"(o_proj|out_proj|down_proj|fc2|w2|dense)\.bias$", "replicated"),
    (r"\bexperts\b.*\.(down_proj|w2)\b", "expert_row"),
    (r"\bexperts\b", "expert_column"),
    (r"(router|(mlp|moe)\.gate)\.", "router"),
    (r"(lm_head|embed_out)\.", "head"),
    (r"(embed_\w+|wte|wpe|word_embeddings)\.", "embedding"),
    (r"norm", "norm"),
    (r"att(n|ention)\.(o_proj|out_proj|dense)\.", "attention_row"),
    (r"\.(q|k|v|qkv)_proj\.|query_key_value", "attention_column"),
    (r"\.(down_proj|fc2|w2)\.", "mlp_row"),
    (r"\.(gate_proj|up_proj|gate_up_proj|fc1|w1|w3)\.", "mlp_column"),
    (r"", "replicated"),
]
"""Pattern of Hugging Face's tensor names → role; the first match decides."""


def classify_tensors(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Give each tensor of a model directory its role: by the tensor-parallel plan of transformers, or where that lacks
    the tensor (experts are one module, but many tensors in files), by its name."""
    config, plan = directory / "config.json", dict[str, str]()
    if config.is_file() and '"model_type"' in config.read_text():
        from transformers import AutoConfig

        with suppress(
            ValueError
        ):  # transformers does not know the model, or only by code that comes with it
            about = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            plan = about.get_text_config().base_model_tp_plan or {}
    return {name: _find_role(name, plan) for name in names}


def _find_role(name: str, plan: Mapping[str, str]) -> str:
    module = re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight"))
    way = next((str(how) for pattern, how in plan.items() if module.endswith(f".{pattern}")), "")
    guess = next(role for pattern, role in _PATTERNS if re.search(pattern, name))
    if guess not in ("embedding", "head") and (cut := re.search("col|row", way)):
        block = "attention" if "att" in module else "expert" if ".experts." in module else "mlp"
        return f"{block}_{'column' if cut[0] == 'col' else 'row'}"
    return guess
