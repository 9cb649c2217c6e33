"""Where artifacts live: one URL (file://, s3://, gs://, az://, or a path of a mounted volume).

Three promises the rest of tuneloop builds on, on every scheme:

* ``create`` writes a key only if it is absent, atomically, so that one of two racing writers wins;
* ``swap`` replaces a key only if it still holds the bytes the caller last saw (compare-and-swap);
* a reader never sees half a key.

Object stores give the first two by conditional requests (RFC 9110 If-None-Match, If-Match). obstore's local store has
no conditional replace, so files take an advisory lock and an atomic rename instead."""

import contextlib
import errno
import fcntl
import io
import os
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlparse

import obstore
from obstore import exceptions

from tuneloop.core.errors import Corrupt, DiskError, NoKeys, Unavailable, UserError, find_disk_error
from tuneloop.core.object_stores import (
    KEYS,
    METADATA,
    REFUSALS,
    ObjectFile,
    is_plain_http,
    shorten_error,
)

RANGE = 8 << 20
READERS = 16
"""Bytes of one ranged read, and how many of these travel at a time: up to 128 MiB of memory."""
STAGED = re.compile(
    r"\..+\.\d+-[0-9a-f]{8}"
)  # a file that is being written, or that a kill has left
SCHEMES = ("file", "s3", "gs", "az", "memory")


class Conflict(RuntimeError):
    """A conditional write lost: the key exists already, or holds other bytes than expected."""


def normalize_url(url: str) -> str:
    """Return `url` as an absolute URL without a trailing slash; a plain path becomes ``file://``. Raises UserError: the
    scheme is not one that tuneloop can store to, or no bucket or directory stands behind it."""
    scheme, mark, rest = url.partition(":")
    scheme = scheme.lower()
    if not url.isprintable():  # no file system takes a NUL, or half of a surrogate pair
        raise UserError("store", url, "has a character that no address has; correct it")
    if not mark or (scheme not in SCHEMES and not rest.startswith("//")):
        return "file://" + str(Path(url).expanduser().absolute())
    if scheme not in SCHEMES:
        raise UserError(
            "store", url, f"use one of {', '.join(s + '://' for s in SCHEMES)} or a path"
        )
    bucket = scheme in ("s3", "gs", "az")
    if not rest.startswith("//") or not rest[2:] or (rest[2] != "/") != bucket:
        what = (
            f"bucket; write {scheme}://BUCKET/PREFIX"
            if bucket
            else f"directory; write {scheme}:///DIRECTORY"
        )
        raise UserError("store", url, f"names no {what}")
    return f"{scheme}://{rest[2:].rstrip('/') or '/'}"


def is_contained_path(name: str) -> bool:
    """Return whether a file of this name lies below the directory that the name is appended to."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def local_path(url: str) -> Path | None:
    """Return the directory that a ``file://`` URL names, or None where bytes have to travel."""
    url = normalize_url(url)
    return Path(unquote(urlparse(url).path)) if url.startswith("file://") else None


def open_for_reading(path: Path) -> io.BufferedReader:
    """Open `path` for reading. Raises UserError where this user may not."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise UserError("file", str(path), "may not be read by this user; grant access") from error


class Store:
    """Keys and bytes below one URL; keys are relative to it, with ``/`` between parts. S3 takes endpoint and
    credentials from the usual ``AWS_*`` variables (``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, …); HTTP is allowed."""

    def __init__(self, url: str) -> None:
        self.url = normalize_url(url)
        self.root = local_path(self.url)
        if self.root is None:
            scheme = urlparse(self.url).scheme
            http = scheme == "s3" and is_plain_http()
            try:
                self._objects = obstore.store.from_url(
                    self.url, client_options={"allow_http": http}
                )
            except exceptions.BaseError as error:  # no request was sent yet: a setting is wrong
                remedy = f"{shorten_error(error)}; set {KEYS.get(scheme, 'another')}"
                raise UserError("store", self.url, remedy) from error

    def get(self, key: str) -> bytes | None:
        """Return the bytes of `key`, or None if it does not exist."""
        with self._faults(key):
            try:
                if self.root is not None:
                    with open(
                        f"{self.root}/{key}", "rb"
                    ) as file:  # to build a Path takes as long as to read
                        return file.read()
                return bytes(obstore.get(self._objects, key).bytes())
            except (
                FileNotFoundError,
                NotADirectoryError,
                IsADirectoryError,
                exceptions.NotFoundError,
            ):
                return None

    def open(self, key: str) -> BinaryIO:
        """Open `key` as a file: of an object only what is read travels. Raises FileNotFoundError: it does not exist."""
        if self.root is not None:
            return open_for_reading(self.root / key)
        with self._faults(key):
            size = obstore.head(self._objects, key)["size"] if self._is_object(key) else None
        if size is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        return io.BufferedReader(ObjectFile(size, partial(self._read_range, key)), 1 << 16)

    def put(self, key: str, data: bytes) -> None:
        """Write `key`, replacing what was there."""
        with self._faults(key):
            if self.root is None:
                obstore.put(self._objects, key, data)
                return
            with self._stage(key, data) as staged:
                os.replace(staged, self.root / key)

    def create(self, key: str, data: bytes) -> None:
        """Write `key` if it is absent. Raises Conflict where it exists."""
        with self._faults(key):
            try:
                if self.root is None:
                    obstore.put(self._objects, key, data, mode="create", use_multipart=False)
                    return
                with self._stage(key, data) as staged:
                    os.link(staged, self.root / key)  # fails where the name is taken: atomic create
                    fsync_path(self.root / key, directory=True)
            except (
                FileExistsError,
                exceptions.AlreadyExistsError,
                exceptions.PreconditionError,
            ) as error:
                raise Conflict(f"{self.url}/{key} exists") from error

    def swap(self, key: str, expected: bytes | None, data: bytes) -> None:
        """Replace `key` if it still holds `expected` (None: is still absent). Raises Conflict: it does not."""
        if expected is None:
            return self.create(key, data)
        if self.root is not None:
            with self._lock(key):
                if self.get(key) != expected:
                    raise Conflict(f"{self.url}/{key} was changed by another writer")
                return self.put(key, data)
        with self._faults(key):
            try:
                now = obstore.get(self._objects, key)
                if bytes(now.bytes()) != expected:
                    raise Conflict(f"{self.url}/{key} was changed by another writer")
                tag = {k: v for k in ("e_tag", "version") if (v := now.meta.get(k)) is not None}
                obstore.put(self._objects, key, data, mode=tag, use_multipart=False)  # type: ignore[arg-type]
            except (
                exceptions.NotFoundError,
                exceptions.AlreadyExistsError,
                exceptions.PreconditionError,
            ) as error:
                raise Conflict(f"{self.url}/{key} was changed by another writer") from error

    def upload(self, key: str, path: Path) -> None:
        """Copy the local file `path` to `key` (in parts where it is large)."""
        with self._faults(key):
            if self.root is None:
                obstore.put(self._objects, key, path)
                return
            with self._stage(key, b"") as staged:
                shutil.copyfile(path, staged)
                fsync_path(staged)
                os.replace(staged, self.root / key)

    def download(self, key: str, path: Path) -> None:
        """Copy `key` to the local file `path`, made or replaced once all has arrived. Raises Corrupt: no such key."""
        staged = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        with self._faults(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                staged.touch()
                self.copy_file(key, staged)
                staged.replace(path)
            finally:
                staged.unlink(missing_ok=True)

    def copy_file(self, key: str, path: Path, size: int | None = None) -> None:
        """Write `key` to the existing local file `path`; its `size` saves a request. Raises Corrupt: no such key."""
        with self._faults(key):
            try:
                if self.root is not None:
                    shutil.copyfile(self.root / key, path)
                    return
                if size is None or size > RANGE:
                    size = obstore.head(self._objects, key)["size"]
                if size <= RANGE:
                    path.write_bytes(obstore.get(self._objects, key).bytes())
                    return
                with ThreadPoolExecutor(READERS) as pool:
                    list(
                        pool.map(
                            lambda start: self._copy_range(key, path, start, size),
                            range(0, size, RANGE),
                        )
                    )
            except (FileNotFoundError, exceptions.NotFoundError) as error:
                remedy = "is missing; restore it from a copy, or run again what writes it"
                raise Corrupt("store", f"{self.url}/{key}", remedy) from error

    def _copy_range(self, key: str, path: Path, start: int, size: int) -> None:
        with path.open("r+b") as out:
            out.seek(start)
            out.write(self._read_range(key, start, min(RANGE, size - start)))

    def _read_range(self, key: str, start: int, length: int) -> memoryview:
        with self._faults(key):
            return memoryview(obstore.get_range(self._objects, key, start=start, length=length))

    def keys(self, prefix: str = "") -> list[str]:
        """List `prefix`, if it is a key, and all keys below it, sorted."""
        with self._faults(prefix):
            if self.root is None:
                found = [
                    str(meta["path"])
                    for meta in obstore.list(self._objects, prefix or None).collect()
                ]
                own = (
                    [prefix] if prefix and self._is_object(prefix) else []
                )  # a listing leaves it out
                return sorted({*found, *own})
            base = self.root / prefix
            files = [base] if base.is_file() else [p for p in base.rglob("*") if p.is_file()]
            return sorted(str(p.relative_to(self.root)) for p in files)

    def parts(self, folder: str = "") -> list[str]:
        """List the names of the folders directly below `folder`, sorted: first parts of keys that have several."""
        with self._faults(folder):
            if self.root is None:
                found = obstore.list_with_delimiter(self._objects, folder or None)[
                    "common_prefixes"
                ]
                return sorted(str(prefix).rpartition("/")[2] for prefix in found)
            there = os.path.isdir(place := f"{self.root}/{folder}")
            return (
                sorted(entry.name for entry in os.scandir(place) if entry.is_dir()) if there else []
            )

    def find_marks(self, folder: str, depth: int, names: Collection[str]) -> dict[str, str]:
        """Find the keys of some names `depth` folders below `folder`: key → a mark that changes with every write."""
        with self._faults(folder):
            if self.root is None:
                flat = (
                    None if depth else obstore.list_with_delimiter(self._objects, folder)["objects"]
                )
                found = obstore.list(self._objects, folder).collect() if flat is None else flat
                marks = {
                    str(m["path"]): f"{m['e_tag']} {m['size']} {m['last_modified']}" for m in found
                }
                parts = {key: key.removeprefix(f"{folder}/").split("/") for key in marks}
                return {
                    key: marks[key]
                    for key in parts
                    if len(parts[key]) == depth + 1 and parts[key][-1] in names
                }
            places = [folder]
            for _ in range(depth):
                places = [f"{place}/{name}" for place in places for name in self.parts(place)]
            marks = dict[str, str]()
            for key in (f"{place}/{name}" for place in places for name in names):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    status = os.stat(f"{self.root}/{key}")
                    marks[key] = f"{status.st_mtime_ns} {status.st_size}"
            return marks

    def stat(self) -> dict[str, tuple[int, float]]:
        """Return every key with its size in bytes and when it was last written, Unix seconds."""
        with self._faults(""):
            if self.root is None:
                found = obstore.list(self._objects).collect()
                return {
                    str(meta["path"]): (meta["size"], meta["last_modified"].timestamp())
                    for meta in found
                }
            files = {}
            for path in self.root.rglob("*"):
                with contextlib.suppress(
                    FileNotFoundError
                ):  # somebody replaced or deleted it just now
                    if path.is_file():
                        files[path] = path.stat()
            return {
                str(path.relative_to(self.root)): (s.st_size, s.st_mtime)
                for path, s in files.items()
            }

    def delete(self, prefix: str) -> None:
        """Remove `prefix` and every key below it; nothing happens where there is none."""
        with self._faults(prefix):
            if self.root is None:
                obstore.delete(self._objects, self.keys(prefix))
                return
            target = self.root / prefix
            if target.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            else:
                target.unlink(missing_ok=True)

    def _is_object(self, key: str) -> bool:
        try:
            obstore.head(self._objects, key)
            return True
        except (exceptions.NotFoundError, FileNotFoundError):
            return False

    def check_writable(self) -> None:
        """Create and delete a probe key. Raises UserError: the store refuses, or no keys to ask it with are set."""
        key = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            self.create(key, b"")
        except NoKeys as error:
            raise error.mistake from error
        except DiskError as error:
            # At the start it is the choice of the place that is wrong; later a mount may come back.
            if error.is_read_only:
                remedy = "is on a read-only file system; choose a writable place"
                raise UserError("store", self.url, remedy) from None
            raise
        self.delete(key)

    @contextlib.contextmanager
    def _stage(self, key: str, data: bytes) -> Iterator[Path]:
        """Yield a durable temporary file of `data` beside `key`; it is deleted at the end unless it was renamed."""
        assert self.root is not None
        target = self.root / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (
            FileExistsError
        ) as error:  # a file where a directory should be, and no lost race for the key
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)
            ) from error
        staged = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            with staged.open("xb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            yield staged
        finally:
            staged.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        assert self.root is not None
        lock = (self.root / key).with_name(f".{Path(key).name}.lock")
        with lock.open("a") as held:  # released by the kernel when a holder dies
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _faults(self, key: str) -> Iterator[None]:
        """Turn errors of the file system or the service into one line with the right exit code."""
        try:
            yield
        except (
            PermissionError,
            exceptions.PermissionDeniedError,
            exceptions.UnauthenticatedError,
        ) as error:
            remedy = f"not permitted ({shorten_error(error)}); grant access"
            raise UserError("store", f"{self.url}/{key}", remedy) from error
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            what = "cannot be made" if self.root is not None else shorten_error(error)
            raise UserError("store", f"{self.url}/{key}", f"{what}; correct the URL") from error
        except OSError as error:
            if disk := find_disk_error(error, [self.root] if self.root else []):
                raise disk from error
            if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
                raise UserError(
                    "store", f"{self.url}/{key}", f"{error.strerror}; choose a writable place"
                ) from error
            raise
        except (
            exceptions.NotFoundError,
            exceptions.AlreadyExistsError,
            exceptions.PreconditionError,
        ):
            raise
        except exceptions.BaseError as error:
            text = shorten_error(error)
            if any(code in text for code in REFUSALS):
                raise UserError(
                    "store", self.url, f"{text}; check the bucket and the AWS_* variables"
                ) from error
            if any(host in text for host in METADATA):
                remedy = f"no keys; set {KEYS[urlparse(self.url).scheme]}"
                raise NoKeys(UserError("store", self.url, remedy)) from error
            raise Unavailable(f"store: {self.url}/{key}: {text}") from error


def fsync_path(path: Path, *, directory: bool = False) -> None:
    """Make a file durable, or with `directory` its name, which lives in the parent directory."""
    fd = os.open(path.parent if directory else path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
