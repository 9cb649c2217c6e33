"""A stage as a program: flags in, exit code and output files out."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.core import fencing
from tuneloop.core.artifacts import split_ref
from tuneloop.core.attempts import Exhausted, wait_before_ending
from tuneloop.core.errors import (
    EXIT_GAVE_UP,
    EXIT_RETRY,
    EXIT_USER,
    UNAVAILABLE,
    Retryable,
    Unavailable,
    UserError,
    name_class,
    say,
    write_termination_message,
)

if TYPE_CHECKING:
    from tuneloop.core.component import Component

TRAINING = {"torch", "transformers", "peft", "safetensors", "tokenizers", "datasets"}
"""What comes with the extra ``train``."""


def run(component: Component, argv: Sequence[str]) -> int:
    """Run as a program and return the exit code; ended early where the process has lost its turn."""
    with fencing.watched():
        return _run(component, argv)


def _run(component: Component, argv: Sequence[str]) -> int:
    try:
        fencing.grant()  # one that was refused begins nothing
        arguments = vars(_parser(component).parse_args(argv))
        given = {k: v for k, v in arguments.items() if v not in (None, "")}  # a workflow passes "" for absent
        url = given.pop(component.output)
        manifest = component(out=url, **given)
        if int(os.environ.get("RANK", "0")) == 0:
            write_outputs({component.output: f"{split_ref(url)[0]}@{manifest.digest}", **manifest.results})
        return 0
    except UserError as error:
        return _say(f"error: {error}", EXIT_USER)
    except Retryable as error:
        code = _say(f"{name_class(error)}: {error}", EXIT_RETRY)
        if isinstance(error, Unavailable):
            wait_before_ending()
        return code
    except Exhausted as error:
        return _say(f"gave up: {error}", EXIT_GAVE_UP)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return _say(f"{UNAVAILABLE}: disk full ({error.filename}); free space, then run it again", EXIT_RETRY)
        if _lost_peer(error):
            why = f"{UNAVAILABLE}: another process of this stage has ended ({error})"
            return _say(why, EXIT_RETRY, replace=False)  # that one says why
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
            mistake = UserError("package", error.name, "is not installed; pip install 'tuneloop[train]'")
            return _say(f"error: {mistake}", EXIT_USER)
        traceback.print_exc()
        write_termination_message(f"bug: {type(error).__name__}: {error}")
        return 1


def _parser(component: Component) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"python -m tuneloop.stages.{component.name}", description=component.__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("artifacts")
    for name, required in component.inputs.items():
        group.add_argument(f"--{flag(name)}", dest=name, required=required, metavar="REF")
    about = "where the output is committed"
    group.add_argument(f"--{flag(component.output)}", dest=component.output, required=True, metavar="URL", help=about)
    group = parser.add_argument_group("parameters")
    for name, field in component.Params.model_fields.items():
        about = (field.description or "").replace("%", "%%")
        default = "required" if field.is_required() else f"default: {field.default}".replace("%", "%%")
        group.add_argument(
            f"--{flag(name)}", dest=name, metavar=name.upper(), type=_decoder(field), help=f"{about} ({default})"
        )
    return parser


def write_outputs(values: Mapping[str, Any]) -> None:
    """One file a value below ``$TUNELOOP_OUTPUTS``, where the workflow engine picks them up."""
    directory = os.environ.get("TUNELOOP_OUTPUTS")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value)
            Path(directory, name.replace("_", "-")).write_text(text)


def flag(name: str) -> str:
    """A Python name in kebab-case: of a flag, an output file, a workflow parameter."""
    return name.replace("_", "-")


def _decoder(field: FieldInfo) -> Callable[[str], Any]:
    """Flags hold text: lists, tuples, dicts and models come as JSON, the rest is pydantic's to convert."""

    def decode(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    return decode if _is_structured(field.annotation) else str


def _is_structured(annotation: Any) -> bool:
    parts = [annotation, *get_args(annotation)]
    if get_origin(annotation) is Literal:
        return False
    for part in parts:
        origin = get_origin(part) or part
        if origin in (dict, list, tuple, type(None)) or (isinstance(origin, type) and issubclass(origin, BaseModel)):
            return True
    return False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(self.prog, message, "see --help")


def _lost_peer(error: Exception) -> bool:
    """Whether a collective failed because a process at its other end did; that one says why."""
    torch = sys.modules.get("torch")
    if torch is None or "RANK" not in os.environ:
        return False
    own = (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)
    return isinstance(error, own) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _say(line: str, code: int, *, replace: bool = True) -> int:
    """Say why this rank ends; `replace`: in place of what another rank has left as the pod's termination message."""
    rank = int(os.environ.get("RANK", "0"))
    kind, _, rest = line.partition(": ")
    return say(f"{kind}: rank {rank}: {rest}" if rank else line, code, replace)
