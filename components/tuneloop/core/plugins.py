"""Find a variant of a family by name, dotted path or entry point: adding one edits no central file."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from pydantic import AfterValidator

from tuneloop.core.errors import UserError

PACKAGES = {
    "engines": "inference.engines",
    "fleet": "inference.fleet",
    "backends": "training.backends",
}
"""Family → its package below tuneloop, where that has another name."""


def list_variants(family: str) -> list[str]:
    """List the variants of `family` that ship with tuneloop or are registered by entry point."""
    named = (entry.name for entry in _registered().select(group=f"tuneloop.{family}"))
    return sorted({*list_shipped_variants(family), *named})


def load_variant(family: str, name: str, attribute: str | None = None) -> Any:
    """Load the variant `name` of `family`: a module of its package, else an entry point in group ``tuneloop.<family>``,
    or ``package.module:attr``. `attribute` is that of a module found by its short name. Raises UserError: unknown."""
    if ":" in name:
        module, _, path = name.partition(":")
        try:
            return getattr(importlib.import_module(module), path)
        except (ImportError, AttributeError) as error:
            raise UserError(family, name, f"cannot be imported ({error})") from error
    if name not in list_shipped_variants(family):
        for entry in _registered().select(group=f"tuneloop.{family}", name=name):
            return entry.load()
        remedy = (
            f"unknown; known: {', '.join(list_variants(family))}, or a dotted path pkg.mod:attr"
        )
        raise UserError(family, name, remedy)
    module_ = importlib.import_module(f"{_package(family)}.{name}")
    return module_ if attribute is None else getattr(module_, attribute)


def check_variant_args(
    name: str, function: Callable[..., Any], given: Mapping[str, Any], *, first: int, prefix: str
) -> dict[str, inspect.Parameter]:
    """Return the parameters of `function` from `first` on. Raises UserError if `given` has others (`prefix` + name)."""
    known = dict(list(inspect.signature(function).parameters.items())[first:])
    for each, value in given.items():
        if each not in known:
            raise UserError(
                f"{prefix}{each}",
                value,
                f"unknown; {name} takes {', '.join(known) or 'no arguments'}",
            )
    return known


def validate_variant(family: str) -> AfterValidator:
    """Return a validator that refuses unknown names; a dotted path passes, as only the stage's image need have it."""

    def check(name: str) -> str:
        here = ":" in name or name in list_shipped_variants(
            family
        )  # else the metadata of all packages is searched
        if not here and name not in list_variants(family):
            raise ValueError(
                f"unknown; known: {', '.join(list_variants(family))}, or a dotted path pkg.mod:attr"
            )
        return name

    return AfterValidator(check)


@cache
def list_shipped_variants(family: str) -> list[str]:
    """List the variants of `family` that ship with tuneloop: its modules, but for those of ``NOT_VARIANTS``."""
    package = importlib.import_module(_package(family))
    others = getattr(package, "NOT_VARIANTS", ())
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in found if not name.startswith("_") and name not in others]


def _package(family: str) -> str:
    return f"tuneloop.{PACKAGES.get(family, family)}"


@cache
def _registered() -> Any:
    """Read the metadata of every distribution that is installed, once a process."""
    return entry_points()
