"""Files of remote artifacts on this machine's disk: fetched once, proved by every process that uses them, bounded.

Below ``TUNELOOP_CACHE`` (default: ``tuneloop-cache`` in the temporary directory) each artifact has a directory, named
by its digest. A lock (flock) on a file says how it is used; the kernel releases it however its holder ends:

* exclusive, on ``<digest>.partial/<name>``: somebody fetches it, and whoever wants it waits;
* shared, on ``<digest>/<name>``: somebody uses it, and it stays;
* none: it may go, the least recently used first.

A name appears once all bytes are there. Still nothing is trusted: each process verifies the bytes of a file it uses."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tuneloop.core.errors import UserError, find_disk_error

DIRECTORY = "TUNELOOP_CACHE"
LIMIT = "TUNELOOP_CACHE_BYTES"
"""Environment variables: the cache's directory, and its maximum bytes (default: half of the space free without it)."""
PREFIX = "sha256-"
"""Prefix of the directories of artifacts; nothing else below `DIRECTORY` may be deleted."""


def open_directory(digest: str) -> Path:
    """Return the directory of the artifact with this digest; make the cache. Raises UserError: it cannot be made."""
    cache = Path(os.environ.get(DIRECTORY) or Path(tempfile.gettempdir()) / "tuneloop-cache")
    with _refusals(cache):
        cache.mkdir(parents=True, exist_ok=True)
    return cache / digest.replace(":", "-")


@contextlib.contextmanager
def _refusals(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mistake = UserError(
            DIRECTORY, str(cache), f"{error.strerror}; name a directory that can be written"
        )
        raise find_disk_error(error, [cache]) or mistake from error


def take_file(
    directory: Path,
    name: str,
    size: int,
    is_whole: Callable[[Path], bool],
    fetch: Callable[[Path], None],
) -> BinaryIO | None:
    """Return the file `name` of `directory`, open; no process deletes it until it is closed. Return None if even a
    newly fetched file is damaged. `size` is the expected size in bytes; `is_whole` verifies a file's bytes; `fetch`
    writes them to an existing file. Raises UserError if the cache cannot be written."""
    target = directory / name
    partial = directory.with_name(f"{directory.name}.partial") / name
    damaged = fetched = False
    with _refusals(directory.parent):
        while True:
            if held := _lock(target, os.O_RDONLY, fcntl.LOCK_SH):
                if is_whole(target):
                    os.utime(held.fileno())  # it is the most recently used now
                    return held
                held.close()
                if fetched:
                    return None
                damaged = True
            _make_directories(partial.parent)
            if own := _lock(partial, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX):
                with (
                    own,
                    contextlib.suppress(FileNotFoundError),
                ):  # another process removed the empty directory
                    if target.exists() and (
                        not damaged or is_whole(target)
                    ):  # another has fetched it meanwhile
                        partial.unlink()
                    else:
                        os.truncate(partial, 0)  # discard what a killed process has left
                        make_room(directory.parent, size)
                        _fill(partial, target, size, fetch)
                        fetched = True
                _remove_directories(partial, directory.parent)


def _fill(partial: Path, target: Path, size: int, fetch: Callable[[Path], None]) -> None:
    """Fetch the file `partial`, which is locked, and name it `target`."""
    try:
        os.truncate(partial, size)  # other processes count the expected size
        fetch(partial)
        _make_directories(target.parent)
        partial.rename(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_room(cache: Path, size: int) -> None:
    """Delete unused files, the least recently used first, until there is room for `size` bytes more. Files in use are
    kept even beyond the limit. Raises UserError if `LIMIT` is not a number of bytes."""
    found: list[tuple[float, int, Path]] = []
    for place in cache.glob(f"{PREFIX}*"):
        for where, _, names in os.walk(place):
            for path in (Path(where, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    found.append(((about := path.stat()).st_mtime, about.st_size, path))
    kept = sum(each for _, each, _ in found)
    limit = _read_limit(cache, kept)
    for _, each, path in sorted(found):
        if kept + size <= limit:
            break
        if own := _lock(path, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB):
            with own:
                path.unlink()
            kept -= each
            _remove_directories(path, cache)


def _make_directories(path: Path) -> None:
    """Make a directory and those above it, while others may remove them as long as they are empty."""
    for _ in range(100):  # it fails every time if other processes are not the cause
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return path.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)


def _remove_directories(path: Path, cache: Path) -> None:
    """Remove the directories above `path`, up to that of its artifact, unless something is in them."""
    for parent in path.parents[: len(path.relative_to(cache).parts) - 1]:
        with contextlib.suppress(OSError):
            parent.rmdir()


def _read_limit(cache: Path, kept: int) -> int:
    if not (given := os.environ.get(LIMIT)):
        return (shutil.disk_usage(cache).free + kept) // 2
    if not given.isdecimal():
        raise UserError(LIMIT, given, "is not a number of bytes; write one, as in 50000000000")
    return int(given)


def _lock(path: Path, flags: int, kind: int) -> BinaryIO | None:
    """Open and lock a file; None if it does not exist, was deleted meanwhile, or (``LOCK_NB``) is locked by another."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as stack:
        held = stack.enter_context(os.fdopen(os.open(path, flags, 0o644), "rb"))
        fcntl.flock(held, kind)
        if os.path.samestat(os.fstat(held.fileno()), path.stat()):
            stack.pop_all()
            return held
    return None
