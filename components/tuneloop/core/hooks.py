"""The hooks by which an extension joins the core.

An extension is a folder of ``tuneloop/extensions`` that ships with tuneloop, or a package of
somebody else. It declares what it adds in an `Extension`; the core looks declarations up and knows
no extension by its name. An extension that is absent adds nothing, and everything else works.

This file is the whole list of hooks for extensions. Variants of the core's own families (engines,
rewards, trackers, …) have the entry points of `tuneloop.core.plugins`.

Who looks them up: `cli/__init__.py` (commands), `config/extended.py` (settings),
`workflow/pod_hook.py` (pods), `core/component.py` and `runs/replay.py` (stages). A further hook is a
field of `Extension`, and its place in the core, which looks it up: nothing else reads a field.
docs/extending.md has an extension that is tested.
"""

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from tuneloop.core.errors import UserError

SHIPPED = "tuneloop.extensions"
"""The package of the extensions that ship with tuneloop, and the group of the entry points of all
others.
"""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an extension adds to the core.

    Objects are named as ``package.module:attribute``, so that a declaration imports nothing. The
    modules of commands are imported whenever `tuneloop` starts: what is slow to import belongs
    inside their functions.

    Attributes:
        name: how messages name the extension.
        commands: name of a command → the function that Typer makes it of.
        command_groups: name of a group of commands → its `typer.Typer`.
        settings: key of a section of the configuration (``name``, or ``cluster.name`` inside of
            another one) → the pydantic class of the section, which is null unless it is set. The
            first sentence of the class's docstring describes it.
        pod: the `tuneloop.workflow.pod_hook.PodHook` that changes rendered pods; empty: none.
        stages: name of a stage → its `tuneloop.core.component.Component`, for pipelines that have
            it as a step. What reads a plan or replays a run loads the stage by it.
    """

    name: str
    commands: Mapping[str, str] = field(default_factory=dict)
    command_groups: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    pod: str = ""
    stages: Mapping[str, str] = field(default_factory=dict)

    def load(self, path: str) -> Any:
        """Import the object ``package.module:attribute``.

        Raises:
            UserError: it cannot be imported.
        """
        try:
            return pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            remedy = f"{path} cannot be imported ({error}): mend the extension, or uninstall it"
            raise UserError("extension", self.name, remedy) from error


def list_shipped_extensions() -> Iterator[Extension]:
    """Yield the extensions that ship with tuneloop; none where an image leaves their folder out."""
    # A test takes the folder away by None in `sys.modules`, which is the same error.
    try:
        package = importlib.import_module(SHIPPED)
    except ModuleNotFoundError as error:
        if error.name != SHIPPED:
            raise
        return
    for module in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{SHIPPED}.{module.name}").EXTENSION


def list_installed_extensions() -> Iterator[Extension]:
    """Yield the extensions of other packages: their entry points in the group
    ``tuneloop.extensions``.

    The metadata of every installed package is read for it (about 50 ms with 300 packages).

    Raises:
        UserError: an entry point cannot be imported, or is no `Extension`.
    """
    for entry in entry_points(group=SHIPPED):
        try:
            extension = entry.load()
        except (ImportError, AttributeError) as error:
            remedy = f"cannot be imported ({error}): mend the package, or uninstall it"
            raise UserError("extension", f"{entry.name} = {entry.value}", remedy) from error
        if not isinstance(extension, Extension):
            remedy = "is no tuneloop.core.hooks.Extension: mend the package, or uninstall it"
            raise UserError("extension", f"{entry.name} = {entry.value}", remedy)
        yield extension


@functools.cache
def list_extensions() -> tuple[Extension, ...]:
    """Return all extensions, which are searched once in a process.

    A pipeline whose pods an extension changes is not rendered without the change, so that a faulty
    extension is an error here, whatever it declares.

    Raises:
        UserError: as `list_installed_extensions`.
    """
    return (*list_shipped_extensions(), *list_installed_extensions())


def find_extension_stage(name: str) -> str:
    """Return the path ``package.module:attribute`` of an extension's stage; empty: none has it."""
    for extension in list_extensions():
        if name in extension.stages:
            return extension.stages[name]
    return ""
