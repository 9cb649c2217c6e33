"""Pipelines and their configuration: found by name or path, filled from a file and ``--set``, and
checked once.

A pipeline is a Python file with a docstring, a frozen pydantic model ``Config`` and
``build_argo(config)``. For Kubeflow Pipelines it has ``build_kfp(config)`` besides, with the
attribute ``plan`` that `kfp/configure.py` calls; `make_builders` of `cli/pipeline_file.py` makes
both.

The order is: read (`read_values`), follow the model (`follow_model`), validate, and then build. All
commands that take a pipeline go through `Pipeline`. The first task of a run on KFP has values
already and repeats the two steps in the middle: `config/explicit_values.py: configure_values`.
"""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tuneloop.config.extended import extend_config
from tuneloop.config.followed import Followed, merge_followed
from tuneloop.config.machine import Machine
from tuneloop.config.merging import merge_settings
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.config.refusals import explain_refusal
from tuneloop.config.rules import follow_model, list_doubts, list_unknowns
from tuneloop.config.sections import KIND, expand_texts
from tuneloop.config.stored_facts import remember_address
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import normalize_url
from tuneloop.formats.stored_models import PROMOTED, RUN, open_model
from tuneloop.workflow.pod_hook import list_pod_hooks

Files = Path | Sequence[Path] | None
"""One file of settings, several files (later ones win), or none."""


@dataclass(frozen=True)
class Configured:
    """A pipeline's configuration.

    Attributes:
        settings: the configuration.
        followed: its settings that follow the base model and the machine.
        notes: lines for the user: what is not known of the base model (`list_unknowns`), and
            settings that are probably a mistake (`list_doubts`).
    """

    settings: BaseModel
    followed: tuple[Followed, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline file, imported.

    Attributes:
        name: of the file, without ``.py``.
        path: of the file, absolute; records of runs have it, and a fork loads it again.
        module: the file as it was imported.
    """

    name: str
    path: Path
    module: ModuleType

    @property
    def Config(self) -> type[BaseModel]:
        """The class of its configuration, with the sections that extensions add."""
        return extend_config(self.module.Config)

    def configure(
        self,
        files: Files = None,
        sets: Iterable[str] = (),
        store: str | None = None,
        *,
        keeps_promoted: bool = False,
    ) -> BaseModel:
        """Make the configuration: defaults, then `files`, then `sets`.

        What all of these leave out follows the base model, and the pods that the settings describe.

        Args:
            files: YAML files with keys of the configuration; later ones win
                (`tuneloop.config.merging`).
            sets: ``a.b=value`` each, whose value is parsed as YAML.
            store: where the run will commit, if that is known: a base model ``run://…`` is
                looked up there, and the settings have its address with the digest.
            keeps_promoted: ``run://NAME@promoted`` stays in the settings, and each run looks it up
                when it starts. Settings that follow the model follow the one that is promoted now.

        Raises:
            UserError: an unreadable file, a value that is no YAML, an unknown key, a wrong type or
                an impossible value.
        """
        configured = self.configure_for(None, files, sets, store, keeps_promoted=keeps_promoted)
        return configured.settings

    def configure_for(
        self,
        machine: Machine | None,
        files: Files = None,
        sets: Iterable[str] = (),
        store: str | None = None,
        *,
        keeps_promoted: bool = False,
    ) -> Configured:
        """Make the configuration as `configure` does, with what follows the base model and
        `machine`; None for the pods that the settings describe."""
        values = self.read_values(files, sets)
        name = values.get("base_model")
        if store and isinstance(name, str) and name.startswith(RUN):
            model = open_model(name, normalize_url(store))
            if keeps_promoted and name.endswith(f"@{PROMOTED}"):
                remember_address(name, model.reference)
            else:
                values["base_model"] = model.reference
        followed = follow_model(self.Config, values, machine)
        settings = self.validate(merge_followed(values, followed))
        notes = list_unknowns(self.Config, values)
        notes += list_doubts(self.Config, values)
        return Configured(settings, tuple(followed.values()), tuple(notes))

    def read_values(self, files: Files = None, sets: Iterable[str] = ()) -> JsonObject:
        """Read what the user sets: `files`, then `sets`.

        Raises:
            UserError: a file or a value cannot be read.
        """
        values: JsonObject = {}
        for file in [files] if isinstance(files, Path) else files or ():
            file_values = merge_settings({}, _read_mapping(file))
            # A text that stands for a section would replace what an earlier file sets of it.
            self._expand(file_values)
            values = merge_settings(values, file_values)
        for item in sets:
            section, key, previous = _set(values, item)
            self._expand(values)
            # A text that names the kind of a section leaves what was set of the section before.
            # `None` for a section that must not be null: its heading is gone again, as in a file.
            chosen = section.get(key)
            if isinstance(previous, dict) and isinstance(chosen, dict) and list(chosen) == [KIND]:
                section[key] = previous | chosen
        return values

    def _expand(self, values: JsonObject) -> None:
        """Write out the texts in `values` that stand for a section."""
        _expand_data(values)
        expand_texts(self.Config, values)

    def validate(self, values: JsonObject) -> BaseModel:
        """Return `values` as a configuration.

        Extensions check the section `cluster` here (`PodHook.check_cluster`), and not in a
        configuration that a program makes by calling the class itself.

        Args:
            values: with sections written out, as `read_values` returns them.

        Raises:
            UserError: they are refused; it names the first setting that is.
        """
        try:
            settings = self.Config(**values)
        except ValidationError as error:
            # The message says all; pydantic's own would name classes that users never see.
            raise explain_refusal(self.Config, error, values) from None
        if isinstance(settings, PipelineConfig):
            for hook in list_pod_hooks():
                hook.check_cluster(settings.cluster)
        return settings

    def build(self, config: BaseModel) -> JsonObject:
        """Build the Argo Workflow of `config`, as the mapping that its YAML holds."""
        return self.module.build_argo(config).to_dict()


def dump_workflow(workflow: JsonObject) -> str:
    """Dump a rendered workflow as YAML; equal workflows give equal bytes."""
    # Lines are never wrapped: a long command is easier to compare whole.
    return yaml.safe_dump(workflow, sort_keys=False, allow_unicode=True, width=sys.maxsize)


def list_pipeline_folders(beside: str | os.PathLike[str] | None = None) -> list[Path]:
    """List the folders that are searched for pipelines, in order; the first that has a name wins.

    Args:
        beside: a pipeline file, whose folder comes first; None: the folder ``pipelines`` of the
            current directory.

    All but the first count as part of the image: `kfp/configure.py: read_files` sends no files of
    them.
    """
    package = Path(__file__).parents[1]
    first = Path(beside).parent if beside else Path("pipelines")
    # A checkout has the pipelines beside the package, and a wheel has them inside: `pyproject.toml`
    # names the folder, too.
    return [first, package.parent.parent / "pipelines", package / "_pipelines"]


def list_pipelines() -> dict[str, Path]:
    """Return name → file of every pipeline that can be named."""
    paths_by_name: dict[str, Path] = {}
    for folder in list_pipeline_folders():
        for path in sorted(folder.glob("[a-z]*.py")):
            paths_by_name.setdefault(path.stem, path)
    return dict(sorted(paths_by_name.items()))


def find_pipeline(name: str) -> Pipeline:
    """Find the pipeline `name`, one of `list_pipelines` or a file's path.

    Raises:
        UserError: there is no such pipeline, or the file is none.
    """
    is_path = name.endswith(".py")
    path = Path(name) if is_path else list_pipelines().get(name.replace("-", "_"))
    if path is None or not path.is_file():
        names = ", ".join(list_pipelines()) or "none"
        remedy = f"known: {names}; or give the path of a .py file"
        raise UserError("pipeline", name, "no such file" if path else remedy)
    module = _load(path.resolve())
    for attribute in ("Config", "build_argo"):
        if not hasattr(module, attribute):
            remedy = f"has no {attribute}; a pipeline defines Config and build_argo(config)"
            raise UserError("pipeline", name, remedy)
    return Pipeline(path.stem, path.resolve(), module)


def load_pipeline(name: str, beside: str | os.PathLike[str] | None = None) -> ModuleType:
    """Load a pipeline for another one that extends it.

    Args:
        name: the name of its file, without ``.py``.
        beside: the file of the other one, whose folder is searched first.

    Raises:
        UserError: no folder has it.
    """
    for folder in list_pipeline_folders(beside):
        path = folder / f"{name}.py"
        if path.is_file():
            return _load(path.resolve())
    raise UserError("pipeline", name, "not found")


def _load(path: Path) -> ModuleType:
    """Import a pipeline file, once in a process."""
    # The folder tells two files of one name apart. `PIPELINE_MODULES` of `kfp/configure.py` has the
    # beginning of this name, to find the pipelines that another one extends.
    name = f"tuneloop._pipelines.{path.stem}@{path.parent}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # Pydantic looks its annotations up there while the module is executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    except Exception as error:
        # A file that is half imported must not be taken for a pipeline later.
        del sys.modules[name]
        text = _join_lines(f"{type(error).__name__}: {error}")
        raise UserError("pipeline", str(path), f"cannot be imported ({text})") from error
    return module


def read_yaml_documents(field: str, file: Path) -> list[Any]:
    """Read the documents of a YAML file, which `field` names in messages.

    Raises:
        UserError: it cannot be read, or is no YAML.
    """
    try:
        return list(yaml.safe_load_all(file.read_text()))
    except OSError as error:
        raise UserError(field, str(file), f"cannot be read ({error.strerror})") from error
    # A day that no calendar has is no YAML, either: PyYAML raises ValueError for it.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(field, str(file), f"is not YAML ({_join_lines(str(error))})") from error


def _join_lines(text: str) -> str:
    """Return the message of a library as one line."""
    return " ".join(text.split())


def _read_mapping(file: Path) -> JsonObject:
    """Read a configuration file; an empty one sets nothing."""
    documents = read_yaml_documents("--config", file) or [None]
    values = documents[0]
    if len(documents) > 1 or not isinstance(values, dict | None):
        raise UserError("--config", str(file), "must hold a mapping of keys to values")
    return values or {}


def _expand_data(values: JsonObject) -> None:
    """Replace the short form of the section ``data`` by the long one, in place: a text is its
    ``source``, and a list of texts are several files. It goes by the name ``data``: a pipeline
    whose section for `data_prep` has another name has no short form."""
    data = values.get("data")
    if isinstance(data, str):
        values["data"] = {"source": data}
    elif isinstance(data, list) and data and all(isinstance(path, str) for path in data):
        values["data"] = {"source": "files", "source_args": {"path": data}}


def _set(values: JsonObject, item: str) -> tuple[JsonObject, str, Any]:
    """Set what ``section.key=value`` says, in place. Return the section that holds the key, the
    key, and the value that it had before (None if it was not set).

    Raises:
        UserError: it has another form, its value is no YAML, or a section on the way is a value.
    """
    path, equals, text = item.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise UserError("--set", item, "write key=value, or section.key=value")
    try:
        # YAML would take a pattern of files, such as *.jsonl, for an alias.
        value = text if text.startswith("*") else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        remedy = f"the value is not YAML: close its brackets, or quote it: '{path}=\"VALUE\"'"
        raise UserError("--set", item, remedy) from error
    section = values
    for name in keys[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise UserError("--set", item, f"{name} is a value, not a section")
    previous = section.get(keys[-1])
    section[keys[-1]] = value
    return section, keys[-1], previous
