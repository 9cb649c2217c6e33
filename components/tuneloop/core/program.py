"""A stage as a program: flags in, exit code and output files out.

`core/component.py` calls it, which has what a stage is. Exit code and last line decide what the
workflow engine does next (`core/ends.py`); the output files are those that Argo's template and the
local executor declare (`argo/pod_fields.py`).
"""

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.core import errors, fencing
from tuneloop.core.attempts import wait_before_ending
from tuneloop.core.json_types import JsonMapping, JsonObject

TRAINING = {"torch", "transformers", "peft", "safetensors", "tokenizers", "datasets"}
"""Libraries that the extra ``train`` of pyproject.toml installs: one that is missing is the user's
mistake. Any other missing module is a bug here, unless who imports it says which extra has it."""
UNKNOWN_ADDRESS = re.compile(r"\{\{tasks\.([\w-]+)\.ip\}\}")
"""What Argo leaves in an argument for the address of a daemon whose pod has none at the moment."""


@fencing.watch_lease()
def run_component(work: Callable[[], None]) -> int:
    """Run a component as a program and return its exit code.

    The program ends early if the device lease is lost.
    """
    try:
        # A refused lease ends the program before any work.
        fencing.read_lease_grant()
        work()
        return 0
    except BaseException as error:
        # Also torch's CheckpointException is no Exception.
        disk = errors.find_disk_error(error)
        if disk:
            return _end(disk)
        if isinstance(error, errors.UserError | errors.Retryable | errors.Exhausted):
            return _end(error)
        if not isinstance(error, Exception):
            raise
        if _lost_peer(error):
            lost = errors.Unavailable(f"another process of this stage has ended ({error})")
            # The process that ended says why, in the same termination message.
            return _report(*errors.describe_error(lost), replace=False)
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
            remedy = "is not installed; pip install 'tuneloop[train]'"
            return _end(errors.UserError("package", error.name, remedy))
        traceback.print_exc()
        errors.write_termination_message(f"bug: {type(error).__name__}: {error}")
        return 1


def check_addresses(argv: Sequence[str]) -> None:
    """Check that Argo knew the addresses in a program's arguments when it created the pod.

    Raises:
        Unavailable: a server was just being started again. The next attempt is told its address.
    """
    for argument in argv:
        match = UNKNOWN_ADDRESS.search(argument)
        if match:
            raise errors.Unavailable(
                f"server: {match[1]} has no address yet: this pod was created while the server was"
                " being started again"
            )


def _end(error: errors.UserError | errors.Retryable | errors.Exhausted) -> int:
    """Say why this attempt ends, wait a while where a service is unavailable, and return the exit
    code.
    """
    code = _report(*errors.describe_error(error))
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
) -> JsonObject:
    """Parse a stage's inputs, output and parameters.

    Args:
        argv: the flags, such as ``--policy REF``.
        module: that ``python -m`` runs, for the help.
        description: of the stage, for the help.
        inputs: name of an input → whether it is required.
        output: the name of the output.
        fields: name of a parameter → its field.

    Returns:
        The values that were passed, by name. An empty text counts as not passed, since workflows
        pass it for what is absent, unless the parameter's default is a text.

    Raises UserError if a flag is unknown, missing or incomplete.
    """
    parser = Parser(f"python -m {module}", description)
    group = parser.add_argument_group("artifacts")
    for name, is_required in inputs.items():
        group.add_argument(
            f"--{to_kebab_case(name)}",
            dest=name,
            required=is_required,
            metavar="REF",
        )
    group.add_argument(
        f"--{to_kebab_case(output)}",
        dest=output,
        required=True,
        metavar="URL",
        help="where the output is committed",
    )
    group = parser.add_argument_group("parameters")
    for name, field in fields.items():
        default = "required" if field.is_required() else f"default: {field.default}"
        # argparse substitutes what follows a percent sign.
        text = f"{field.description or ''} ({default})".replace("%", "%%")
        group.add_argument(
            f"--{to_kebab_case(name)}",
            dest=name,
            metavar=name.upper(),
            type=_decoder(field),
            help=text,
        )
    values = vars(parser.parse_args(argv))
    # A workflow passes "" for what is absent: an input, or a parameter whose default is no text.
    texts = {name for name, field in fields.items() if isinstance(field.default, str)}
    absent = {name: (None,) if name in texts else (None, "") for name in values}
    return {name: value for name, value in values.items() if value not in absent[name]}


def write_outputs(values: JsonMapping) -> None:
    """Write one file a value below ``$TUNELOOP_OUTPUTS``, where the workflow engine reads them.

    Their names are those that `argo/pod_fields.py` declares as outputs; `local/iterations.py` reads
    the files of the stages that it runs in its own process.
    """
    directory = os.environ.get("TUNELOOP_OUTPUTS")
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            Path(directory, to_kebab_case(name)).write_text(encode_value(value))


def to_kebab_case(name: str) -> str:
    """Convert a Python name to kebab-case, for a flag, an output file or a workflow parameter."""
    return name.replace("_", "-")


def encode_flags(values: JsonMapping) -> list[str]:
    """Encode values as flags: ``{"a_b": 1, "c": [2]}`` → ``["--a-b", "1", "--c", "[2]"]``.

    None is left out.
    """
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{to_kebab_case(name)}", encode_value(value)]
    return flags


def encode_value(value: object) -> str:
    """Return text as it is, anything else as JSON without spaces."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _decoder(field: FieldInfo) -> Callable[[str], Any]:
    """Return what reads a flag's text.

    Lists, dicts and models come as JSON. Pydantic converts everything else. The values of a
    ``Literal`` stay text, so one of numbers would refuse every flag.
    """
    if get_origin(field.annotation) is Literal:
        return str
    structured = (BaseModel, dict, list, tuple, type(None))
    for part in (field.annotation, *get_args(field.annotation)):
        kind = get_origin(part) or part
        if isinstance(kind, type) and issubclass(kind, structured):
            return _decode_json
    return str


def _decode_json(text: str) -> Any:
    """Parse JSON; text that is none stays as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Parser(argparse.ArgumentParser):
    """A parser of flags that are written out in full.

    It raises a UserError for one that is unknown, missing or impossible.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise errors.UserError(self.prog, message, "see --help")


def _lost_peer(error: Exception) -> bool:
    """Return whether a collective failed because another process of it ended.

    That process reports the cause.
    """
    torch = sys.modules.get("torch")
    if torch is None or "RANK" not in os.environ:
        return False
    kinds = (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)
    if isinstance(error, kinds):
        return True
    # Gloo raises a plain RuntimeError with the place in its own source.
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def _report(line: str, code: int, *, replace: bool = True) -> int:
    """Say why this rank ends, and return its exit code.

    Args:
        replace: in place of what another rank has left as the pod's termination message.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        kind, _, message = line.partition(": ")
        line = f"{kind}: rank {rank}: {message}"
    return errors.print_diagnostic(line, code, replace)
