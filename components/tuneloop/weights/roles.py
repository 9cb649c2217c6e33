"""The role of each tensor of a model, so that a reader that needs a part reads only that part.

``embedding`` and ``head`` have one row for each token. For ``attention``, ``mlp`` and ``expert``,
the ranks of tensor parallelism split the rows of a ``…_column`` and the columns of a ``…_row``.
Each rank needs the whole of a ``norm``, a ``router`` and a ``scale`` (of a quantized matrix). It
also needs the whole of ``replicated`` tensors, for which no split is known. `read_tensors` reads
chosen tensors of a version.

The publisher writes them into the index of a version without a base (`Extra.roles` of
`weights/versions.py`). `weights/inspect.py: diff_versions` selects by them, and so do readers of
other projects: ``docs/weights.md`` lists them. A change affects only versions that are published
afterwards.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_ROLE_PATTERNS = [
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
    """Return tensor name → role for the tensors `names` of the model in `directory`.

    The tensor-parallel plan of transformers decides. Where it lacks the tensor, the name decides:
    experts, for example, are one module of the plan, but many tensors in files.
    """
    config = directory / "config.json"
    plan: dict[str, str] = {}
    if config.is_file() and '"model_type"' in config.read_text():
        from transformers import AutoConfig

        # transformers may not know the model, or only by code that comes with it and is not run.
        with suppress(ValueError):
            model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            plan = model_config.get_text_config().base_model_tp_plan or {}
    return {name: _find_role(name, plan) for name in names}


def _find_role(name: str, plan: Mapping[str, str]) -> str:
    """Return the role of one tensor, by `plan` (module pattern → style of its split) or by name."""
    role_by_name = next(role for pattern, role in _ROLE_PATTERNS if re.search(pattern, name))
    # The plan's "colwise" of an output layer means its vocabulary: the name says more.
    if role_by_name in ("embedding", "head"):
        return role_by_name
    # The plan writes the number of a layer or an expert as an asterisk.
    module = re.sub(r"\.\d+(?=\.)", ".*", name.removesuffix(".weight"))
    styles = (str(style) for pattern, style in plan.items() if module.endswith(f".{pattern}"))
    split = re.search("col|row", next(styles, ""))
    if split is None:
        return role_by_name
    direction = "column" if split[0] == "col" else "row"
    if "att" in module:
        return f"attention_{direction}"
    if ".experts." in module:
        return f"expert_{direction}"
    return f"mlp_{direction}"
