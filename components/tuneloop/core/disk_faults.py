"""What a disk refuses, whatever library says so: no room, no quota, read-only, an I/O error.

Python raises OSError with an errno. Libraries that write by themselves raise errors of their own,
which have the system's text alone: safetensors, tokenizers and obstore (Rust's ``No space left on
device (os error 28)``), shutil, sqlite3. PyTorch's file writer and NumPy say only that fewer bytes
were written than they had.

Any other error may quote these texts, and many libraries number errors of their own: CUDA's 30 is
no read-only file system. Of such an error only a number counts that says whose it is.
"""

import errno
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path


@dataclass(frozen=True)
class DiskFault:
    """A kind of refusal.

    Attributes:
        name: what it is called in messages.
        remedy: what a person does about it.
        numbers: the errno values by which Python's errors say it.
        certain: matches the texts by which any error says it, such as a number of the system.
        worded: matches the texts by which an error of a library in WRITERS says it.
    """

    name: str
    remedy: str
    numbers: tuple[int, ...]
    certain: re.Pattern[str]
    worded: re.Pattern[str]


WRITERS = (
    "safetensors",
    "tokenizers",
    "obstore",
    "shutil",
    "sqlite3",
    "pyarrow",
    "numpy",
    "zstandard",
    # The rest of torch raises errors of CUDA and NCCL.
    "torch.distributed.checkpoint",
)
"""Modules whose errors are believed when they say in words what a disk refused."""


def _compile(*texts: str) -> re.Pattern[str]:
    """Compile `texts` into one pattern; without any it matches nothing."""
    return re.compile("|".join(texts) or r"(?!)", re.IGNORECASE)


def _compile_numbers(numbers: tuple[int, ...]) -> re.Pattern[str]:
    """Compile Rust's, Python's and Arrow's forms of an errno into one pattern."""
    return _compile(*(rf"\(os error {number}\)|\[errno {number}\]" for number in numbers))


_ROOM = (errno.ENOSPC,)
_QUOTA = (errno.EDQUOT,)
_READ_ONLY = (errno.EROFS,)
# A server of NFS that was started anew forgets handles: opening the file again is right.
_BROKEN = (errno.EIO, errno.ESTALE)

NO_ROOM = DiskFault(
    "disk full",
    "free space there",
    _ROOM,
    _compile_numbers(_ROOM),
    _compile(
        "No space left on device",
        "database or disk is full",
        "Not enough (free )?disk space",
        "Insufficient Storage",
    ),
)
NO_QUOTA = DiskFault(
    "disk quota used up",
    "free space there or raise the quota",
    _QUOTA,
    _compile_numbers(_QUOTA),
    _compile("Disk quota exceeded"),
)
READ_ONLY = DiskFault(
    "read-only file system",
    "mount it for writing",
    _READ_ONLY,
    _compile_numbers(_READ_ONLY),
    _compile("Read-only file system", "attempt to write a readonly database"),
)
"""`core/errors.py: DiskError` asks for this one: `Store.check_writable` makes it the user's
mistake."""
BROKEN = DiskFault(
    "I/O error of the disk",
    "check the disk or its mount",
    _BROKEN,
    _compile_numbers(_BROKEN),
    _compile("Input/output error", "disk I/O error", "Stale file handle"),
)
CUT_SHORT = DiskFault(
    "file could not be written",
    "free space there, or check the disk",
    (),
    # PyTorch says these in a plain RuntimeError.
    _compile(
        r"inline_container\.cc.*(unexpected pos|file write failed)",
        "PytorchStreamWriter failed writing",
        "basic_ios::clear: iostream error",
        r"^\d+ requested and \d+ written$",
    ),
    _compile(),
)
FAULTS = (NO_ROOM, NO_QUOTA, READ_ONLY, BROKEN, CUT_SHORT)
"""All kinds, the more telling before those that only say that a write failed: of several in one
chain of errors, `find_refusal` takes the first. Each is one `core/errors.py: DiskError`, which is
retried as unavailable."""
_DEEPEST = 12
"""How many links are followed, from an error to those behind it and to its arguments."""


@dataclass(frozen=True)
class Refusal:
    """What a disk refused: its kind, the file (empty where no error names one), and the words."""

    fault: DiskFault
    path: str
    detail: str


def find_refusal(error: BaseException) -> Refusal | None:
    """Find what a disk refused: in an error, behind it, or among its arguments."""
    readings = [_read_refusal(other) for other in _walk(error)]
    refusals = [reading for reading in readings if reading]
    if not refusals:
        return None
    best = min(refusals, key=lambda refusal: FAULTS.index(refusal.fault))
    # Often the error that is raised last names the file, and the first one the cause.
    paths = [refusal.path for refusal in refusals if refusal.path]
    path = best.path or (paths[0] if paths else "")
    return Refusal(best.fault, path, best.detail)


def find_cause(error: BaseException) -> Refusal | None:
    """Find what a disk refused behind `error`, and not in its own text, which may quote anything."""
    for cause in _list_causes(error):
        refusal = find_refusal(cause)
        if refusal:
            return refusal
    return None


def describe_refusal(refusal: Refusal, places: Sequence[Path] = ()) -> str:
    """Describe a refusal in one line, with the place and the remedy.

    Args:
        places: directories that the program writes to, named where no error names the file.
    """
    fault = refusal.fault
    # The words of an error without a path may say what was written.
    paths = [Path(refusal.path)] if refusal.path else list(places)
    detail = "" if refusal.path else refusal.detail
    locations = " or ".join(_describe_path(path) for path in paths)
    words = [part for part in (fault.name, locations, detail, fault.remedy) if part]
    return f"{': '.join(words)}, then run it again"


def _describe_path(path: Path) -> str:
    """Describe a path with the bytes that are free there, or where it would lie."""
    try:
        usage = shutil.disk_usage(find_existing_parent(path))
    except OSError:
        return str(path)
    return f"{path} ({usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB free)"


def find_existing_parent(path: Path) -> Path:
    """Return the nearest path above `path`, or itself, that exists, or the topmost one."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _walk(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    """Yield an error, those among its arguments, and those that it was raised from."""
    # Errors may refer to one another in a circle.
    if depth > _DEEPEST:
        return
    yield error
    for other in chain(_list_contained(error.args), _list_causes(error)):
        yield from _walk(other, depth + 1)


def _list_causes(error: BaseException) -> list[BaseException]:
    hidden = error.__suppress_context__
    causes = [error.__cause__, None if hidden else error.__context__]
    return [cause for cause in causes if cause is not None]


def _list_contained(value: object, depth: int = 0) -> Iterator[BaseException]:
    """Yield the errors in an error's arguments.

    Groups of errors have them in a list, torch's CheckpointException in a mapping by rank.
    """
    if isinstance(value, BaseException):
        yield value
    elif depth < 4 and isinstance(value, Mapping):
        for part in value.values():
            yield from _list_contained(part, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for part in value:
            yield from _list_contained(part, depth + 1)


def _read_refusal(error: BaseException) -> Refusal | None:
    """Read one error: by its errno where it has one, else by its text, and by its words only where
    its class is one that says what a disk refused.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, OSError) and number is not None:
        for fault in FAULTS:
            if number in fault.numbers:
                # A copy names its source first: what has no room is its destination.
                path = error.filename2 or error.filename or ""
                return Refusal(fault, _decode(path), str(error.strerror or error))
        return None
    if isinstance(error, shutil.Error):
        return _read_copies(error)
    return _read_text(str(error), is_worded=isinstance(error, OSError) or _is_of_writer(error))


def _is_of_writer(error: BaseException) -> bool:
    """Return whether the class of `error` comes from a library that writes files."""
    module = type(error).__module__
    return any(module == name or module.startswith(f"{name}.") for name in WRITERS)


def _read_text(text: str, path: str = "", *, is_worded: bool = True) -> Refusal | None:
    """Find a fault that a text tells of; `is_worded`: also by words that other errors may have."""
    for fault in FAULTS:
        match = fault.certain.search(text)
        if match is None and is_worded:
            match = fault.worded.search(text)
        if match:
            return Refusal(fault, path, match[0])
    return None


def _read_copies(error: shutil.Error) -> Refusal | None:
    """Read what `shutil.copytree` raises: a list of (source, destination, why) as text."""
    copies = error.args[0] if error.args and isinstance(error.args[0], list) else []
    triples = [copy for copy in copies if isinstance(copy, tuple) and len(copy) == 3]
    for _, destination, reason in triples:
        refusal = _read_text(str(reason), _decode(destination))
        if refusal:
            return refusal
    return _read_text(str(error))


def _decode(path: object) -> str:
    if isinstance(path, bytes):
        return path.decode(errors="replace")
    return "" if isinstance(path, int) else str(path)
