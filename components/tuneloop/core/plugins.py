"""Find a variant of a family by name, dotted path or entry point: adding one edits no central
file.

A family is a kind of plugin (``rewards``, ``engines``, ``data``), and a variant is one of them
(``rewards.numeric``). The variants of a family are the modules of one package.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from pydantic import AfterValidator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping

PACKAGES = {
    "engines": "inference.engines",
    "fleet": "inference.fleet",
    "backends": "training.backends",
}
"""Family → its package below tuneloop, where that has another name. Entry points are in the group
``tuneloop.<family>`` all the same; `tests/unit/test_references.py: GROUPS` lists those groups."""


def list_variants(family: str) -> list[str]:
    """List the variants of `family` that ship with tuneloop or are registered by entry point."""
    names = set(list_shipped_variants(family))
    names.update(entry.name for entry in _registered().select(group=f"tuneloop.{family}"))
    return sorted(names)


def load_variant(family: str, name: str, attribute: str | None = None) -> Any:
    """Load a variant.

    Args:
        family: its family, such as ``rewards``.
        name: of a module of the family's package, else of an entry point in group
            ``tuneloop.<family>``; or a dotted path ``package.module:attribute``.
        attribute: of the module, if the variant is one of the family's package, or an entry point
            that names a whole module.

    Raises:
        UserError: it is unknown, or a dotted path that cannot be imported.
        ImportError: a shipped or registered variant lacks its library. The caller says which extra
            has it (`rewards/registry.py`, `data/sources.py`).
    """
    if ":" in name:
        module_name, _, path = name.partition(":")
        try:
            return getattr(importlib.import_module(module_name), path)
        except (ImportError, AttributeError) as error:
            raise UserError(family, name, f"cannot be imported ({error})") from error
    if name not in list_shipped_variants(family):
        for entry in _registered().select(group=f"tuneloop.{family}", name=name):
            variant = entry.load()
            is_module = not entry.attr
            return getattr(variant, attribute) if is_module and attribute else variant
        raise UserError(family, name, _explain_names(family))
    # Only now: the module of an engine or a tracker imports its library.
    module = importlib.import_module(f"{_package(family)}.{name}")
    return getattr(module, attribute) if attribute else module


def find_module(family: str, name: str) -> ModuleType | None:
    """Find the module of a variant that describes itself where a run is configured.

    Engines alone are asked so, for their ``CAPABILITIES`` and arguments (`inference/engines`,
    `config/engines.py`).

    Returns:
        That of a variant that ships, or whose entry point names a whole module (``name =
        "package.module"``). None for a dotted path, an entry point of an attribute and an unknown
        name: only the stage's image need have their code.

    Raises:
        UserError: the module cannot be imported.
    """
    if name in list_shipped_variants(family):
        return importlib.import_module(f"{_package(family)}.{name}")
    # What is installed is looked through last: it takes as long as reading a configuration.
    if ":" in name:
        return None
    for entry in _registered().select(group=f"tuneloop.{family}", name=name):
        if entry.attr:
            return None
        try:
            return importlib.import_module(entry.module)
        except ImportError as error:
            remedy = (
                f"{entry.value} cannot be imported ({error}): mend the package, or uninstall it"
            )
            raise UserError(family, name, remedy) from error
    return None


def check_variant_args(
    name: str,
    function: Callable[..., Any],
    arguments: JsonMapping,
    *,
    first: int,
    prefix: str,
) -> dict[str, inspect.Parameter]:
    """Check that a variant takes some arguments.

    Args:
        name: of the variant, for the message.
        function: what makes it.
        arguments: its keyword arguments.
        first: how many parameters of the function come from the caller, and not from the user;
            these are its first ones.
        prefix: of the argument's name in the message, such as ``rollout.engine_args.``.

    Returns:
        The parameters that the user may set.

    Raises UserError if an argument is none of these.
    """
    parameters = dict(list(inspect.signature(function).parameters.items())[first:])
    for argument, value in arguments.items():
        if argument not in parameters:
            remedy = f"unknown; {name} takes {', '.join(parameters) or 'no arguments'}"
            raise UserError(f"{prefix}{argument}", value, remedy)
    return parameters


def validate_variant(family: str) -> AfterValidator:
    """Return a validator that refuses unknown names.

    A dotted path passes, as only the stage's image need have it.
    """

    def check(name: str) -> str:
        # To look among entry points reads the metadata of all packages, so it comes last.
        is_known = ":" in name or name in list_shipped_variants(family)
        if not is_known and name not in list_variants(family):
            raise ValueError(_explain_names(family))
        return name

    return AfterValidator(check)


def _explain_names(family: str) -> str:
    names = ", ".join(list_variants(family))
    return f"unknown; known: {names}, or a dotted path pkg.mod:attr"


@cache
def list_shipped_variants(family: str) -> list[str]:
    """List the modules of a family's package: each is a variant that users may name.

    A module with parts of other variants begins with an underscore, or the package's
    ``__init__.py`` lists it in ``NOT_VARIANTS``: without either it is offered to users, in messages
    and by `tuneloop schema`, and fails where it is loaded.
    """
    package = importlib.import_module(_package(family))
    excluded = getattr(package, "NOT_VARIANTS", ())
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [name for name in names if not name.startswith("_") and name not in excluded]


def _package(family: str) -> str:
    return f"tuneloop.{PACKAGES.get(family, family)}"


@cache
def _registered() -> Any:
    """Read the metadata of every distribution that is installed, once a process."""
    return entry_points()
