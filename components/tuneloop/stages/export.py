"""Take a policy out: a plain Hugging Face directory that transformers and vLLM load, adapters as peft's, and GGUF."""

import re
import shutil
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tuneloop.core.artifacts import Artifact, dump_canonical_json
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.core.hub import split_hub_address
from tuneloop.formats.facts import LineageFacts
from tuneloop.training.checkpoint import DROPPED_SETTINGS, find_state, lora_base, trainer_state
from tuneloop.weights.gguf import write_gguf
from tuneloop.weights.layout import preallocate_safetensors, read_header, write_bytes_at


@component("model", image="base", results={"parameters": int})
def export(stage: Stage, policy: Input, *, adapter: bool = False, gguf: bool = False) -> Results:
    """Copy a checkpoint's ``model/`` out: the artifact's files are the model directory, nothing around it.
    With `adapter` a folder ``adapter/`` has the LoRA adapters alone, with `gguf` ``model.gguf`` all, for llama.cpp.

    Raises:
        UserError: `policy` is not a checkpoint, has no adapters where they are wanted, or GGUF has no place for it.
    """
    if "model/config.json" not in policy.manifest.files:
        raise UserError("--policy", policy.url, "holds no model/config.json; give it a checkpoint")
    model = policy.part("model")
    if gguf:  # first, as it may be refused before anything is written
        write_gguf(model, stage.out / "model.gguf", f"checkpoint {policy.manifest.digest}")
    shutil.copytree(model, stage.out, dirs_exist_ok=True)
    if adapter:
        write_adapter(policy, stage.out / "adapter", "adapter")
    parameters = sum(count_parameters(path) for path in model.glob("*.safetensors"))
    stage.facts.update(version=policy.manifest.version, digest=policy.manifest.digest)
    dropped = LineageFacts.read(policy).dropped_generation_settings
    if dropped:
        stage.facts[DROPPED_SETTINGS] = dropped
        settings = ", ".join(f"{name} {value}" for name, value in dropped.items())
        stage.log(
            f"generation_config.json is without the base's {settings}: the policy was not trained under them"
        )
    return {"parameters": parameters}


def count_parameters(path: Path) -> int:
    """Count the elements in a safetensors file, from its header alone."""
    return sum(prod(tensor.shape) for tensor in read_header(path).tensors.values())


def write_adapter(policy: Artifact, target: Path, title: str) -> None:
    """Write a checkpoint's adapters in the files of peft, with a card that says how `title` is loaded, and over what
    base. Raises UserError where it was not trained with LoRA, or its adapters or their base are gone."""
    state = trainer_state(policy)
    options = state.lora if state else None
    held = find_state(policy)
    if not (options and held):
        why = (
            "has no adapters any more, or they were not written (state_every)"
            if options
            else "is not of LoRA"
        )
        raise UserError("adapter", policy.url, f"{why}; take the whole model, or another version")
    base, rows = lora_base(policy), defaultdict[str, list[Any]](list)
    for path in sorted(
        held.part("trainer").glob("*.safetensors")
    ):  # of each rank, in the order of their rows
        data = np.memmap(path, np.uint8, "r")
        for name, part in read_header(path).tensors.items():
            if name.startswith("model."):
                own = data[part.start : part.end].view(np.float32).reshape(part.shape)
                rows[f"base_model.{name.removesuffix('.default.weight')}.weight"].append(own)
    tensors = {name: np.concatenate(parts) for name, parts in rows.items()}
    file, entries = (
        target / "adapter_model.safetensors",
        {k: ("F32", v.shape, v.nbytes) for k, v in tensors.items()},
    )
    target.mkdir(parents=True)
    preallocate_safetensors(file, entries, {"format": "pt"})
    for name, place in read_header(file).tensors.items():
        write_bytes_at(file, place.start, tensors[name].reshape(-1).view(np.uint8))
    given, revision = (
        str(base.manifest.params.get("model")),
        base.manifest.params.get("revision"),
    )  # of base_model
    known = given.startswith("hf://")  # a name without it may have been that of a folder
    hub, revision = split_hub_address("model", given, revision) if known else (None, None)
    pins = [
        how.format(revision) if revision else "" for how in (', revision="{}"', " --revision {}")
    ]
    config = {
        **options,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub,
    }
    if options["target_modules"] == "all-linear":
        config["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (target / "adapter_config.json").write_text(
        dump_canonical_json({**config, "revision": revision})
    )
    sums = [
        f"`{k}` {v.sha256}"
        for k, v in base.manifest.files.items()
        if re.match(r"model/.*\.safetensors", k)
    ]
    about = {
        "made": policy.manifest,
        "base": base.manifest,
        "r": options["r"],
        "sums": ", ".join(sums),
        "title": title,
    }
    card = Path(__file__).with_name("adapter_card.md").read_text()
    card = card.format(
        front=f"base_model: {hub}\n" if hub else "", place=hub or "BASE", pins=pins, **about
    )
    (target / "README.md").write_text(card)


if __name__ == "__main__":
    export.main()
