"""The store of artifacts: one URL (file://, s3://, gs://, az://, or a path of a mounted volume).

Everything else in tuneloop relies on three promises, which hold on every scheme:

* ``create`` writes a key only if it is absent, atomically, so that one of two racing writers wins;
* ``swap`` replaces a key only if it still holds the bytes the caller last saw (compare-and-swap);
* a reader never sees half a key.

Object stores keep the first two by conditional requests (RFC 9110 If-None-Match, If-Match).
obstore's local store has no conditional replace, so files take an advisory lock and an atomic
rename instead.

Files of an artifact are written once. Of what is written again, several processes at a time change
only what goes through ``swap``: the pointer of weights (`weights/pointer.py`), the queue of a lease
group (`sharing/lease_storage.py`), and promotions (`runs/promotions.py`).

A method of `Store` has a part for files and one for object stores, and runs in `_faults`, which
decides the exit code of whatever the file system or the service raises.
"""

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
from typing import Any, BinaryIO
from urllib.parse import unquote, urlparse

import obstore
from obstore import exceptions

from tuneloop.core.errors import Corrupt, DiskError, NoKeys, Unavailable, UserError, find_disk_error
from tuneloop.core.object_stores import (
    KEYS,
    METADATA,
    REFUSALS,
    ObjectFile,
    build_retries,
    is_plain_http,
    shorten_error,
)
from tuneloop.core.store_credentials import (
    check_pod_identity,
    find_authority,
    find_credential_fault,
)

RANGE = 8 << 20
READERS = 16
"""Bytes of one ranged read, and how many of these travel at a time: up to 128 MiB of memory."""
STAGED = re.compile(r"\..+\.\d+-[0-9a-f]{8}")
"""Matches the name of a file that is being written, or that a kill has left. `Store._stage` and
`Store.download` make such names; `runs/retention.py` deletes what matches and is old."""
BUCKET_SCHEMES = ("s3", "gs", "az")
"""Schemes whose URLs begin with a bucket. Each is in `SCHEMES`, too, and has its keys in
`core/object_stores.py: KEYS`. Models may lie in the same stores
(`formats/stored_models.py: SCHEMES`). `kfp/io.py: SCHEMES` lists those of Kubeflow Pipelines' own
artifacts, and `core/store_credentials.py: has_credentials` knows the keys of each."""
SCHEMES = ("file", "s3", "gs", "az", "memory")
"""Schemes of stores; only tests use ``memory``."""
# What files and obstore raise: for a key that does not exist, or cannot, as a part of it is a file;
# for one that exists, or that was changed meanwhile; and for one that this user may not use.
MISSING = (FileNotFoundError, exceptions.NotFoundError)
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, exceptions.NotFoundError)
TAKEN = (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError)
CHANGED = (
    exceptions.NotFoundError,
    exceptions.AlreadyExistsError,
    exceptions.PreconditionError,
)
FORBIDDEN = (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


class Conflict(RuntimeError):
    """A conditional write lost: the key exists already, or holds other bytes than expected."""


def normalize_url(url: str) -> str:
    """Return `url` as an absolute URL without a trailing slash; a plain path becomes ``file://``.

    Raises UserError if tuneloop cannot store to the scheme, or if the URL names no bucket or
    directory.
    """
    scheme, colon, path = url.partition(":")
    scheme = scheme.lower()
    # No file system takes a NUL, or half of a surrogate pair.
    if not url.isprintable():
        raise UserError("store", url, "has a character that no address has; correct it")
    if not colon or (scheme not in SCHEMES and not path.startswith("//")):
        return f"file://{Path(url).expanduser().absolute()}"
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{name}://" for name in SCHEMES)
        raise UserError("store", url, f"use one of {schemes} or a path")
    location = path.removeprefix("//")
    is_location = path.startswith("//") and location != ""
    if scheme in BUCKET_SCHEMES:
        if not is_location or location.startswith("/"):
            raise UserError("store", url, f"names no bucket; write {scheme}://BUCKET/PREFIX")
    elif not is_location or not location.startswith("/"):
        raise UserError("store", url, f"names no directory; write {scheme}:///DIRECTORY")
    return f"{scheme}://{location.rstrip('/') or '/'}"


def is_contained_path(name: str) -> bool:
    """Return whether a file of this name lies below the directory that the name is appended to."""
    return "\0" not in name and {"", ".", ".."}.isdisjoint(name.split("/"))


def local_path(url: str) -> Path | None:
    """Return the directory that a ``file://`` URL names; None of an object store's."""
    url = normalize_url(url)
    return Path(unquote(urlparse(url).path)) if url.startswith("file://") else None


def open_for_reading(path: Path) -> io.BufferedReader:
    """Open `path` for reading. Raises UserError where this user may not."""
    try:
        return path.open("rb")
    except PermissionError as error:
        raise UserError("file", str(path), "may not be read by this user; grant access") from error


class Store:
    """Keys and bytes below one URL; keys are relative to it, with ``/`` between parts.

    S3 takes endpoint and credentials from the usual ``AWS_*`` variables (``AWS_ENDPOINT_URL``,
    ``AWS_ACCESS_KEY_ID``, …; `tuneloop.core.store_credentials` has the other clouds'); HTTP is
    allowed. Beside what is documented, every method raises
    UserError, DiskError or Unavailable for what the file system or the service answers.

    Attributes:
        root: the directory of a ``file://`` URL; None of an object store.
    """

    def __init__(self, url: str) -> None:
        self.url = normalize_url(url)
        self.root = local_path(self.url)
        if self.root is None:
            scheme = urlparse(self.url).scheme
            check_pod_identity(scheme)
            is_plain = scheme == "s3" and is_plain_http()
            options: Any = {}
            authority = find_authority()
            if scheme == "az" and authority:
                options["authority_host"] = authority
            try:
                self._objects = obstore.store.from_url(
                    self.url,
                    client_options={"allow_http": is_plain},
                    retry_config=build_retries(),
                    **options,
                )
            except exceptions.BaseError as error:
                # No request was sent yet, so a setting is wrong.
                remedy = f"{shorten_error(error)}; set {KEYS.get(scheme, 'another')}"
                raise UserError("store", self.url, remedy) from error

    def get(self, key: str) -> bytes | None:
        """Return the bytes of `key`, or None if it does not exist."""
        with self._faults(key):
            try:
                if self.root is not None:
                    # To build a Path takes as long as to read a small file.
                    with open(f"{self.root}/{key}", "rb") as file:
                        return file.read()
                return bytes(obstore.get(self._objects, key).bytes())
            except NO_FILE:
                return None

    def open(self, key: str) -> BinaryIO:
        """Open `key` as a file: of an object only what is read travels.

        Raises FileNotFoundError if it does not exist.
        """
        if self.root is not None:
            return open_for_reading(self.root / key)
        with self._faults(key):
            size = self._find_size(key)
        if size is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        file = ObjectFile(size, partial(self._read_range, key))
        # Parquet and safetensors read many small pieces that lie side by side.
        return io.BufferedReader(file, 1 << 16)

    def put(self, key: str, data: bytes) -> None:
        """Write `key`, replacing what was there."""
        with self._faults(key):
            if self.root is None:
                obstore.put(self._objects, key, data)
                return
            with self._stage(key, data) as staged:
                os.replace(staged, self.root / key)

    def create(self, key: str, data: bytes) -> None:
        """Write `key` if it is absent. Raises Conflict if it exists."""
        with self._faults(key):
            try:
                if self.root is None:
                    obstore.put(self._objects, key, data, mode="create", use_multipart=False)
                    return
                with self._stage(key, data) as staged:
                    # Linking fails if the name is taken, atomically.
                    os.link(staged, self.root / key)
                    fsync_path(self.root / key, directory=True)
            except TAKEN as error:
                raise Conflict(f"{self.url}/{key} exists") from error

    def swap(self, key: str, expected: bytes | None, data: bytes) -> None:
        """Replace `key` if it still holds `expected` (None: is still absent).

        Raises Conflict if it does not.
        """
        if expected is None:
            return self.create(key, data)
        conflict = Conflict(f"{self.url}/{key} was changed by another writer")
        if self.root is not None:
            with self._lock(key):
                if self.get(key) != expected:
                    raise conflict
                return self.put(key, data)
        with self._faults(key):
            try:
                current = obstore.get(self._objects, key)
                if bytes(current.bytes()) != expected:
                    raise conflict
                # Google's store compares versions, the others compare entity tags.
                meta = current.meta
                names = ("e_tag", "version")
                condition: Any = {
                    name: meta.get(name) for name in names if meta.get(name) is not None
                }
                obstore.put(self._objects, key, data, mode=condition, use_multipart=False)
            except CHANGED as error:
                raise conflict from error

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
        """Copy `key` to the local file `path`, made or replaced once all has arrived.

        Raises Corrupt if there is no such key.
        """
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
        """Write `key` to the existing local file `path`; its `size` in bytes saves a request.

        Raises Corrupt if there is no such key.
        """
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
                copy_range = partial(self._copy_range, key, path, size)
                with ThreadPoolExecutor(READERS) as pool:
                    # The list raises what a thread has raised.
                    list(pool.map(copy_range, range(0, size, RANGE)))
            except MISSING as error:
                remedy = "is missing; restore it from a copy, or run again what writes it"
                raise Corrupt("store", f"{self.url}/{key}", remedy) from error

    def _copy_range(self, key: str, path: Path, size: int, start: int) -> None:
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
                objects = obstore.list(self._objects, prefix or None).collect()
                keys = {str(meta["path"]) for meta in objects}
                # The listing of a prefix leaves out the key that equals it.
                if prefix and self._find_size(prefix) is not None:
                    keys.add(prefix)
                return sorted(keys)
            base = self.root / prefix
            paths = [base] if base.is_file() else base.rglob("*")
            return sorted(str(path.relative_to(self.root)) for path in paths if path.is_file())

    def parts(self, folder: str = "") -> list[str]:
        """List the names of the folders directly below `folder`, sorted: first parts of keys that
        have several.
        """
        with self._faults(folder):
            if self.root is None:
                listing = obstore.list_with_delimiter(self._objects, folder or None)
                prefixes = listing["common_prefixes"]
                return sorted(str(prefix).rpartition("/")[2] for prefix in prefixes)
            directory = f"{self.root}/{folder}"
            if not os.path.isdir(directory):
                return []
            return sorted(entry.name for entry in os.scandir(directory) if entry.is_dir())

    def find_marks(self, folder: str, depth: int, names: Collection[str]) -> dict[str, str]:
        """Find the keys of some names `depth` folders below `folder`.

        Returns:
            Key → a mark that changes with every write. `core/index.py` keeps marks: in another form
            they cost every run one more reading of its files.
        """
        marks: dict[str, str] = {}
        with self._faults(folder):
            if self.root is None:
                # One request lists a folder with all below it; without these it is shorter.
                if depth:
                    objects = obstore.list(self._objects, folder).collect()
                else:
                    objects = obstore.list_with_delimiter(self._objects, folder)["objects"]
                for meta in objects:
                    key = str(meta["path"])
                    parts = key.removeprefix(f"{folder}/").split("/")
                    if len(parts) == depth + 1 and parts[-1] in names:
                        marks[key] = f"{meta['e_tag']} {meta['size']} {meta['last_modified']}"
                return marks
            folders = [folder]
            for _ in range(depth):
                folders = [f"{parent}/{part}" for parent in folders for part in self.parts(parent)]
            for key in [f"{parent}/{name}" for parent in folders for name in names]:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    status = os.stat(f"{self.root}/{key}")
                    marks[key] = f"{status.st_mtime_ns} {status.st_size}"
        return marks

    def list_files(self) -> dict[str, tuple[int, str]]:
        """List the files directly below the URL: name → size in bytes, and a mark that changes
        with what is in the file: an object's entity tag, a file's time of its last write.
        """
        files: dict[str, tuple[int, str]] = {}
        with self._faults(""):
            if self.root is None:
                listing = obstore.list_with_delimiter(self._objects)
                for meta in listing["objects"]:
                    name = str(meta["path"])
                    tag = str(meta["e_tag"])
                    files[name] = (meta["size"], tag)
                return files
            if not self.root.is_dir():
                return files
            for entry in os.scandir(self.root):
                if not entry.is_file():
                    continue
                status = entry.stat()
                mark = str(status.st_mtime_ns)
                files[entry.name] = (status.st_size, mark)
            return files

    def stat(self) -> dict[str, tuple[int, float]]:
        """Return every key with its size in bytes and when it was last written, Unix seconds."""
        files: dict[str, tuple[int, float]] = {}
        with self._faults(""):
            if self.root is None:
                for meta in obstore.list(self._objects).collect():
                    files[str(meta["path"])] = (meta["size"], meta["last_modified"].timestamp())
                return files
            for path in self.root.rglob("*"):
                # Another process may have replaced or deleted it just now.
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file():
                        status = path.stat()
                        key = str(path.relative_to(self.root))
                        files[key] = (status.st_size, status.st_mtime)
        return files

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

    def _find_size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist."""
        try:
            return obstore.head(self._objects, key)["size"]
        except MISSING:
            return None

    def check_writable(self) -> None:
        """Create and delete a probe key.

        Raises UserError: the store refuses, or no keys to ask it with are set.
        """
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
        """Yield a durable temporary file of `data` beside `key`; it is deleted at the end unless it
        was renamed.
        """
        assert self.root is not None
        target = self.root / key
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            # A file lies where a directory should be. It must not look like a lost race for the key.
            number = errno.ENOTDIR
            raise NotADirectoryError(number, os.strerror(number), str(target.parent)) from error
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
        path = (self.root / key).with_name(f".{Path(key).name}.lock")
        # The kernel releases the lock when its holder dies.
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _faults(self, key: str) -> Iterator[None]:
        """Turn errors of the file system or the service into one line with the right exit code.

        What a method expects, such as a missing or an existing key, passes as it is, and the method
        turns it into its own answer. The last branch makes all errors of obstore unavailable (75)
        that no branch above names: `FORBIDDEN`, `CHANGED`, and the words of `REFUSALS` and
        `METADATA`.
        """
        address = f"{self.url}/{key}"
        try:
            yield
        except FORBIDDEN as error:
            self._raise_credential_fault(error, address)
            remedy = f"not permitted ({shorten_error(error)}); grant access"
            raise UserError("store", address, remedy) from error
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            reason = "cannot be made" if self.root is not None else shorten_error(error)
            raise UserError("store", address, f"{reason}; correct the URL") from error
        except OSError as error:
            disk = find_disk_error(error, [self.root] if self.root else [])
            if disk:
                raise disk from error
            if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG):
                remedy = f"{error.strerror}; choose a writable place"
                raise UserError("store", address, remedy) from error
            raise
        except CHANGED:
            raise
        except exceptions.BaseError as error:
            self._raise_credential_fault(error, address)
            text = shorten_error(error)
            if any(code in text for code in REFUSALS):
                remedy = f"{text}; check the bucket and the AWS_* variables"
                raise UserError("store", self.url, remedy) from error
            if any(host in text for host in METADATA):
                remedy = f"no keys; set {KEYS[urlparse(self.url).scheme]}"
                raise NoKeys(UserError("store", self.url, remedy)) from error
            raise Unavailable(f"store: {address}: {text}") from error

    def _raise_credential_fault(self, error: Exception, address: str) -> None:
        """Raise UserError or Unavailable if an error is about the credentials of the store."""
        fault = find_credential_fault(error, shorten_error(error))
        if fault is None:
            return
        if fault.is_final:
            raise UserError("store", self.url, fault.reason) from error
        raise Unavailable(f"store: {address}: {fault.reason}") from error


def fsync_path(path: Path, *, directory: bool = False) -> None:
    """Make a file durable, or with `directory` its name, which the parent directory holds."""
    descriptor = os.open(path.parent if directory else path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
