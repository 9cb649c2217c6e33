"""Publish a model directory as the next version: files, then the index, then the pointer."""

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import xxhash

from tuneloop.core.artifacts import file_digest
from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Conflict, Store
from tuneloop.weights import codec, delta, pointer, roles, versions
from tuneloop.weights.layout import Checkpoint
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.versions import INDEX, Chain, Entry, Extra, File, Index, Metadata

APPLY_COST = 0.1
"""The cost of applying a delta beyond reading its bytes, relative to restoring the full version: about 0.15 s a GB and
core against 1.5 s a GB from an object store (against 0.5 s from files in the page cache it is 0.35)."""
RESTORE_BOUND = 3.0
"""The next version is published in full as well (an anchor) where replaying the deltas since the last full one would
cost more than this many restores of a full version.

The cost sums, over these deltas, (bytes of the delta / bytes in full) + `APPLY_COST`. At 3, a replica that starts from
nothing is there within four times a full restore. At 1 % of the bytes a version, every 28th version is an anchor and
the publisher sends 1/22 of the full bytes on average."""


@dataclass(frozen=True)
class Published:
    """A version as it is now published.

    Attributes:
        version, base_version, encoding: as in the index; the last two are None if only a full version was published.
        full: whether the version is stored in full (with or without a delta beside it).
        sent_bytes: bytes written by this call; 0 if the version existed already.
        full_bytes: bytes of the model directory's safetensors.
        delta_bytes: bytes of the delta; None if there is none.
        density: share of elements that changed; None without a base.
        timings: seconds: ``base`` (derive it from the chain), ``encode``, ``publish`` (upload, commit, pointer).
    """

    version: int
    ref: str
    base_version: int | None
    encoding: codec.Encoding | None
    full: bool
    sent_bytes: int
    full_bytes: int
    delta_bytes: int | None
    density: float | None
    timings: dict[str, float] = field(default_factory=dict)


def publish_version(
    root: str | Store,
    version: int,
    directory: Path | str,
    *,
    base: Path | str | None = None,
    base_version: int | None = None,
    source: str | None = None,
    held: bool = False,
    encoding: codec.Encoding | Literal["chain"] | None = "chain",
    restore_bound: float = RESTORE_BOUND,
) -> Published:
    """Publish `directory` as `version` below `root` and move ``latest`` to it.

    Crash-safe at every point: until the index exists the version does not, until the pointer moves the old version is
    served, and calling again finishes. The base is the newest version below `version` in the store, never memory, so a
    restarted trainer continues the chain. If the version exists with the same bytes, only the pointer is moved.

    Args:
        version: any number above the latest; a version is immutable.
        directory: Hugging Face layout: ``*.safetensors`` and whatever lies beside them, hidden files left out.
        base: directory of the base version (the export before), checked against the chain; None: made from the chain.
        base_version: the version that `base` holds; if another version is the base, `base` is not used.
        source: the digest of the checkpoint that the version is made from, which replicas report.
        held: store only the weights' digest: readers start on this model. Later versions need `base`, until a full one.
        encoding: of this delta and later ones; chain: as before, at first gap8-xor; None publishes in full.
        restore_bound: how soon the next anchor comes, as in `RESTORE_BOUND`; 0 makes every version an anchor.

    Raises:
        PointerRewind: ``latest`` is at a newer version.
        PointerConflict: the version exists with other bytes.
        Corrupt: `base` is not the base version, or the chain in the store is damaged.
    """
    chain = Chain(root)
    if chain.pointed is not None and chain.pointed.version > version:
        where = f"{chain.store.url} is at version {chain.pointed.version} already"
        raise PointerRewind("weights version", version, where)
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        attempt = _Attempt(chain, version, Path(directory), Path(scratch), source)
        if version in chain.versions:
            attempt.describe_full(held)
            return attempt.adopt_existing()
        below = [v for v in chain.versions if v < version]
        if encoding == "chain":
            before = chain.entry(below[-1]).index if below else None
            encoding = (before and (before.encoding or before.tuneloop.deltas)) or "gap8-xor"
        if below and encoding is not None and not held:
            at_hand = base if base_version in (None, below[-1]) else None
            attempt.encode(chain.entry(below[-1]), at_hand, encoding)
        attempt.describe_full(held)
        clock = time.perf_counter()
        try:
            attempt.commit(restore_bound, encoding)
        except Conflict:  # a duplicate was faster
            chain = attempt.chain = Chain(chain.store)
            return attempt.adopt_existing()
        result = attempt.advance(chain.store)
        attempt.timings["publish"] = time.perf_counter() - clock
        return result


class _Attempt:
    """One attempt to publish: the files to upload, with their keys, and the indexes that describe them."""

    def __init__(
        self, chain: Chain, version: int, directory: Path, scratch: Path, source: str | None
    ) -> None:
        self.chain, self.version, self.scratch, self.source = chain, version, scratch, source
        self.new = Checkpoint(directory)
        self.total = sum(t.end - t.start for t in self.new.tensors.values())
        self.place = versions.get_version_directory(version)
        self.timings: dict[str, float] = {}
        self.checksums: dict[str, str] | None = None
        self.full: Index | None = None
        self.delta: Index | None = None
        self.delta_path = scratch / "delta.safetensors"
        self.sent = 0

    def encode(self, standing: Entry, base: Path | str | None, encoding: codec.Encoding) -> None:
        """Encode against the base version, if a delta can express the step and is smaller than the full version."""
        clock = time.perf_counter()
        if base is None:
            base = self.scratch / "base"
            materialize_version(self.chain.store, standing.version, base)
        old = Checkpoint(Path(base))
        self.timings["base"] = time.perf_counter() - clock
        clock = time.perf_counter()
        before = standing.index.tuneloop
        if old.headers != {n: f.header for n, f in before.files.items() if f.header}:
            raise _not_the_base(base, standing)
        if (
            old.headers != self.new.headers
        ):  # names, dtypes, shapes or files differ: only a full version can say that
            return
        done = delta.write_delta(old, self.new, self.delta_path, encoding, self.new.size)
        self.checksums = done.new
        self.timings["encode"] = time.perf_counter() - clock
        if done.old != before.checksums:
            raise _not_the_base(base, standing)
        if not done.fits:
            return
        name = (
            f"model-00000-of-00001.{file_digest(self.delta_path)[:12]}.safetensors"
            if done.names
            else None
        )
        files = self._files(done.new)
        for key, file in files.items():
            same = before.files.get(key)
            if file.header or (same and (file.size, file.digest) == (same.size, same.digest)):
                files[key] = file.model_copy(update={"stored": None})
        self.delta = Index(
            metadata=Metadata(
                version=f"{self.version:06d}",
                base_version=standing.index.metadata.version,
                delta_encoding=encoding,
                compression_format="zstd",
                total_size=self.total,
            ),
            weight_map=dict.fromkeys(done.names, name or ""),
            tuneloop=Extra(
                files=files,
                checksums=done.new,
                base_index=standing.digest,
                stored_bytes=done.size + sum(f.size for f in files.values() if f.stored),
                elements=done.elements,
                changed=done.changed,
                restore_cost=before.restore_cost + done.size / self.new.size + APPLY_COST,
                source=self.source,
            ),
        )

    def describe_full(self, held: bool) -> None:
        """Make the index of a full version, without the weights if readers hold them."""
        if self.checksums is None:
            self.checksums = delta.compute_checksums(self.new)
        files = self._files(self.checksums, held)
        stored = {name: file.stored for name, file in files.items()}
        self.full = Index(
            metadata=Metadata(version=f"{self.version:06d}", total_size=self.total),
            weight_map={
                name: place for name, t in self.new.tensors.items() if (place := stored[t.file])
            },
            tuneloop=Extra(
                files=files,
                checksums=self.checksums,
                stored_bytes=sum(f.size for f in files.values() if f.stored),
                source=self.source,
                held=versions.digest_weights(self.new.headers, self.checksums) if held else None,
            ),
        )

    def _files(self, checksums: dict[str, str], held: bool = False) -> dict[str, File]:
        """List the assembled directory's files as a full version stores them. Weights are named by their content: two
        attempts with different bytes never write to one key."""
        files = {}
        for name, header in self.new.headers.items():
            content = xxhash.xxh3_128(header.encode())
            for tensor, place in self.new.tensors.items():
                if place.file == name:
                    content.update(checksums[tensor].encode())
            stored = (
                None
                if held
                else f"{name.removesuffix('.safetensors')}.{content.hexdigest()[:12]}.safetensors"
            )
            files[name] = File(
                size=(self.new.directory / name).stat().st_size, header=header, stored=stored
            )
        for name in self.new.others:
            path = self.new.directory / name
            stored = f"export.{name}" if name == INDEX else name
            files[name] = File(size=path.stat().st_size, digest=file_digest(path), stored=stored)
        return files

    def commit(self, restore_bound: float, encoding: codec.Encoding | None) -> None:
        """Upload files, then the index that makes the version exist. Raises Conflict if it exists already."""
        assert self.full is not None
        store, main = self.chain.store, self.full
        if self.delta is not None and self.delta.tuneloop.restore_cost <= restore_bound:
            main = self.delta
        elif self.delta is not None:
            step = self.delta.tuneloop
            digest = xxhash.xxh3_128_hexdigest(self.delta.encoded())
            change = {"delta_index": digest, "elements": step.elements, "changed": step.changed}
            main = main.model_copy(update={"tuneloop": main.tuneloop.model_copy(update=change)})
            place = versions.delta_place(self.place, main)
            self._upload(self.delta, place)
            store.put(f"{place}/{INDEX}", self.delta.encoded())
        if main.encoding is None:
            found = roles.classify_tensors(self.new.directory, self.new.tensors)
            about = main.tuneloop.model_copy(update={"roles": found, "deltas": encoding})
            main = main.model_copy(update={"tuneloop": about})
        self._upload(main, self.place)
        store.create(f"{self.place}/{INDEX}", main.encoded())

    def _upload(self, index: Index, place: str) -> None:
        sources = {
            f.stored: self.new.directory / name
            for name, f in index.tuneloop.files.items()
            if f.stored
        }
        if index.encoding is not None:
            sources |= dict.fromkeys(index.weight_map.values(), self.delta_path)
        for name, source in sources.items():
            self.chain.store.upload(f"{place}/{name}", source)
        self.sent += index.tuneloop.stored_bytes

    def adopt_existing(self) -> Published:
        """Verify that the existing version has our weights, and move the pointer to it."""
        assert self.full is not None
        if not self.chain.entry(self.version).index.same_state(self.full):
            remedy = f"{self.chain.store.url}/{self.place} holds other weights; publish under a new number"
            raise PointerConflict("weights version", self.version, remedy)
        self.sent = 0
        return self.advance(self.chain.store)

    def advance(self, store: Store) -> Published:
        """Drop what crashed attempts left; then move the pointer, last."""
        entry = Entry(store, self.place)
        step = self.chain.delta(entry)
        kept = entry.keys() | (step.keys() if step else set())
        for key in store.keys(self.place):
            if key not in kept and not key.rpartition("/")[2].startswith(
                "."
            ):  # hidden: another process is writing it
                store.delete(key)
        ref = versions.get_version_reference(entry)
        pointer.advance_pointer(store, pointer.Latest(version=self.version, ref=ref))
        return Published(
            version=self.version,
            ref=ref,
            base_version=step.index.base if step else None,
            encoding=step.index.encoding if step else None,
            full=entry.index.encoding is None,
            sent_bytes=self.sent,
            full_bytes=self.new.size,
            delta_bytes=step.index.tuneloop.stored_bytes if step else None,
            density=step.index.density if step else None,
            timings=self.timings,
        )


def _not_the_base(base: Path | str, standing: Entry) -> Corrupt:
    remedy = f"is not version {standing.version} as published; without `base` it is derived from the store"
    return Corrupt("base", str(base), remedy)
