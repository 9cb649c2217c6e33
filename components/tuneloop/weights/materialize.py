"""Make a local directory hold a published version: from a full version and deltas, or in place.

Replicas call it for each version (`inference/follower.py`), the publisher for a base that it has
not (`weights/publish.py`), `weights/inspect.py`, and `tuneloop weights materialize`. The tests are
`tests/unit/weights/test_protocol.py` and `tests/unit/weights/test_cached_deltas.py`.
"""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from tuneloop.core import cache
from tuneloop.core.artifacts import file_digest
from tuneloop.core.errors import Corrupt, UserError, find_disk_error
from tuneloop.core.store import Store
from tuneloop.weights import delta, versions
from tuneloop.weights.layout import Blame, Checkpoint, build_blame, visible_files
from tuneloop.weights.restoration import Plan, fetch_file, open_base, plan_restoration
from tuneloop.weights.versions import Chain, Entry

_REMEDY = "materialize it again"
MARKER = ".weight_version.json"
"""The file of the `Marker`, in the model's directory; `inference/follower.py` deletes it, so that
the next call starts from a full version.

Its name and those below are hidden: `weights/layout.py: visible_files` leaves them out, and so they
are no files of the version.
"""
LOCK = ".weight_version.lock"
"""The file that is locked; a directory with files and without it is somebody else's."""
INCOMING = ".incoming"
"""The directory, below the model's, for what is fetched and assembled."""


class Marker(BaseModel, frozen=True, extra="forbid"):
    """The version that a directory holds.

    The marker is removed before the first byte changes, so it is always true. Data are not flushed
    to disk, so it is trusted only until the host reboots: a killed process loses nothing, a crashed
    host may. After a reboot, every tensor is checked first. A marker that has other fields counts
    as none, so that the version is fetched in full.
    """

    version: int
    index: str
    boot: str


@dataclass(frozen=True)
class Materialized:
    """The result of `materialize_version`.

    Attributes:
        version: what the directory holds now.
        ref: the version's reference, in the form of the pointer.
        previous: the version that the directory held before; None if none, or it could not be
            trusted.
        full, deltas: the full version that was copied (None: none was), and the deltas applied to
            it, in order.
        read_bytes: bytes read from the store, without deltas that were in this machine's cache.
        source: the digest of the checkpoint that the version was published from, if the publisher
            recorded it.
        timings: in seconds: ``fetch``, and ``apply`` with the checks. `inference/follower.py`
            records them as ``fetch_s`` and ``apply_s``, which `weights/live.py: PULL` requires.
    """

    version: int
    ref: str
    previous: int | None
    full: int | None
    deltas: list[int]
    read_bytes: int
    source: str | None = None
    timings: dict[str, float] = field(default_factory=dict)


def materialize_version(
    root: str | Store | Chain,
    version: int | None,
    directory: Path | str,
    *,
    base: Path | None = None,
    shared: bool = False,
) -> Materialized:
    """Make `directory` hold `version` (None: the latest) as published below `root`, byte for byte.

    Lineage is checked before a byte changes, and every tensor afterwards, even if nothing changed.
    Only one process of a host works at a time. A failure in place leaves the directory empty: the
    next call restores it in full.

    Args:
        root: the URL of the weights root, a store on it, or its versions.
        version: one of its versions.
        directory: empty, absent, or made by an earlier call.
        base: the model that the chain starts on, where it stores none; it is only read.
        shared: read deltas of an object store through this machine's cache, which may have some
            that the store lost.

    Raises:
        UserError: the version is not published, the directory holds something else, or `base` is
            not the model.
        Corrupt: the published files are damaged, out of order, or do not give the published state.
    """
    chain = root if isinstance(root, Chain) else Chain(root)
    directory = Path(directory)
    # A version that does not exist must not leave a directory behind.
    target = chain.resolve_version(version)
    with lock_directory(directory):
        current = _read_current_version(directory, chain, target)
        plan = plan_restoration(chain, target, current)
        if current == target:
            return _report_result(plan, cached_bytes=0, timings={})
        incoming = directory / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        try:
            return _restore(chain, plan, directory, base, shared)
        except Corrupt:
            # Perhaps only the cache is damaged: the store itself is read below.
            if not shared or chain.store.root is not None:
                raise
            for step in plan.steps:
                shutil.rmtree(_find_cache(chain.store, step), ignore_errors=True)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    return materialize_version(chain, target, directory, base=base)


def _restore(
    chain: Chain,
    plan: Plan,
    directory: Path,
    base: Path | None,
    shared: bool,
) -> Materialized:
    """Carry out the plan. Raises as `materialize_version`."""
    start = time.perf_counter()
    incoming = directory / INCOMING
    # Everything is fetched before the directory changes, as a fetch may fail.
    cached_bytes: dict[int, int] = {}
    deltas: list[delta.DeltaFile] = []
    for step in plan.steps:
        delta_file = _open_delta(chain.store, step, incoming, cached_bytes if shared else None)
        if delta_file is not None:
            deltas.append(delta_file)
    if plan.full:
        _fetch_full(chain.store, plan.full, incoming / "model", base)
    fetched = time.perf_counter()
    _assemble(chain, plan, deltas, directory)
    applied = time.perf_counter()
    return _report_result(
        plan,
        cached_bytes=sum(cached_bytes.values()),
        timings={
            "fetch": fetched - start,
            "apply": applied - fetched,
        },
    )


def _report_result(plan: Plan, cached_bytes: int, timings: dict[str, float]) -> Materialized:
    """Return the result of a plan that was carried out."""
    return Materialized(
        version=plan.target.version,
        ref=versions.get_version_reference(plan.target),
        previous=plan.current,
        full=plan.full.version if plan.full else None,
        deltas=[step.version for step in plan.steps],
        read_bytes=plan.read_bytes - cached_bytes,
        source=plan.target.index.tuneloop.source,
        timings=timings,
    )


def _open_delta(
    store: Store,
    step: Entry,
    incoming: Path,
    cached_bytes: dict[int, int] | None,
) -> delta.DeltaFile | None:
    """Open the file of a delta; return None if no tensor changed.

    A delta with several files is refused here, but read by `weights/tensors.py: _open_deltas`.

    With `cached_bytes` (version → bytes that the cache had, which is added to) the file is read
    through this machine's cache.

    Raises:
        Corrupt: the file is missing, damaged, or not what its index says.
    """
    encoding = step.index.encoding
    assert encoding is not None
    names = set(step.index.weight_map.values())
    if not names:
        return None
    if len(names) != 1:
        raise Corrupt(
            "weights",
            step.folder,
            "has several delta files, which this reader does not write or read",
        )
    name = names.pop()
    key = f"{step.folder}/{name}"
    blame = build_blame(f"{store.url}/{key}", delta.MEND)
    # The cache may delete its file once it is mapped.
    with ExitStack() as opened:
        if store.root is not None or cached_bytes is None:
            path = fetch_file(store, key, incoming / f"{step.version}.safetensors")
        else:
            path = _find_cache(store, step) / name
            _take_from_cache(store, step, path, blame, opened, cached_bytes)
        return delta.DeltaFile(
            path,
            encoding,
            step.index.weight_map,
            step.index.tuneloop.checksums,
            blame,
        )


def _take_from_cache(
    store: Store,
    step: Entry,
    path: Path,
    blame: Blame,
    opened: ExitStack,
    cached_bytes: dict[int, int],
) -> None:
    """Make `path`, a delta file in the cache, exist until `opened` closes; fetch it if needed."""
    extra = step.index.tuneloop
    # What `stored_bytes` counts beside the other files is the delta's own file.
    size = extra.stored_bytes - sum(file.size for file in extra.files.values() if file.stored)
    cached_bytes[step.version] = size

    def fetch(target: Path) -> None:
        cached_bytes.pop(step.version, None)
        store.copy_file(f"{step.folder}/{path.name}", target, size=size)

    # Its tensors are proved when it is applied: here the size tells a whole file from a part.
    file = cache.take_file(
        path.parent,
        path.name,
        size,
        lambda cached: cached.stat().st_size == size,
        fetch,
    )
    if file is None:
        raise blame(f"is not of {size} bytes, as its index says")
    opened.enter_context(file)


def _find_cache(store: Store, step: Entry) -> Path:
    """Return where the cache keeps the files of a delta.

    A delta that is published again, with another index, has another directory.
    """
    identity = f"{store.url}/{step.folder}".encode() + step.index.encode_json()
    return cache.open_directory(f"sha256:{hashlib.sha256(identity).hexdigest()}")


def _fetch_full(store: Store, full: Entry, directory: Path, base: Path | None) -> None:
    """Copy a full version to `directory`, its weights from `base` where readers hold them."""
    extra = full.index.tuneloop
    base_store = open_base(full, base) if extra.readers_digest else None
    for name, file in extra.files.items():
        if base_store and file.header:
            fetch_file(base_store, name, directory / name, copy=True)
        elif file.stored is None:
            # Only deltas leave files to their base.
            raise Corrupt(
                "weights",
                f"{store.url}/{full.folder}",
                f"is a full version that does not store {name}",
            )
        else:
            fetch_file(store, f"{full.folder}/{file.stored}", directory / name, copy=True)


def _assemble(
    chain: Chain,
    plan: Plan,
    deltas: list[delta.DeltaFile],
    directory: Path,
) -> None:
    """Apply the plan: to a copy beside the directory where it has a full version, else in place."""
    index = plan.target.index
    work = directory / INCOMING / "model" if plan.full else directory
    blame = _build_blame(chain.store, plan, directory)
    # Nothing below `directory` but `incoming` changes before all checks have passed.
    other_files = _fetch_others(chain.store, plan, directory / INCOMING, blame)
    model = Checkpoint(work, blame=blame)
    _check_layout(plan, model, deltas, blame)
    if not plan.full:
        # From here on the directory counts as empty until it is verified again.
        (directory / MARKER).unlink()
    first = plan.full or chain.entry(plan.current or 0)
    delta.patch_checkpoint(
        model,
        deltas,
        expected=index.tuneloop.checksums,
        start=first.index.tuneloop.checksums,
    )
    for name, path in other_files.items():
        _move_file(path, work / name)
    (directory / MARKER).unlink(missing_ok=True)
    if plan.full:
        for path in visible_files(work):
            _move_file(path, directory / path.relative_to(work))
    # The previous version may have had files that this one does not have.
    for path in visible_files(directory):
        if path.relative_to(directory).as_posix() not in index.tuneloop.files:
            path.unlink()
    marker = Marker(
        version=plan.target.version,
        index=plan.target.digest,
        boot=_read_boot_id(),
    )
    # Renamed into place, as a marker that is written in part would be damage.
    staged = directory / f"{MARKER}.new"
    staged.write_text(marker.model_dump_json())
    os.replace(staged, directory / MARKER)


def _check_layout(
    plan: Plan,
    model: Checkpoint,
    deltas: list[delta.DeltaFile],
    blame: Callable[[str], Blame],
) -> None:
    """Check that model and deltas have the tensors of the target. Raises Corrupt: they do not."""
    index = plan.target.index
    # Equal headers: the same tensors at the same bytes.
    differences = model.headers.items() ^ index.headers.items()
    if differences:
        file = min(name for name, _ in differences)
        raise blame(file)(
            f"has other tensors than version {plan.target.version}, and nothing was changed"
        )
    names = set(model.tensors)
    for delta_file in deltas:
        names.update(delta_file.payloads)
    if names != set(index.tuneloop.checksums):
        raise Corrupt(
            "weights",
            plan.target.folder,
            "names tensors that the model does not have; nothing was changed",
        )


def _move_file(path: Path, target: Path) -> None:
    """Move a file within the file system, over the one that may be there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)


def _build_blame(store: Store, plan: Plan, directory: Path) -> Callable[[str], Blame]:
    """Build the function that returns the `Blame` of a file in the first state of the plan.

    Errors name the full version's stored file, or else the directory's file.
    """
    full = plan.full
    if full is None:
        return lambda name: build_blame(directory / name, _REMEDY)
    stored_files = full.index.stored_files
    url = f"{store.url}/{full.folder}"
    return lambda name: build_blame(f"{url}/{stored_files.get(name, name)}", delta.MEND)


def _fetch_others(
    store: Store,
    plan: Plan,
    incoming: Path,
    blame: Callable[[str], Blame],
) -> dict[str, Path]:
    """Fetch the newest of each file that deltas carry whole (config, tokenizer).

    Returns:
        Name in the assembled directory → the fetched file.

    Raises:
        Corrupt: a file of the assembled directory would not be the published one.
    """
    files = plan.target.index.tuneloop.files
    newest_keys: dict[str, str] = {}
    for step in plan.steps:
        for name, stored in step.index.stored_files.items():
            newest_keys[name] = f"{step.folder}/{stored}"
    fetched: dict[str, Path] = {}
    for name, key in newest_keys.items():
        # A later version may have dropped the file.
        if name in files:
            fetched[name] = fetch_file(store, key, incoming / "others" / name, copy=True)

    work = incoming / "model" if plan.full else incoming.parent
    for name, file in files.items():
        if file.header:
            continue
        path = fetched.get(name, work / name)
        if path.is_file() and file_digest(path) == file.digest:
            continue
        file_blame = blame(name)
        if name in fetched:
            file_blame = build_blame(f"{store.url}/{newest_keys[name]}", delta.MEND)
        raise file_blame(f"is not the file that was published ({file.digest})")
    return fetched


def _read_boot_id() -> str:
    """Return the kernel's identifier of the time since this host booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_current_version(directory: Path, chain: Chain, target: int) -> int | None:
    """Return the version that the directory holds.

    None stands for no version that this chain knows, and for damage.
    """
    try:
        marker = Marker.model_validate_json((directory / MARKER).read_bytes())
        entry = chain.entry(marker.version)
    except (FileNotFoundError, ValueError):
        return None
    # Another index under this number: another root, or a version that was published again.
    if entry.digest != marker.index:
        return None
    try:
        # Where deltas follow, their checks verify every tensor.
        if marker.boot != _read_boot_id() or marker.version == target:
            check_directory(directory, entry)
        is_intact = _has_files_of(Checkpoint(directory), entry)
        return marker.version if is_intact else None
    except UserError:
        return None


def check_directory(directory: Path, entry: Entry) -> int:
    """Compare every tensor and file of a directory with a version, and count the tensors.

    Raises:
        Corrupt: something differs.
    """
    model = Checkpoint(directory)
    blame = build_blame(directory, _REMEDY)
    if not _has_files_of(model, entry):
        raise blame(f"has other tensors, configuration or tokenizer than version {entry.version}")
    checksums = delta.compute_checksums(model)
    delta.check_checksums(checksums.items(), entry.index.tuneloop.checksums, blame)
    return len(model.tensors)


def _has_files_of(model: Checkpoint, entry: Entry) -> bool:
    """Return whether everything but the tensors' bytes is as in the version."""
    digests = dict(model.headers)
    for name in model.others:
        digests[name] = file_digest(model.directory / name)
    files = entry.index.tuneloop.files
    return digests == {name: file.header or file.digest for name, file in files.items()}


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock the directory while the block runs.

    Raises:
        UserError: it cannot be written, or holds files that `materialize_version` did not make.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / LOCK).exists() and any(directory.iterdir()):
            raise UserError(
                "directory",
                str(directory),
                "is not empty and not made by `weights materialize`; choose another",
            )
        # The file stays: a lock on a file that another process deletes is no lock.
        lock = (directory / LOCK).open("a")
    except OSError as error:
        unwritable = UserError(
            "directory",
            str(directory),
            f"{error.strerror}; choose one that can be written",
        )
        raise find_disk_error(error, [directory]) or unwritable from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
