"""A stage as a program: flags in, exit code and output files out."""

import argparse
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.core import errors, fencing
from tuneloop.core.attempts import wait_before_ending

TRAINING = {"torch", "transformers", "peft", "safetensors", "tokenizers", "datasets"}
"""Libraries that the extra ``train`` installs."""


@fencing.watch_lease()
def run_component(work: Callable[[], None]) -> int:
    """Run a component as a program and return its exit code; end early if the device lease is lost."""
    try:
        fencing.read_lease_grant()  # a refused lease ends the program here
        work()
        return 0
    except BaseException as error:
        # Also torch's CheckpointException is no Exception.
        if disk := errors.find_disk_error(error):
            return _end(disk)
        if isinstance(error, errors.UserError | errors.Retryable | errors.Exhausted):
            return _end(error)
        if not isinstance(error, Exception):
            raise
        if _lost_peer(error):
            lost = errors.Unavailable(f"another process of this stage has ended ({error})")
            return _say(*errors.describe_error(lost), replace=False)  # the other process says why
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
            remedy = "is not installed; pip install 'tuneloop[train]'"
            return _say(*errors.describe_error(errors.UserError("package", error.name, remedy)))
        traceback.print_exc()
        errors.write_termination_message(f"bug: {type(error).__name__}: {error}")
        return 1


def _end(error: errors.UserError | errors.Retryable | errors.Exhausted) -> int:
    """Say why this attempt ends, wait a while where a service is unavailable, and return the exit code."""
    code = _say(*errors.describe_error(error))
    if isinstance(error, errors.Unavailable):
        wait_before_ending()
    return code


def parse_arguments(
    argv: Sequence[str],
    module: str,
    description: str | None,
    inputs: Mapping[str, bool],
    output: str,
    fields: Mapping[str, FieldInfo],
) -> dict[str, Any]:
    """Parse a stage's inputs, output and parameters. Raises UserError: a flag is unknown, missing or incomplete."""
    parser = Parser(f"python -m {module}", description)
    group = parser.add_argument_group("artifacts")
    for each, required in inputs.items():
        group.add_argument(f"--{to_kebab_case(each)}", dest=each, required=required, metavar="REF")
    text = "where the output is committed"
    group.add_argument(
        f"--{to_kebab_case(output)}", dest=output, required=True, metavar="URL", help=text
    )
    group = parser.add_argument_group("parameters")
    for each, field in fields.items():
        default = "required" if field.is_required() else f"default: {field.default}"
        text = f"{field.description or ''} ({default})".replace("%", "%%")
        group.add_argument(
            f"--{to_kebab_case(each)}",
            dest=each,
            metavar=each.upper(),
            type=_decoder(field),
            help=text,
        )
    given = vars(parser.parse_args(argv))
    return {
        key: value for key, value in given.items() if value not in (None, "")
    }  # a workflow passes "" for absent


def write_outputs(values: Mapping[str, Any]) -> None:
    """Write one file a value below ``$TUNELOOP_OUTPUTS``, where the workflow engine picks them up."""
    if directory := os.environ.get("TUNELOOP_OUTPUTS"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            Path(directory, to_kebab_case(name)).write_text(encode_value(value))


def to_kebab_case(name: str) -> str:
    """Convert a Python name to kebab-case, for a flag, an output file or a workflow parameter."""
    return name.replace("_", "-")


def encode_flags(values: Mapping[str, Any]) -> list[str]:
    """Encode values as flags: ``{"a_b": 1, "c": [2]}`` → ``["--a-b", "1", "--c", "[2]"]``; None is left out."""
    given = {
        to_kebab_case(name): encode_value(value)
        for name, value in values.items()
        if value is not None
    }
    return [word for name, text in given.items() for word in (f"--{name}", text)]


def encode_value(value: Any) -> str:
    """Return text as it is, anything else as JSON without spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _decoder(field: FieldInfo) -> Callable[[str], Any]:
    """Return what reads a flag's text: lists, dicts and models come as JSON, the rest is pydantic's to convert."""

    def decode(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    if get_origin(field.annotation) is Literal:
        return str
    kinds = [get_origin(part) or part for part in (field.annotation, *get_args(field.annotation))]
    structured = (BaseModel, dict, list, tuple, type(None))
    return (
        decode
        if any(isinstance(kind, type) and issubclass(kind, structured) for kind in kinds)
        else str
    )


class Parser(argparse.ArgumentParser):
    """Reads flags that are written out in full; raises a UserError for one that is unknown, missing or impossible."""

    def __init__(self, prog: str, description: str | None) -> None:
        shown = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=shown)

    def error(self, message: str) -> typing.NoReturn:
        raise errors.UserError(self.prog, message, "see --help")


def _lost_peer(error: Exception) -> bool:
    """Say whether a collective failed because another process of it ended; that process reports the cause."""
    torch = sys.modules.get("torch")
    if torch is None or "RANK" not in os.environ:
        return False
    own = (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)
    return isinstance(error, own) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _say(line: str, code: int, *, replace: bool = True) -> int:
    """Say why this rank ends; `replace`: in place of what another rank has left as the pod's termination message."""
    rank = int(os.environ.get("RANK", "0"))
    kind, _, rest = line.partition(": ")
    return errors.print_diagnostic(f"{kind}: rank {rank}: {rest}" if rank else line, code, replace)
