"""Publish a model directory as the next version: files, then the index, then the pointer.

`weights/publication.py` calls `publish_version` after each commit, `runs/forking.py` for the policy
that a fork begins with, and other trainers as a library (``docs/weights.md``). The tests are
`tests/unit/weights/test_protocol.py`.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
"""The cost of applying a delta beyond reading its bytes, relative to restoring the full version.

Applying takes about 0.15 s a GB and core, and reading 1.5 s a GB from an object store. For files in
the page cache, which are read in 0.5 s a GB, it would be 0.35. Indexes store the sum
(`restore_cost` of `weights/versions.py`), so that another value counts only for deltas that are
published later.
"""
RESTORE_BOUND = 3.0
"""The next version is published in full as well (an anchor) where replaying the deltas since the
last full one would cost more than this many restores of a full version.

The cost sums, over these deltas, (bytes of the delta / bytes in full) + `APPLY_COST`. At 3, a
replica that starts from nothing is there within four times a full restore. At 1 % of the bytes a
version, every 28th version is an anchor, and the publisher sends 1/22 of the full bytes on average.
No setting of a run changes it.
"""


@dataclass(frozen=True)
class Published:
    """A version as it is now published.

    `weights/publication.py` records all of it as JSON, and requires the fields of its `RECORD`,
    also of the records of earlier releases.

    Attributes:
        version: its number.
        ref: its reference, as in the pointer.
        base_version, encoding: as in the index; None if only a full version was published.
        full: whether the version is stored in full (with or without a delta beside it).
        sent_bytes: bytes written by this call; 0 if the version existed already.
        full_bytes: bytes of the model directory's safetensors.
        delta_bytes: bytes of the delta; None if there is none.
        density: share of elements that changed; None without a base.
        timings: seconds: ``base`` (derive it from the chain), ``encode``, and ``publish`` (upload,
            commit, pointer). `runs/delivery.py: _describe_publication` reads these names.
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
    held_by_readers: bool = False,
    encoding: codec.Encoding | Literal["chain"] | None = "chain",
    restore_bound: float = RESTORE_BOUND,
) -> Published:
    """Publish `directory` as `version` below `root` and move ``latest`` to it.

    It is crash-safe at every point: until the index exists the version does not, until the pointer
    moves the old version is served, and calling again finishes. The base is the newest version
    below `version` in the store, never one in memory, so a restarted trainer continues the chain.
    If the version exists with the same bytes, only the pointer is moved.

    Args:
        root: the URL of the weights root, or a store on it.
        version: any number above the latest; a version is immutable.
        directory: in Hugging Face's layout: ``*.safetensors`` and the files beside them, without
            hidden ones.
        base: directory of the base version (the previous export), checked against the chain; None:
            it is assembled from the chain.
        base_version: the version that `base` holds; if another version is the base, `base` is not
            used.
        source: the digest of the checkpoint that the version is made from, which replicas report.
        held_by_readers: store only the weights' digest, as readers start on this model (the setting
            `fleet_has_base`). Later versions need `base`, until a full one is published.
        encoding: of this delta and later ones; chain: as the versions before, at first gap8-xor;
            None publishes in full.
        restore_bound: how soon the next anchor comes, as in `RESTORE_BOUND`; 0 makes every version
            an anchor.

    Raises:
        PointerRewind: ``latest`` is at a newer version.
        PointerConflict: the version exists with other bytes.
        Corrupt: `base` is not the base version, or the chain in the store is damaged.
    """
    chain = Chain(root)
    if chain.pointed is not None and chain.pointed.version > version:
        raise PointerRewind(
            "weights version",
            version,
            f"{chain.store.url} is at version {chain.pointed.version} already",
        )
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        attempt = _Attempt(
            chain,
            version,
            Path(directory),
            Path(scratch),
            source,
        )
        if version in chain.versions:
            attempt.describe_full(held_by_readers)
            return attempt.adopt_existing()
        # The newest version in the store, whatever this process published before.
        previous = max((v for v in chain.versions if v < version), default=None)
        if encoding == "chain":
            encoding = _choose_encoding(chain, previous)
        if previous is not None and encoding is not None and not held_by_readers:
            # The caller's base is another one if a version in between was not published.
            is_base = base_version in (None, previous)
            attempt.encode(
                chain.entry(previous),
                base if is_base else None,
                encoding,
            )
        attempt.describe_full(held_by_readers)
        with attempt.measured("publish"):
            try:
                attempt.commit(restore_bound, encoding)
            except Conflict:
                # Another publisher of the same version was faster.
                attempt.chain = Chain(chain.store)
                return attempt.adopt_existing()
            return attempt.advance()


def _choose_encoding(chain: Chain, previous: int | None) -> codec.Encoding:
    """Return the encoding that the chain has used up to the version `previous`."""
    if previous is None:
        return "gap8-xor"
    index = chain.entry(previous).index
    return index.encoding or index.tuneloop.deltas or "gap8-xor"


class _Attempt:
    """One attempt to publish: the files to upload, and the indexes that describe them.

    `describe_full` runs in any case: `adopt_existing` compares with it what another attempt
    published.
    """

    def __init__(
        self,
        chain: Chain,
        version: int,
        directory: Path,
        scratch: Path,
        source: str | None,
    ) -> None:
        self.chain = chain
        self.version = version
        self.scratch = scratch
        self.source = source
        self.new = Checkpoint(directory)
        self.tensor_bytes = sum(t.end - t.start for t in self.new.tensors.values())
        self.folder = versions.get_version_directory(version)
        self.timings: dict[str, float] = {}
        self.checksums: dict[str, str] | None = None
        self.full: Index | None = None
        self.delta: Index | None = None
        self.delta_path = scratch / "delta.safetensors"
        self.sent_bytes = 0

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Record the seconds that the block takes in `timings`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = time.perf_counter() - start

    def encode(
        self,
        base_entry: Entry,
        base: Path | str | None,
        encoding: codec.Encoding,
    ) -> None:
        """Encode the delta to the version `base_entry`, whose files lie in `base`.

        There is none if a delta cannot express the step, or is not smaller than the full version.

        Raises:
            Corrupt: `base` does not have the files of that version.
        """
        base_index = base_entry.index
        with self.measured("base"):
            if base is None:
                base = self.scratch / "base"
                materialize_version(self.chain.store, base_entry.version, base)
            old = Checkpoint(Path(base))
        # Tensors are compared while they are encoded, which reads them all.
        if old.headers != base_index.headers:
            raise _report_other_base(base, base_entry)
        # Names, dtypes, shapes or files differ: only a full version can express that.
        if old.headers != self.new.headers:
            return
        with self.measured("encode"):
            written = delta.write_delta(
                old,
                self.new,
                self.delta_path,
                encoding,
                limit=self.new.size,
            )
        self.checksums = written.new
        if written.old != base_index.tuneloop.checksums:
            raise _report_other_base(base, base_entry)
        if written.fits:
            self.delta = self._describe_delta(base_entry, written, encoding)

    def _describe_delta(
        self,
        base_entry: Entry,
        written: delta.Written,
        encoding: codec.Encoding,
    ) -> Index:
        """Return the index of the delta that was written."""
        base_extra = base_entry.index.tuneloop
        files = self._list_files(written.new)
        for name, file in files.items():
            base_file = base_extra.files.get(name)
            is_unchanged = base_file is not None and file.content == base_file.content
            # The delta file has what changed in safetensors; other files are stored if they changed.
            if file.header or is_unchanged:
                files[name] = file.model_copy(update={"stored": None})
        delta_file = ""
        if written.names:
            # Named by its content, so that two publishers never write different bytes to one key.
            digest = file_digest(self.delta_path)
            delta_file = f"model-00000-of-00001.{digest[:12]}.safetensors"
        cost = written.size / self.new.size + APPLY_COST
        return Index(
            metadata=Metadata(
                version=f"{self.version:06d}",
                base_version=base_entry.index.metadata.version,
                delta_encoding=encoding,
                compression_format="zstd",
                total_size=self.tensor_bytes,
            ),
            weight_map=dict.fromkeys(written.names, delta_file),
            tuneloop=Extra(
                files=files,
                checksums=written.new,
                base_index=base_entry.digest,
                stored_bytes=written.size + _sum_stored_bytes(files),
                elements=written.elements,
                changed=written.changed,
                restore_cost=base_extra.restore_cost + cost,
                source=self.source,
            ),
        )

    def describe_full(self, held_by_readers: bool) -> None:
        """Make the index of a full version, without the weights if readers hold them."""
        # Encoding has hashed every tensor already.
        if self.checksums is None:
            self.checksums = delta.compute_checksums(self.new)
        files = self._list_files(self.checksums, held_by_readers)
        weight_map: dict[str, str] = {}
        for name, tensor in self.new.tensors.items():
            stored = files[tensor.file].stored
            if stored:
                weight_map[name] = stored
        readers_digest = None
        if held_by_readers:
            readers_digest = versions.digest_weights(self.new.headers, self.checksums)
        self.full = Index(
            metadata=Metadata(
                version=f"{self.version:06d}",
                total_size=self.tensor_bytes,
            ),
            weight_map=weight_map,
            tuneloop=Extra(
                files=files,
                checksums=self.checksums,
                stored_bytes=_sum_stored_bytes(files),
                source=self.source,
                held=readers_digest,
            ),
        )

    def _list_files(
        self,
        checksums: dict[str, str],
        held_by_readers: bool = False,
    ) -> dict[str, File]:
        """Return name → file of the assembled directory, as a full version stores them.

        Weights are named by their content: two attempts with different bytes never write to one
        key.
        """
        # Header and checksums together fix every byte of a safetensors file.
        files: dict[str, File] = {}
        for name, header in self.new.headers.items():
            content = xxhash.xxh3_128(header.encode())
            for tensor_name, tensor in self.new.tensors.items():
                if tensor.file == name:
                    content.update(checksums[tensor_name].encode())
            stem = name.removesuffix(".safetensors")
            stored = f"{stem}.{content.hexdigest()[:12]}.safetensors"
            files[name] = File(
                size=(self.new.directory / name).stat().st_size,
                header=header,
                stored=None if held_by_readers else stored,
            )
        for name in self.new.others:
            path = self.new.directory / name
            files[name] = File(
                size=path.stat().st_size,
                digest=file_digest(path),
                # The index of the export would have the key of the version's own.
                stored=f"export.{name}" if name == INDEX else name,
            )
        return files

    def commit(self, restore_bound: float, encoding: codec.Encoding | None) -> None:
        """Upload files, then the index that makes the version exist.

        Args:
            restore_bound: as in `publish_version`.
            encoding: that of the deltas that follow; the index of a version without base has it.

        Raises:
            Conflict: the version exists already.
        """
        assert self.full is not None
        store = self.chain.store
        index = self.full
        if self.delta is not None and self.delta.tuneloop.restore_cost <= restore_bound:
            index = self.delta
        elif self.delta is not None:
            # An anchor: full, and beside it the same step as a delta, for replicas at the base.
            delta_index = xxhash.xxh3_128_hexdigest(self.delta.encode_json())
            index = _update_extra(
                index,
                delta_index=delta_index,
                elements=self.delta.tuneloop.elements,
                changed=self.delta.tuneloop.changed,
            )
            folder = versions.get_delta_folder(self.folder, delta_index)
            self._upload(self.delta, folder)
            store.put(f"{folder}/{INDEX}", self.delta.encode_json())
        if index.encoding is None:
            index = _update_extra(
                index,
                roles=roles.classify_tensors(self.new.directory, self.new.tensors),
                deltas=encoding,
            )
        self._upload(index, self.folder)
        store.create(f"{self.folder}/{INDEX}", index.encode_json())

    def _upload(self, index: Index, folder: str) -> None:
        """Upload the files that `index` names to `folder`."""
        paths: dict[str, Path] = {}
        for name, stored in index.stored_files.items():
            paths[stored] = self.new.directory / name
        if index.encoding is not None:
            for stored in index.weight_map.values():
                paths[stored] = self.delta_path
        for stored, path in paths.items():
            self.chain.store.upload(f"{folder}/{stored}", path)
        self.sent_bytes += index.tuneloop.stored_bytes

    def adopt_existing(self) -> Published:
        """Verify that the existing version has our weights, and move the pointer to it.

        Raises:
            PointerConflict: it has others.
        """
        assert self.full is not None
        entry = self.chain.entry(self.version)
        if not entry.index.has_state_of(self.full):
            raise PointerConflict(
                "weights version",
                self.version,
                f"{self.chain.store.url}/{self.folder} holds other weights;"
                " publish under a new number",
            )
        # What this attempt uploaded is deleted, or has the same bytes.
        self.sent_bytes = 0
        return self.advance()

    def advance(self) -> Published:
        """Delete the leftovers of crashed attempts; then move the pointer, last."""
        store = self.chain.store
        entry = Entry(store, self.folder)
        step = self.chain.find_delta(entry)
        keys = entry.list_keys()
        if step:
            keys |= step.list_keys()
        for key in store.keys(self.folder):
            name = key.rpartition("/")[2]
            # Hidden files are those that another process is writing.
            if key not in keys and not name.startswith("."):
                store.delete(key)
        ref = versions.get_version_reference(entry)
        pointer.advance_pointer(store, pointer.Latest(version=self.version, ref=ref))
        return Published(
            version=self.version,
            ref=ref,
            base_version=step.index.base if step else None,
            encoding=step.index.encoding if step else None,
            full=entry.index.encoding is None,
            sent_bytes=self.sent_bytes,
            full_bytes=self.new.size,
            delta_bytes=step.index.tuneloop.stored_bytes if step else None,
            density=step.index.density if step else None,
            timings=self.timings,
        )


def _sum_stored_bytes(files: dict[str, File]) -> int:
    """Return the bytes of the files that a version stores itself."""
    return sum(file.size for file in files.values() if file.stored)


def _update_extra(index: Index, **fields: object) -> Index:
    """Return a copy of `index` with other values for `fields` of its part ``tuneloop``.

    The values are not checked, and a name is that of the field, not its alias (`readers_digest`).
    """
    extra = index.tuneloop.model_copy(update=fields)
    return index.model_copy(update={"tuneloop": extra})


def _report_other_base(base: Path | str, entry: Entry) -> Corrupt:
    """Return the error of a base directory that does not hold the version `entry`."""
    return Corrupt(
        "base",
        str(base),
        f"is not version {entry.version} as published; without `base` it is derived from the store",
    )
