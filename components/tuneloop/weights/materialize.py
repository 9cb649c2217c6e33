"""Make a local directory hold a published version: from a full version and deltas, or in place by deltas alone."""

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
from pydantic import BaseModel

from tuneloop.core import cache
from tuneloop.core.artifacts import file_digest
from tuneloop.core.errors import Corrupt, UserError, find_disk_error
from tuneloop.core.store import Store
from tuneloop.weights import codec, delta, versions
from tuneloop.weights.layout import (
    Blame,
    Bytes,
    Checkpoint,
    Tensor,
    build_blame,
    parse_header,
    visible_files,
)
from tuneloop.weights.versions import Chain, Entry

_AGAIN = "materialize it again"
MARKER, LOCK, INCOMING = ".weight_version.json", ".weight_version.lock", ".incoming"


class Marker(BaseModel, frozen=True, extra="forbid"):
    """The version that a directory holds. The marker is removed before the first byte changes, so it is always true.

    Data are not flushed to disk, so the marker is trusted only until the host reboots (a killed process loses nothing,
    a crashed host may); after a reboot, every tensor is checked first."""

    version: int
    index: str
    boot: str


@dataclass(frozen=True)
class Materialized:
    """The result of `materialize_version`.

    Attributes:
        ref: the version's reference, in the form of the pointer.
        previous: the version that the directory held before; None if none, or it could not be trusted.
        full, deltas: the full version that was copied (None: none was), and the deltas applied to it, in order.
        read_bytes: bytes read from the store, without deltas that were in this machine's cache.
        source: the digest of the checkpoint that the version was published from, if the publisher recorded it.
        timings: in seconds: ``fetch``, and ``apply`` with the checks.
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

    Lineage is checked before a byte changes, and every tensor afterwards, even if nothing changed. Only one process
    of a host works at a time. A failure in place leaves the directory empty: the next call restores it in full.

    Args:
        directory: empty, absent, or made by an earlier call.
        base: the model that the chain starts on, where it stores none; only read.
        shared: read deltas of an object store through this machine's cache, which may have some that the store lost.

    Raises:
        UserError: the version is not published, the directory holds something else, or `base` is not the model.
        Corrupt: the published files are damaged, out of order, or do not give the published state.
    """
    chain = root if isinstance(root, Chain) else Chain(root)
    directory = Path(directory)
    target = chain.target(version)  # before the directory is created
    with lock_directory(directory):
        held = _held(directory, chain, target)
        plan = plan_restoration(chain, target, held)
        if held == target:
            return _result(plan, 0, {})
        clock = time.perf_counter()
        incoming = directory / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        try:
            cached = dict[int, int]()
            deltas = [
                _open_delta(chain.store, step, incoming, cached if shared else None)
                for step in plan.steps
            ]
            if plan.full:
                first = check_base(plan.full, base) if plan.full.index.tuneloop.held else None
                _fetch_full(chain.store, plan.full, incoming / "model", first)
            fetched = time.perf_counter() - clock
            clock = time.perf_counter()
            _assemble(chain, plan, deltas, directory)
            return _result(
                plan, sum(cached.values()), {"fetch": fetched, "apply": time.perf_counter() - clock}
            )
        except Corrupt:  # perhaps only the cache is damaged: read the store itself
            if not shared or chain.store.root is not None:
                raise
            for step in plan.steps:
                shutil.rmtree(_find_cache(chain.store, step), ignore_errors=True)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
    return materialize_version(chain, target, directory, base=base)


@dataclass(frozen=True)
class Plan:
    """How to restore `target`. `full` is None if `steps` continue from the version `held` by the directory."""

    target: Entry
    held: int | None
    full: Entry | None
    steps: list[Entry]


def plan_restoration(chain: Chain, target: int, held: int | None = None) -> Plan:
    """Choose the cheaper way: deltas from the held version, or from the newest full version at or below the target."""
    steps: list[Entry] = []
    restore: Plan | None = None
    for step, entry in chain.steps(target):
        if entry.version == held:
            here = Plan(chain.entry(target), held, None, steps[::-1])
            return min((p for p in (here, restore) if p), key=_bytes)
        if entry.index.encoding is None and restore is None:
            restore = Plan(chain.entry(target), held, entry, steps[::-1])
            if held is None or held > entry.version:
                return restore
        if step is None:
            break
        steps.append(step)
    if restore is None:
        where = f"{chain.store.url}/{versions.get_version_directory(target)}"
        raise Corrupt(
            "weights",
            where,
            "builds on a version that is gone, and no full version is left below it",
        )
    return restore


def _bytes(plan: Plan) -> int:
    return sum(
        e.index.tuneloop.stored_bytes for e in (*plan.steps, *([plan.full] if plan.full else []))
    )


def _result(plan: Plan, cached: int, timings: dict[str, float]) -> Materialized:
    target, full = plan.target, plan.full.version if plan.full else None
    ref, source = versions.get_version_reference(target), target.index.tuneloop.source
    deltas = [step.version for step in plan.steps]
    return Materialized(
        target.version, ref, plan.held, full, deltas, _bytes(plan) - cached, source, timings
    )


def _open_delta(
    store: Store, step: Entry, incoming: Path, cached: dict[int, int] | None
) -> delta.DeltaFile | None:
    """Open a delta. With `cached` (version → bytes that the cache had), read it through this machine's cache."""
    encoding, names = step.index.encoding, set(step.index.weight_map.values())
    assert encoding is not None
    if not names:
        return None
    if len(names) != 1:
        raise Corrupt(
            "weights",
            step.place,
            "has several delta files, which this reader does not write or read",
        )
    name = names.pop()
    key, about = f"{step.place}/{name}", step.index.tuneloop
    blame = build_blame(f"{store.url}/{key}", delta.MEND)
    with ExitStack() as opened:  # once it is mapped, the cache may delete it
        if store.root is not None or cached is None:
            path = fetch_file(store, key, incoming / f"{step.version}.safetensors")
        else:
            path = _find_cache(store, step) / name
            size = about.stored_bytes - sum(
                file.size for file in about.files.values() if file.stored
            )
            cached[step.version] = size

            def copy_delta(to: Path) -> None:
                cached.pop(step.version, None)
                store.copy_file(key, to, size=size)

            held = cache.take_file(
                path.parent, name, size, lambda at: at.stat().st_size == size, copy_delta
            )
            if held is None:
                raise blame(f"is not of {size} bytes, as its index says")
            opened.enter_context(held)
        return delta.DeltaFile(path, encoding, step.index.weight_map, about.checksums, blame)


def _find_cache(store: Store, step: Entry) -> Path:
    """Return where the cache keeps the files of a delta; a delta that is published again has another place."""
    what = f"{store.url}/{step.place}".encode() + step.index.encoded()
    return cache.open_directory(f"sha256:{hashlib.sha256(what).hexdigest()}")


def fetch_file(store: Store, key: str, path: Path, *, copy: bool = False) -> Path:
    """Return a local file with the bytes of `key`, downloaded if the store is remote or a copy is wanted."""
    if store.root is None or copy:
        store.download(key, path)
        return path
    if not (store.root / key).is_file():
        raise build_blame(f"{store.url}/{key}", delta.MEND)("is missing although its index exists")
    return store.root / key


def check_base(first: Entry, base: Path | None) -> Store:
    """Open `base`; raise a `UserError` if it does not hold the weights that the version `first` names."""
    model, wanted = Checkpoint(base) if base else None, first.index.tuneloop.held
    found = model and versions.digest_weights(model.headers, delta.compute_checksums(model))
    if base is None or found != wanted:
        what = f"its weights are {found}, but version {first.version}, which stores no weights, needs {wanted}"
        raise UserError(
            "--base", base and str(base), f"{what}; give the model that the run began with"
        )
    return Store(str(base))


def _fetch_full(store: Store, full: Entry, directory: Path, base: Store | None) -> None:
    for name, file in full.index.tuneloop.files.items():
        place, key = (
            (base, name) if base and file.header else (store, f"{full.place}/{file.stored}")
        )
        if place is store and file.stored is None:
            raise Corrupt(
                "weights",
                f"{store.url}/{full.place}",
                f"is a full version that does not store {name}",
            )
        fetch_file(place, key, directory / name, copy=True)


def _assemble(
    chain: Chain, plan: Plan, deltas: list[delta.DeltaFile | None], directory: Path
) -> None:
    """Apply the plan: to a copy beside the directory where it starts from a full version, else in place."""
    index = plan.target.index.tuneloop
    work = directory / INCOMING / "model" if plan.full else directory
    blame = _origin(chain.store, plan, directory)
    others = _fetch_others(chain.store, plan, directory / INCOMING, blame)
    model = Checkpoint(work, blame=blame)
    wanted = {n: f.header for n, f in index.files.items() if f.header}
    if differing := sorted(name for name, _ in model.headers.items() ^ wanted.items()):
        raise blame(differing[0])(
            f"has other tensors than version {plan.target.version}, and nothing was changed"
        )
    given = [d for d in deltas if d is not None]
    if {n for d in given for n in d.payloads} | set(model.tensors) != set(index.checksums):
        raise Corrupt(
            "weights",
            plan.target.place,
            "names tensors that the model does not have; nothing was changed",
        )
    if not plan.full:
        (
            directory / MARKER
        ).unlink()  # from here on the directory counts as empty until it is verified again
    start = (plan.full or chain.entry(plan.held or 0)).index.tuneloop.checksums
    delta.patch_checkpoint(model, given, index.checksums, start)
    for name, path in others.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, work / name)
    (directory / MARKER).unlink(missing_ok=True)
    if plan.full:
        for file in visible_files(work):
            to = directory / file.relative_to(work)
            to.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, to)
    for file in visible_files(directory):
        if file.relative_to(directory).as_posix() not in index.files:
            file.unlink()
    staged = directory / f"{MARKER}.new"
    staged.write_text(
        Marker(
            version=plan.target.version, index=plan.target.digest, boot=_boot()
        ).model_dump_json()
    )
    os.replace(staged, directory / MARKER)


def _origin(store: Store, plan: Plan, directory: Path) -> Callable[[str], Blame]:
    """Name the source of a file's first state in the plan: the full version's stored file, or the directory's file."""
    if plan.full is None:
        return lambda name: build_blame(directory / name, _AGAIN)
    place, files = f"{store.url}/{plan.full.place}", plan.full.index.tuneloop.files
    return lambda name: build_blame(
        f"{place}/{(files[name].stored if name in files else None) or name}", delta.MEND
    )


def _fetch_others(
    store: Store, plan: Plan, incoming: Path, blame: Callable[[str], Blame]
) -> dict[str, Path]:
    """Fetch the newest of each file that deltas carry whole (config, tokenizer), verified."""
    newest = {
        name: f"{step.place}/{file.stored}"
        for step in plan.steps
        for name, file in step.index.tuneloop.files.items()
        if file.stored
    }
    wanted = plan.target.index.tuneloop.files
    work = incoming / "model" if plan.full else incoming.parent
    found = {
        n: fetch_file(store, key, incoming / "others" / n, copy=True)
        for n, key in newest.items()
        if n in wanted
    }
    for name, file in wanted.items():
        path = found.get(name, work / name)
        if file.header is None and (not path.is_file() or file_digest(path) != file.digest):
            of = (
                build_blame(f"{store.url}/{newest[name]}", delta.MEND)
                if name in found
                else blame(name)
            )
            raise of(f"is not the file that was published ({file.digest})")
    return found


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _held(directory: Path, chain: Chain, target: int) -> int | None:
    """Return the version that the directory holds; None where it holds none that this chain knows, or is damaged."""
    try:
        marker = Marker.model_validate_json((directory / MARKER).read_bytes())
        entry = chain.entry(marker.version)
    except (FileNotFoundError, ValueError):
        return None
    if entry.digest != marker.index:
        return None
    try:
        if (
            marker.boot != _boot() or marker.version == target
        ):  # else the checks of the deltas verify every tensor
            check_directory(directory, entry)
        return marker.version if _same_files(Checkpoint(directory), entry) else None
    except UserError:
        return None


def check_directory(directory: Path, entry: Entry) -> int:
    """Compare a directory with a version, every tensor and file; count the tensors. Raises Corrupt: a difference."""
    model = Checkpoint(directory)
    if not _same_files(model, entry):
        where = f"version {entry.version}"
        raise build_blame(directory, _AGAIN)(
            f"has other tensors, configuration or tokenizer than {where}"
        )
    found = delta.compute_checksums(model).items()
    delta.check_checksums(found, entry.index.tuneloop.checksums, build_blame(directory, _AGAIN))
    return len(model.tensors)


def _same_files(model: Checkpoint, entry: Entry) -> bool:
    """Return whether everything but the tensors' bytes is as in the version."""
    found = {**model.headers, **{n: file_digest(model.directory / n) for n in model.others}}
    return found == {n: f.header or f.digest for n, f in entry.index.tuneloop.files.items()}


def read_tensors(
    chain: Chain, version: int, names: Iterable[str], *, base: Path | None = None
) -> Iterator[tuple[Tensor, Bytes]]:
    """Yield tensors of a version, verified, one at a time, and read no others. Raises as `materialize_version`."""
    plan = plan_restoration(chain, version)
    assert plan.full is not None
    about = plan.full.index.tuneloop
    with ExitStack() as stack:

        def find_tensors(store: Store, key: str) -> dict[str, tuple[BinaryIO, Tensor]]:
            blame = build_blame(f"{store.url}/{key}", delta.MEND)
            try:
                file = stack.enter_context(store.open(key))
            except FileNotFoundError:
                raise blame("is missing although its index is there") from None
            return {
                name: (file, tensor)
                for name, tensor in parse_header(file, "", blame).tensors.items()
            }

        place = check_base(plan.full, base) if about.held else chain.store
        keys = [
            name if about.held else f"{plan.full.place}/{f.stored}"
            for name, f in about.files.items()
            if f.header
        ]
        states = {name: found for key in keys for name, found in find_tensors(place, key).items()}
        files = [(step, name) for step in plan.steps for name in {*step.index.weight_map.values()}]
        steps = [
            (step.index.encoding, find_tensors(chain.store, f"{step.place}/{name}"))
            for step, name in files
        ]
        for name in names:
            if name not in states:
                raise build_blame(f"{place.url}/{plan.full.place}", delta.MEND)(f"holds no {name}")
            tensor, data = states[name][1], _read_bytes(*states[name])
            for encoding, payloads in steps:
                if encoding is not None and name in payloads:
                    made = np.empty_like(data)
                    codec.apply_delta(
                        data, made, _read_bytes(*payloads[name]), tensor.width, encoding
                    )
                    data = made
            found, blame = (
                xxhash.xxh3_128_hexdigest(data.data),
                build_blame(chain.store.url, delta.MEND),
            )
            delta.check_checksums([(name, found)], plan.target.index.tuneloop.checksums, blame)
            yield tensor, data


def _read_bytes(file: BinaryIO, tensor: Tensor) -> Bytes:
    file.seek(tensor.start)
    return np.frombuffer(file.read(tensor.end - tensor.start), np.uint8)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock the directory while the block runs. Raises UserError where it cannot be written or holds files of others."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / LOCK).exists() and any(directory.iterdir()):
            remedy = "is not empty and not made by `weights materialize`; choose another"
            raise UserError("directory", str(directory), remedy)
        lock = (directory / LOCK).open("a")
    except OSError as error:
        mistake = UserError(
            "directory", str(directory), f"{error.strerror}; choose one that can be written"
        )
        raise find_disk_error(error, [directory]) or mistake from error
    with lock as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
