"""Files of remote artifacts on this machine's disk: fetched once, bounded, and verified by every
process that uses them.

Below ``TUNELOOP_CACHE`` (default: ``tuneloop-cache`` in the temporary directory) each artifact has
a directory, named by its digest. A lock (flock) on a file says how it is used; the kernel releases
the lock however its holder ends:

* exclusive, on ``<digest>.partial/<name>``: a process fetches it, and others that need it wait;
* shared, on ``<digest>/<name>``: a process uses it, and it stays;
* none: it may be deleted, the least recently used first.

A name appears once all bytes are there. Still nothing is trusted: each process verifies the bytes
of a file that it uses.

Who takes files: `core/artifacts.py`, `formats/stored_models.py` and `weights/materialize.py`. Each
keeps the open file that `take_file` returns for as long as it uses the path.
"""

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
"""Environment variables: the cache's directory, and its maximum bytes (default: half of the space
that is free without it)."""
PREFIX = "sha256-"
"""Prefix of the directories of artifacts, as `open_directory` makes it of a digest ``sha256:…``.
Only what has it counts against `LIMIT` and is deleted here: `config/stored_facts.py: PREVIEWS`
has a limit of its own."""


def open_directory(digest: str) -> Path:
    """Return the directory of the artifact with this digest, below the cache. Only the cache itself
    is made.

    Raises UserError if the cache cannot be made.
    """
    default = Path(tempfile.gettempdir()) / "tuneloop-cache"
    cache = Path(os.environ.get(DIRECTORY) or default)
    with _refusals(cache):
        cache.mkdir(parents=True, exist_ok=True)
    return cache / digest.replace(":", "-")


@contextlib.contextmanager
def _refusals(cache: Path) -> Iterator[None]:
    """Raise DiskError, or UserError with the remedy, for what a file system refuses."""
    try:
        yield
    except OSError as error:
        remedy = f"{error.strerror}; name a directory that can be written"
        mistake = UserError(DIRECTORY, str(cache), remedy)
        raise find_disk_error(error, [cache]) or mistake from error


def take_file(
    directory: Path,
    name: str,
    size: int,
    is_whole: Callable[[Path], bool],
    fetch: Callable[[Path], None],
) -> BinaryIO | None:
    """Return the file `name` of `directory`, open; no process deletes it until it is closed.

    Args:
        directory: of an artifact, as `open_directory` returns it.
        size: the expected size in bytes.
        is_whole: verifies a file's bytes.
        fetch: writes the bytes to an existing file.

    Returns:
        None if even a newly fetched file is damaged.

    Raises UserError if the cache cannot be written.
    """
    target = directory / name
    partial = directory.with_name(f"{directory.name}.partial") / name
    is_damaged = False
    is_fetched = False
    with _refusals(directory.parent):
        while True:
            file = _lock(target, os.O_RDONLY, fcntl.LOCK_SH)
            if file:
                if is_whole(target):
                    # From now on it is the most recently used one.
                    os.utime(file.fileno())
                    return file
                file.close()
                if is_fetched:
                    return None
                is_damaged = True
            _make_directories(partial.parent)
            lock = _lock(partial, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            if lock is None:
                continue
            # FileNotFoundError: another process removed the empty directory.
            with lock, contextlib.suppress(FileNotFoundError):
                # Another process may have fetched the file while this one waited for the lock.
                if target.exists() and (not is_damaged or is_whole(target)):
                    partial.unlink()
                else:
                    # A killed process may have left a part.
                    os.truncate(partial, 0)
                    make_room(directory.parent, size)
                    _fill(partial, target, size, fetch)
                    is_fetched = True
            _remove_directories(partial, directory.parent)


def _fill(partial: Path, target: Path, size: int, fetch: Callable[[Path], None]) -> None:
    """Fetch the file `partial`, which is locked, and name it `target`."""
    try:
        # Other processes that make room count the expected size.
        os.truncate(partial, size)
        fetch(partial)
        _make_directories(target.parent)
        partial.rename(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_room(cache: Path, size: int) -> None:
    """Delete unused files, the least recently used first, until there is room for `size` bytes.

    Files in use are kept even beyond the limit. Raises UserError if `LIMIT` is not a number of
    bytes.
    """
    # Seconds of the last use, bytes, path.
    files: list[tuple[float, int, Path]] = []
    for artifact in cache.glob(f"{PREFIX}*"):
        # Unlike a glob, a walk passes over directories that another process deletes meanwhile.
        for directory, _, names in os.walk(artifact):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
    used = sum(file_size for _, file_size, _ in files)
    limit = _read_limit(cache, used)
    for _, file_size, path in sorted(files):
        if used + size <= limit:
            break
        lock = _lock(path, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock:
            with lock:
                path.unlink()
            used -= file_size
            _remove_directories(path, cache)


def _make_directories(path: Path) -> None:
    """Make a directory and its parents, which other processes may remove while they are empty."""
    # It fails a hundred times only if other processes are not the cause.
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            return path.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True, exist_ok=True)


def _remove_directories(path: Path, cache: Path) -> None:
    """Remove the empty directories above `path`, up to that of its artifact."""
    for parent in path.parents[: len(path.relative_to(cache).parts) - 1]:
        with contextlib.suppress(OSError):
            parent.rmdir()


def _read_limit(cache: Path, used: int) -> int:
    """Read the maximum bytes of the cache, which has `used` bytes."""
    text = os.environ.get(LIMIT)
    if not text:
        return (shutil.disk_usage(cache).free + used) // 2
    if not text.isdecimal():
        raise UserError(LIMIT, text, "is not a number of bytes; write one, as in 50000000000")
    return int(text)


def _lock(path: Path, flags: int, kind: int) -> BinaryIO | None:
    """Open and lock a file.

    Returns:
        None if it does not exist, was deleted meanwhile, or (``LOCK_NB``) is locked by another
        process.
    """
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as stack:
        file = stack.enter_context(os.fdopen(os.open(path, flags, 0o644), "rb"))
        fcntl.flock(file, kind)
        # While this process waited, the name may have been given to another file.
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            stack.pop_all()
            return file
    return None
