"""Sources by name: which one a setting means, its arguments checked, its rows loaded.

`stages/data_prep.py` validates its options by the functions ``check_…`` when a run is configured,
and loads rows by `load_source` in its pod. A change of what ``data.source`` may mean is made in
`find_source_of`, `check_source` and `check_arguments`.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError, ValidationInfo, validate_call

from tuneloop.core import plugins
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data import Splits
from tuneloop.data.columns import Columns
from tuneloop.data.files import Part, check_beside_mixture
from tuneloop.data.layouts import find_layout
from tuneloop.data.readers.opening import is_place

FILES = "files"
"""The source that a path, a glob, a folder or a name on the hub stands for."""


def is_source_name(source: str) -> bool:
    """Return whether a text names a source, by a short name or a dotted path, and no place."""
    # What is installed is looked through only for a name that does not ship: it takes a while.
    if source in plugins.list_shipped_variants("data"):
        return True
    if ":" in source:
        return "/" not in source and not is_place(source)
    return source in plugins.list_variants("data")


def find_source_of(parameters: JsonMapping) -> tuple[str, JsonObject]:
    """Return the source that the parameters of `data_prep` name, and its arguments: a path stands
    for `FILES`. Raises UserError: a setting of files beside another source.

    An option of `stages/data_prep.py` that is an argument of `data/files.py: load_splits` has to be
    in the table `settings` here, or it never gets there.
    """
    settings = {name: parameters.get(name) for name in ("layout", "columns", "mixture")}
    file_settings = {name: value for name, value in settings.items() if value}
    source = parameters["source"]
    arguments = dict(parameters.get("source_args", {}))
    if file_settings.get("mixture"):
        # It names its files itself, whatever the source is by default.
        source = FILES
    elif not is_source_name(source):
        arguments["path"] = source
        source = FILES
    if file_settings and source != FILES:
        setting, value = next(iter(file_settings.items()))
        raise UserError(f"data.{setting}", value, f"is for files; {source} makes its own rows")
    return source, arguments | file_settings


def digest_source_of(params: Any) -> dict[str, str]:
    """Return the digest of the files that a source reads, as an entry of the artifact's identity:
    with other bytes the stage does not take what is committed for its own. Empty if it reads none,
    or if an entry point names a function: only a module has a ``digest_source``."""
    try:
        source, arguments = find_source_of(vars(params))
        module = plugins.load_variant("data", source)
        # A dotted path leads to a function, and the one that digests stands beside it.
        if ":" in source:
            module = importlib.import_module(source.partition(":")[0])
    except (ImportError, UserError):
        # The stage says so, if it runs.
        return {}
    digest_source = getattr(module, "digest_source", None)
    digest = digest_source(arguments) if digest_source else None
    return {"source_digest": digest} if digest else {}


def _find_loader(source: str, arguments: JsonMapping, prefix: str) -> Callable[..., Splits]:
    """Find the loader of a source, and check the names of its arguments; `prefix` begins their
    errors."""
    load: Callable[..., Splits] = plugins.load_variant("data", source, "load_splits")
    # The first two parameters, the number of rows and the seed, are not the user's.
    parameters = plugins.check_variant_args(source, load, arguments, first=2, prefix=prefix)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{prefix}{name}", None, f"is required by {source}")
    return load


def check_source(source: str) -> str:
    """Refuse what is neither a source nor a place."""
    if source and not is_source_name(source) and not is_place(source):
        names = ", ".join(plugins.list_variants("data"))
        remedy = f"unknown; known: {names}, a dotted path pkg.mod:attr, a file, a glob or a folder"
        raise ValueError(remedy)
    return source


def check_arguments(written: JsonObject, info: ValidationInfo) -> JsonObject:
    """Refuse wrong arguments before anything runs, if the source ships with tuneloop and its
    packages are installed.

    Args:
        written: the option ``source_args``.
        info: has the options that stand before it in the class, of which `source` and `mixture` are
            read here.
    """
    arguments = written
    # None: refused already.
    source = info.data.get("source")
    if info.data.get("mixture"):
        source = FILES
        check_beside_mixture(arguments)
    elif source is not None and not is_source_name(source):
        arguments = written | {"path": source}
        source = FILES
    if source == FILES and not (arguments.get("path") or info.data.get("mixture")):
        raise UserError("path", None, "is required: a file, a glob, a folder or hf://…")
    if source in plugins.list_shipped_variants("data"):
        with suppress(ImportError):
            load = _find_loader(source, arguments, "")

            @functools.wraps(load)
            def accept(*_: Any, **__: Any) -> None:
                """Take the place of the loader: its types are checked, and nothing is loaded."""

            try:
                validate_call(accept)(0, 0, **arguments)
            except ValidationError as error:
                raise convert_validation_error(error) from None
    return written


def check_layout(layout: str | None) -> str | None:
    """Refuse an unknown layout."""
    if layout is not None:
        try:
            find_layout(layout)
        except UserError as error:
            # The setting that is validated is named by its validation.
            raise ValueError(error.remedy) from error
    return layout


def check_columns(columns: JsonObject) -> JsonObject:
    """Refuse columns that `Columns` does not take. They stay as they were written: defaults do not
    become part of a run's settings."""
    try:
        Columns(**columns)
    except ValidationError as error:
        raise convert_validation_error(error) from None
    return columns


def check_mixture(mixture: list[JsonObject]) -> list[JsonObject]:
    """Refuse sources of a mixture that `Part` does not take."""
    for number, part in enumerate(mixture):
        try:
            Part(**part)
        except ValidationError as error:
            raise convert_validation_error(error, f"{number}.") from None
    return mixture


def load_source(source: str, arguments: JsonMapping, n: int, seed: int) -> Splits:
    """Load the splits of a source, its arguments checked against the types that it declares.

    Args:
        n: rows that are asked for in all splits together.

    Raises:
        UserError: an unknown source or argument, a wrong type, or a package that is not installed.
            The message names an extra of ``pyproject.toml``, which is chosen here by the source.
    """
    try:
        load = _find_loader(source, arguments, "source_args.")
    except ImportError as error:
        extra = "rewards" if source == "reasoning_gym" else "train"
        remedy = f"needs {error.name or error}; pip install 'tuneloop[{extra}]'"
        raise UserError("data_prep.source", source, remedy) from error
    try:
        splits: Splits = validate_call(load)(n, seed, **arguments)
    except ValidationError as error:
        raise convert_validation_error(error, "source_args.") from None
    return splits
