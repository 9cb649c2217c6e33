"""A directory of adapters as peft writes it: ``adapter_config.json``, their weights, and no model.

Only JSON is read here, so this module needs no library of models.

`config/model_facts.py` and `planning/limits.py` read it where a run is configured, and
`training/pretrained.py` in the stage `base_model`, so that both refuse the same directories. Which
types of adapters can be used is decided where they are merged (`training/merged.py`). Tests:
`tests/unit/stages/test_adapter_base.py`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.errors import UserError
from tuneloop.core.hub import is_hub_name

CONFIG = "adapter_config.json"
SETTING = "model.adapter_base"
"""The setting that names the model under adapters."""
REMEDY = f"set {SETTING} to the model that it was trained on, a directory or a hub name"
STACKED = "is an adapter, too"
"""What is wrong with a base model that has adapters in place of weights: no engine of ours, and not
peft, merges one over another."""


@dataclass(frozen=True)
class AdapterFiles:
    """Adapters in a directory.

    Attributes:
        base: the model that they were trained on, a directory or a hub name; None: not stated.
        revision: of a base on the hub.
        kind: peft's type, as ``LORA``.
    """

    directory: Path
    base: str | None
    revision: str | None
    kind: str

    def choose_base(self, name: str, chosen: str | None) -> tuple[str, str | None]:
        """Choose the base model and its revision.

        Args:
            name: of the adapter, for messages.
            chosen: the user's setting `SETTING`, which wins; None: what the adapter's file states.

        Raises UserError: `chosen` is a path that is not here, or there is none and the file states
        no base model, or a path that is not here.
        """
        if chosen is not None:
            if is_path(chosen) and not Path(chosen).is_dir():
                remedy = "is not a directory here; name one, or a model of the hub"
                raise UserError(SETTING, chosen, remedy)
            return chosen, None
        if not self.base:
            remedy = f"is an adapter (peft), and its {CONFIG} names no base model; {REMEDY}"
            raise UserError("base_model", name, remedy)
        # Of a name that may be on the hub, only the hub knows.
        directory = Path(self.base).expanduser()
        if is_path(self.base) and not directory.is_dir():
            remedy = (
                f"is an adapter (peft), and the base model of its {CONFIG}, {self.base}, is not a "
                f"directory here; {REMEDY}"
            )
            raise UserError("base_model", name, remedy)
        return str(directory) if is_path(self.base) else self.base, self.revision


def explain_base(base: str, problem: str) -> str:
    """Return the remedy for adapters whose base model cannot be used: `problem` says why."""
    return f"is an adapter (peft), and its base model {base} {problem}; {REMEDY}"


def is_path(name: str) -> bool:
    """Return whether a name can only be one of a directory, and not of a model on the hub."""
    if name.startswith("hf://"):
        return False
    return name.startswith(("/", ".", "~")) or not is_hub_name(name)


def read_adapter(directory: Path) -> AdapterFiles | None:
    """Read what a directory of adapters says of them; None where it is none, or has a model, too.
    Raises UserError: the file is not what peft writes."""
    path = directory / CONFIG
    # transformers writes both where it saves a whole model beside adapters: the model is meant.
    if not path.is_file() or (directory / "config.json").exists():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        remedy = f"its {CONFIG} is not JSON ({error})"
        raise UserError("base_model", str(directory), remedy) from error
    if not isinstance(config, dict):
        raise UserError("base_model", str(directory), f"its {CONFIG} is not a JSON object")
    base = config.get("base_model_name_or_path")
    revision = config.get("revision")
    return AdapterFiles(
        directory=directory,
        base=base if isinstance(base, str) else None,
        revision=revision if isinstance(revision, str) else None,
        kind=str(config.get("peft_type")),
    )
