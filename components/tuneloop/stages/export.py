"""Take a policy out: a plain Hugging Face directory that transformers and vLLM load, adapters as
peft's, and GGUF.

Pipelines end with it, or with `deploy_model`, which serves what it writes. `tuneloop generate`,
attestations and `deploy_model` read what it writes by the names of files alone; trackers and the
registry of KFP find it by its kind, ``model``. `planning/disk.py` estimates its size.

Tests: `tests/unit/stages/test_export.py`; of adapters `test_adapter.py`, of the hub
`test_hub_names.py`.
"""

import re
import shutil
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from tuneloop.core.artifacts import Artifact, dump_canonical_json
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.core.hub import split_hub_address
from tuneloop.core.json_types import JsonMapping
from tuneloop.formats.facts import LineageFacts
from tuneloop.training.checkpoint import DROPPED_SETTINGS, find_state, lora_base, trainer_state
from tuneloop.weights.gguf import write_gguf
from tuneloop.weights.layout import preallocate_safetensors, read_header, write_bytes_at

# `planning/disk.py` counts both for a run's room; `config/pipeline.py: PipelineConfig` refuses
# `adapter` where nothing trains adapters.
WithAdapter = Annotated[
    bool, Field(description="write the LoRA adapters alone, too, in a folder adapter/")
]
WithGguf = Annotated[bool, Field(description="write model.gguf for llama.cpp, too")]


@component("model", image="base", results={"parameters": int})
def export(
    stage: Stage, policy: Input, *, adapter: WithAdapter = False, gguf: WithGguf = False
) -> Results:
    """Copy a checkpoint's ``model/`` out: the artifact's files are the model directory, nothing
    around it.

    With `adapter` a folder ``adapter/`` has the LoRA adapters alone, with `gguf` ``model.gguf``
    all, for llama.cpp.

    Raises:
        UserError: `policy` is not a checkpoint, has no adapters where they are wanted, or GGUF has
            no place for it.
    """
    if "model/config.json" not in policy.manifest.files:
        raise UserError("--policy", policy.url, "holds no model/config.json; give it a checkpoint")
    model = policy.part("model")
    # GGUF may refuse a model, so that it comes before the large copy.
    if gguf:
        write_gguf(model, stage.out / "model.gguf", f"checkpoint {policy.manifest.digest}")
    shutil.copytree(model, stage.out, dirs_exist_ok=True)
    if adapter:
        write_adapter(policy, stage.out / "adapter", "adapter")
    parameters = sum(count_parameters(path) for path in model.glob("*.safetensors"))
    stage.facts.update(version=policy.manifest.version, digest=policy.manifest.digest)
    dropped_settings = LineageFacts.read(policy).dropped_generation_settings
    if dropped_settings:
        stage.facts[DROPPED_SETTINGS] = dropped_settings
        settings = ", ".join(f"{name} {value}" for name, value in dropped_settings.items())
        stage.log(
            f"generation_config.json is without the base's {settings}: the policy was not trained "
            "under them"
        )
    return {"parameters": parameters}


def count_parameters(path: Path) -> int:
    """Count the elements in a safetensors file, from its header alone."""
    return sum(prod(tensor.shape) for tensor in read_header(path).tensors.values())


def write_adapter(policy: Artifact, target: Path, title: str) -> None:
    """Write a checkpoint's adapters in the files of peft, with a card that says how to load them.

    `extensions/provenance/attestation.py` calls it for `tuneloop push`. The card is the template
    `adapter_card.md` beside this file; `describe_adapter` fills it.

    Args:
        target: the directory to make.
        title: heading of the card, and the path that its example loads the adapters from.

    Raises:
        UserError: it was not trained with LoRA, or its adapters or their base are gone.
    """
    state = trainer_state(policy)
    options = state.lora if state else None
    state_artifact = find_state(policy)
    if options is None or state_artifact is None:
        problem = "is not of LoRA"
        if options:
            problem = "has no adapters any more, or they were not written (state_every)"
        remedy = f"{problem}; take the whole model, or another version"
        raise UserError("adapter", policy.url, remedy)
    base = lora_base(policy)
    tensors = read_adapters(state_artifact.part("trainer"))
    target.mkdir(parents=True)
    write_tensors(target / "adapter_model.safetensors", tensors)
    hub_name, revision = find_hub_name(base)
    config = options | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_name,
        "revision": revision,
    }
    # peft would look for linear layers by a rule of its own, which has changed between versions.
    if options["target_modules"] == "all-linear":
        config["target_modules"] = sorted({name.split(".")[-3] for name in tensors})
    (target / "adapter_config.json").write_text(dump_canonical_json(config))
    card = describe_adapter(policy, base, title, options, hub_name, revision)
    (target / "README.md").write_text(card)


def read_adapters(trainer: Path) -> dict[str, np.ndarray]:
    """Read the adapters in ``trainer/``: peft's name → float32 tensor, its ranks' shards joined.

    `training/distributed_checkpoint.py` writes these files, under the names of `Trainer._state`.
    """
    shards_by_name: dict[str, list[np.ndarray]] = defaultdict(list)
    # The files' names are in the order of ranks, and so of the rows that these hold.
    for path in sorted(trainer.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        for name, tensor in read_header(path).tensors.items():
            if not name.startswith("model."):
                continue  # a moment of the optimizer
            shard = data[tensor.start : tensor.end].view(np.float32).reshape(tensor.shape)
            peft_name = f"base_model.{name.removesuffix('.default.weight')}.weight"
            shards_by_name[peft_name].append(shard)
    return {name: np.concatenate(shards) for name, shards in shards_by_name.items()}


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors to a safetensors file."""
    entries = {name: ("F32", tensor.shape, tensor.nbytes) for name, tensor in tensors.items()}
    preallocate_safetensors(path, entries, {"format": "pt"})
    # The header decides where a tensor lies.
    for name, entry in read_header(path).tensors.items():
        write_bytes_at(path, entry.start, tensors[name].reshape(-1).view(np.uint8))


def find_hub_name(base: Artifact) -> tuple[str | None, str | None]:
    """Return the hub's name of a base model and its revision; None where it is not known to be
    there.
    """
    name = str(base.manifest.params.get("model"))
    # A name without the scheme may have been that of a folder.
    if not name.startswith("hf://"):
        return None, None
    return split_hub_address("model", name, base.manifest.params.get("revision"))


def describe_adapter(
    policy: Artifact,
    base: Artifact,
    title: str,
    options: JsonMapping,
    hub_name: str | None,
    revision: str | None,
) -> str:
    """Return the card of adapters: how they are loaded, and over which very base.

    What stands in braces in `adapter_card.md` is an argument of `format` here, or a part of one.
    """
    sums = [
        f"`{name}` {file.sha256}"
        for name, file in base.manifest.files.items()
        if re.match(r"model/.*\.safetensors", name)
    ]
    pins = ["", ""]
    if revision:
        pins = [f', revision="{revision}"', f" --revision {revision}"]
    template = Path(__file__).with_name("adapter_card.md").read_text()
    return template.format(
        front=f"base_model: {hub_name}\n" if hub_name else "",
        place=hub_name or "BASE",
        pins=pins,
        made=policy.manifest,
        base=base.manifest,
        r=options["r"],
        sums=", ".join(sums),
        title=title,
    )


if __name__ == "__main__":
    export.main()
