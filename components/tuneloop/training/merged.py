"""A model with the adapters of a directory merged into its weights.

Nothing is trained here: `training/pretrained.py` calls it for adapters that a user gives as the
base model. Tests: `tests/unit/stages/test_adapter_base.py` and `test_hub_names.py`.
"""

from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.formats.adapter_files import AdapterFiles
from tuneloop.training.lora import SECOND


def find_adapter_on_hub(name: str, revision: str | None) -> Path | None:
    """Fetch the adapters called `name` on the hub, and return their directory; None where there is
    a model of this name, or nothing. Raises what the hub's client raises, but that it lacks the
    file."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, "config.json", revision=revision)
        return None
    except LocalEntryNotFoundError:
        return None
    except EntryNotFoundError:
        pass
    try:
        hf_hub_download(name, "adapter_config.json", revision=revision)
    except EntryNotFoundError:
        return None
    return Path(snapshot_download(name, revision=revision, ignore_patterns=["*/*"]))


def merge_adapter(model: Any, adapter: AdapterFiles, name: str, base: str) -> tuple[Any, bool]:
    """Merge adapters into a model of transformers.

    Returns the model, and whether the adapters change anything.

    Raises UserError, for the adapters called `name` over `base`: they are of a type that cannot be
    merged, they do not fit the model, or peft cannot read them."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    directory = str(adapter.directory)
    try:
        adapted = PeftModel.from_pretrained(model, directory)
        saved = load_peft_weights(directory, device="cpu")
    except Exception as error:
        # peft raises errors of many kinds, and all of them are about these files.
        reason = " ".join(str(error).split())[:300]
        remedy = f"is an adapter that does not fit its base model {base}: {reason}"
        raise UserError("base_model", name, remedy) from error
    if not hasattr(adapted, "merge_and_unload"):
        remedy = f"is an adapter of the type {adapter.kind}, which cannot be merged into a model"
        raise UserError("base_model", name, remedy)
    # Without this option peft asks the hub for the base, to compare vocabularies.
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    differing = sorted(saved.keys() ^ loaded.keys())
    if differing:
        remedy = (
            f"is an adapter that does not fit its base model {base}: the two differ in "
            f"{', '.join(differing[:3])}"
        )
        raise UserError("base_model", name, remedy)
    second = [value for key, value in saved.items() if SECOND in key]
    is_changed = not second or any(bool(value.any()) for value in second)
    return adapted.merge_and_unload(), is_changed
