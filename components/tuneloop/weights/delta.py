"""Two model directories become one delta file; a delta file changes a directory in place. One thread a tensor.

Both sides are memory-mapped and read once, in blocks that stay in a core's cache: reading, comparing, hashing and
compressing are one pass, and neither model is ever held in memory."""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tuneloop.core.errors import Corrupt
from tuneloop.core.threads import map_ahead
from tuneloop.weights import codec
from tuneloop.weights.layout import Blame, Bytes, Checkpoint, encode_header, read_header

MEND = "restore it from a copy, or publish the next version in full"


@dataclass
class Written:
    """The result of `write_delta`: a file of `size` bytes (0: nothing changed) with the changed tensors `names`.

    Attributes:
        old, new: xxh3-128 of every tensor before and after.
        changed, elements: how many elements differ, of how many.
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
    old: Checkpoint, new: Checkpoint, path: Path, encoding: codec.Encoding, limit: int
) -> Written:
    """Write the delta between two checkpoints of the same layout to `path`: a safetensors file of U8 payloads by name.

    Tensors that did not change are absent; ``__metadata__`` holds the xxh3-128 of the others' new states. No file of
    `limit` bytes or more is kept: a full version is the better choice then."""

    def encode(name: str) -> codec.Delta:
        return codec.encode_delta(old.view(name), new.view(name), new.tensors[name].width, encoding)

    widest = {
        n: {"dtype": "U8", "shape": [2 * new.size], "data_offsets": [2 * new.size] * 2}
        for n in new.tensors
    }
    # offsets are not known yet
    room = len(encode_header({"__metadata__": dict.fromkeys(new.tensors, "0" * 32), **widest}))
    done = Written([], {}, {}, 0, 0, 0, True)
    header: dict[str, Any] = {"__metadata__": {}}
    at = 0
    with path.open("wb") as file:
        file.seek(room)
        for name, delta in zip(
            new.tensors, map_ahead(encode, new.tensors, count_threads()), strict=True
        ):
            tensor = new.tensors[name]
            done.old[name], done.new[name] = delta.old, delta.new
            done.elements += (tensor.end - tensor.start) // (
                1 if encoding == "overwrite" else tensor.width
            )
            done.changed += delta.changed
            if delta.payload is None:
                continue
            size = len(delta.payload)
            done.names.append(name)
            header["__metadata__"][name] = delta.new
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
            done.fits = done.fits and room + at < limit
            if done.fits:
                file.write(delta.payload)
        file.seek(0)
        file.write(encode_header(header, room))
    done.size = room + at if done.names else 0
    if not done.names or not done.fits:
        path.unlink()
    return done


class DeltaFile:
    """A delta, opened: the payload of each changed tensor. `expected`: tensor name → checksum in the version's index;
    `blame` makes errors. Raises Corrupt if the file and the index do not agree."""

    def __init__(
        self,
        path: Path,
        encoding: codec.Encoding,
        names: Iterable[str],
        expected: Mapping[str, str],
        blame: Blame,
    ) -> None:
        self.encoding, self.blame = encoding, blame
        header = read_header(path, blame=blame)
        self.stated = stated = header.metadata
        if not set(names) == set(header.tensors) == set(stated) or any(
            expected.get(n) != stated[n] for n in stated
        ):
            raise blame("holds other tensors than its index says")
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self.payloads: dict[str, Bytes] = {
            name: content[t.start : t.end] for name, t in header.tensors.items()
        }


def patch_checkpoint(
    target: Checkpoint,
    deltas: list[DeltaFile],
    expected: Mapping[str, str],
    start: Mapping[str, str] | None = None,
) -> None:
    """Apply `deltas` in order to the files of `target`, and check the new state of every tensor.

    All deltas of a tensor are applied in a buffer of the thread; the tensor is written only if the result is right.
    `start`: the checksums of `target` before, so that no delta is blamed for its input. Raises Corrupt, naming the file
    at fault, if a payload is damaged or a new state is not as published; `target` may be written in part then."""

    def update(name: str) -> None:
        data, blame = target.view(name), target.blame(target.tensors[name].file)
        if not (touching := [delta for delta in deltas if name in delta.payloads]):
            check_checksums([(name, xxhash.xxh3_128_hexdigest(data.data))], expected, blame)
            return
        made = _buffer(
            len(data)
        )  # written as a whole: each page stored through the map would cost a page fault
        for delta in touching:
            try:
                digest = codec.apply_delta(
                    data, made, delta.payloads[name], target.tensors[name].width, delta.encoding
                )
                wrong = f"gives xxh3-128 {digest}, but {delta.stated[name]} was published"
            except Corrupt as error:
                digest, wrong = "", error.remedy
            if digest != delta.stated[name]:
                if start is not None:
                    check_checksums(
                        [(name, xxhash.xxh3_128_hexdigest(target.view(name).data))], start, blame
                    )
                raise delta.blame(f"its {name} {wrong}")
            data = made
        check_checksums([(name, digest)], expected, touching[-1].blame)
        target.write(name, made)

    for _ in map_ahead(update, target.tensors, count_threads()):
        pass


_local = threading.local()


def _buffer(size: int) -> Bytes:
    """Return memory that the thread reuses for its next tensor: new pages take four times as long to fill."""
    if not hasattr(_local, "buffer") or len(_local.buffer) < size:
        _local.buffer = np.empty(size, np.uint8)
    return _local.buffer[:size]


def check_checksums(
    found: Iterable[tuple[str, str]], expected: Mapping[str, str], blame: Blame
) -> None:
    """Check tensor checksums. Raises Corrupt at the first that differs."""
    for name, digest in found:
        if digest != expected.get(name):
            raise blame(f"its {name} has xxh3-128 {digest}, but {expected.get(name)} was published")


def compute_checksums(checkpoint: Checkpoint) -> dict[str, str]:
    """Compute the xxh3-128 of every tensor's bytes."""
    names = checkpoint.tensors
    found = map_ahead(
        lambda name: xxhash.xxh3_128_hexdigest(checkpoint.view(name).data), names, count_threads()
    )
    return dict(zip(names, found))


def count_threads() -> int:
    """Count the CPUs that this process may use; more than eight do not help a memory-bound pass."""
    return min(8, len(os.sched_getaffinity(0)))
