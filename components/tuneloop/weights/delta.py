"""Write the delta of two model directories as one file, and apply such files in place.

Each thread works on one tensor. Both sides are memory-mapped and read once, in blocks that stay in
a core's cache: reading, comparing, hashing and compressing are one pass, and neither model is ever
held in memory.

`weights/publish.py` writes, `weights/materialize.py` and `weights/tensors.py` apply. Equal models
give equal files. The tests are `tests/unit/weights/test_protocol.py` and
`tests/unit/weights/test_layout.py`.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tuneloop.core.errors import Corrupt
from tuneloop.core.json_types import JsonObject
from tuneloop.core.threads import map_ahead
from tuneloop.weights import codec
from tuneloop.weights.layout import Blame, Bytes, Checkpoint, encode_header, read_header

MEND = "restore it from a copy, or publish the next version in full"
"""The remedy for a damaged file of a published version."""


@dataclass
class Written:
    """The result of `write_delta`: a file of `size` bytes with the changed tensors `names`.

    Attributes:
        names: the changed tensors; without any there is no file, and `size` is 0.
        old, new: tensor name → xxh3-128 of its bytes before and after.
        changed, elements: how many elements differ, and how many there are.
        size: bytes of the file.
        fits: False if the file would have reached the limit; it was not written then.
    """

    names: list[str]
    old: dict[str, str]
    new: dict[str, str]
    changed: int
    elements: int
    size: int
    fits: bool


def write_delta(
    old: Checkpoint,
    new: Checkpoint,
    path: Path,
    encoding: codec.Encoding,
    limit: int,
) -> Written:
    """Write the delta between two checkpoints of the same layout to `path`.

    The file is in the safetensors format: a U8 vector, the payload, for each changed tensor, and in
    ``__metadata__`` the xxh3-128 of these tensors' new states. `DeltaFile` refuses any other entry
    in ``__metadata__``, also that of earlier releases.

    Args:
        old, new: checkpoints with equal headers.
        path: the file to write.
        encoding: of the payloads.
        limit: a file of this many bytes or more is not kept: a full version is better then.

    Raises:
        UserError: the encoding cannot express the size of a tensor.
    """

    def encode(name: str) -> codec.Delta:
        return codec.encode_delta(
            old.view(name),
            new.view(name),
            new.tensors[name].width,
            encoding,
        )

    written = Written(
        names=[],
        old={},
        new={},
        changed=0,
        elements=0,
        size=0,
        fits=True,
    )
    metadata: dict[str, str] = {}
    header: JsonObject = {"__metadata__": metadata}
    # Payloads are written as they come, and the header, which comes first in the file, at the end.
    header_size = _reserve_header(new)
    payload_size = 0
    deltas = map_ahead(encode, new.tensors, count_threads())
    with path.open("wb") as file:
        file.seek(header_size)
        for (name, tensor), delta in zip(new.tensors.items(), deltas, strict=True):
            written.old[name] = delta.old
            written.new[name] = delta.new
            # `overwrite` counts bytes, the others count elements.
            width = 1 if encoding == "overwrite" else tensor.width
            written.elements += (tensor.end - tensor.start) // width
            written.changed += delta.changed
            # Tensors that did not change are left out of the file.
            if delta.payload is None:
                continue
            written.names.append(name)
            metadata[name] = delta.new
            size = len(delta.payload)
            header[name] = _describe_payload(size, payload_size, payload_size + size)
            payload_size += size
            # Checksums of the other tensors are needed even if the file is not.
            written.fits = written.fits and header_size + payload_size < limit
            if written.fits:
                file.write(delta.payload)
        file.seek(0)
        file.write(encode_header(header, header_size))
    if written.names:
        written.size = header_size + payload_size
    if not written.names or not written.fits:
        path.unlink()
    return written


def _describe_payload(size: int, start: int, end: int) -> JsonObject:
    """Return the entry of a safetensors header for a payload of `size` bytes."""
    return {
        "dtype": "U8",
        "shape": [size],
        "data_offsets": [start, end],
    }


def _reserve_header(checkpoint: Checkpoint) -> int:
    """Return the most bytes that the header of a delta to `checkpoint` can take.

    Sizes and offsets are known only after encoding, and payloads are written before that. No
    payload is as long as twice the model.
    """
    limit = 2 * checkpoint.size
    header: JsonObject = {"__metadata__": dict.fromkeys(checkpoint.tensors, "0" * 32)}
    for name in checkpoint.tensors:
        header[name] = _describe_payload(limit, limit, limit)
    return len(encode_header(header))


class DeltaFile:
    """A delta file, memory-mapped.

    Attributes:
        encoding: of the payloads.
        payloads: changed tensor → its payload, flat uint8.
        checksums: changed tensor → xxh3-128 of its new bytes, as the file states it.
        blame: makes the errors of this file.
    """

    def __init__(
        self,
        path: Path,
        encoding: codec.Encoding,
        names: Iterable[str],
        expected: Mapping[str, str],
        blame: Blame,
    ) -> None:
        """Open a file whose index lists the tensors `names` with the checksums `expected`.

        Raises:
            Corrupt: the file and the index do not agree.
        """
        self.encoding = encoding
        self.blame = blame
        header = read_header(path, blame=blame)
        self.checksums = header.metadata
        # What the index says of it, the file has to say as well.
        listed = {name: expected.get(name) for name in names}
        if self.checksums != listed or set(header.tensors) != set(listed):
            raise blame("holds other tensors than its index says")
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self.payloads: dict[str, Bytes] = {}
        for name, tensor in header.tensors.items():
            self.payloads[name] = content[tensor.start : tensor.end]


def patch_checkpoint(
    target: Checkpoint,
    deltas: list[DeltaFile],
    expected: Mapping[str, str],
    start: Mapping[str, str] | None = None,
) -> None:
    """Apply `deltas` in order to the files of `target`, and check the new state of every tensor.

    All deltas of a tensor are applied in a buffer of the thread. The tensor is written only if the
    result is right.

    Args:
        target: the checkpoint to change.
        deltas: from its state onward, each to the next version.
        expected: tensor name → checksum of the last state.
        start: tensor name → checksum of the state now, so that no delta is blamed for its input.

    Raises:
        Corrupt: a payload is damaged, or a new state is not as published. It names the file at
            fault; `target` may be written in part.
    """

    def update(name: str) -> None:
        data = target.view(name)
        blame = target.blame(target.tensors[name].file)
        touching = [delta for delta in deltas if name in delta.payloads]
        if not touching:
            # Unchanged, but proved as well: the directory may have been damaged.
            digest = xxhash.xxh3_128_hexdigest(data.data)
            check_checksums([(name, digest)], expected, blame)
            return
        # Written as a whole: each page stored through the map would cost a page fault.
        patched = _borrow_buffer(len(data))
        for delta in touching:
            digest, damage = _apply_payload(
                delta,
                name,
                data,
                patched,
                target.tensors[name].width,
            )
            if damage:
                # The tensor on the disk, which is not written yet, may be at fault.
                if start is not None:
                    original = xxhash.xxh3_128_hexdigest(target.view(name).data)
                    check_checksums([(name, original)], start, blame)
                raise delta.blame(f"its {name} {damage}")
            # The next delta applies to the buffer, in place.
            data = patched
        check_checksums([(name, digest)], expected, touching[-1].blame)
        target.write(name, patched)

    for _ in map_ahead(update, target.tensors, count_threads()):
        pass


def _apply_payload(
    delta: DeltaFile,
    name: str,
    old: Bytes,
    new: Bytes,
    width: int,
) -> tuple[str, str]:
    """Apply the payload of one tensor; return the xxh3-128 of `new`, and what is wrong ("": nothing)."""
    try:
        digest = codec.apply_delta(
            old,
            new,
            delta.payloads[name],
            width,
            delta.encoding,
        )
    except Corrupt as error:
        return "", error.remedy
    expected = delta.checksums[name]
    if digest != expected:
        return digest, f"gives xxh3-128 {digest}, but {expected} was published"
    return digest, ""


_local = threading.local()


def _borrow_buffer(size: int) -> Bytes:
    """Return memory that the thread reuses for its next tensor.

    New pages take four times as long to fill.
    """
    if not hasattr(_local, "buffer") or len(_local.buffer) < size:
        _local.buffer = np.empty(size, np.uint8)
    return _local.buffer[:size]


def check_checksums(
    checksums: Iterable[tuple[str, str]],
    expected: Mapping[str, str],
    blame: Blame,
) -> None:
    """Check pairs of tensor name and checksum. Raises Corrupt at the first that differs."""
    for name, checksum in checksums:
        published = expected.get(name)
        if checksum != published:
            raise blame(f"its {name} has xxh3-128 {checksum}, but {published} was published")


def compute_checksums(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tensor name → xxh3-128 of its bytes."""

    def compute(name: str) -> str:
        return xxhash.xxh3_128_hexdigest(checkpoint.view(name).data)

    names = checkpoint.tensors
    return dict(zip(names, map_ahead(compute, names, count_threads())))


def count_threads() -> int:
    """Count the CPUs that this process may use; more than eight do not help a memory-bound pass."""
    return min(8, len(os.sched_getaffinity(0)))
