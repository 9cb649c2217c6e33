"""The delta of one tensor: three encodings of the difference of two equally long byte strings.

Everything compares and combines integer views of equal width, never floats: -0.0 equals 0.0 and
NaN differs from itself, but their bytes do neither.

* ``xor``: new XOR old, one zstd frame. The published format (slime, miles, NeMo-RL).
* ``overwrite``: count (u4), byte positions (u4 each), new bytes, one zstd frame. Published too; it
  is safe to apply twice.
* ``gap8-xor``: our own. Gaps between changed elements as bytes, XOR values in byte planes, each in
  a zstd frame of its own. It has half the bytes of ``xor``, is encoded twice as fast and applied
  three times as fast. `docs/weights.md` states it byte by byte.

The bytes are a published format, which readers of other projects read: an encoding may be added,
and none changed. `weights/delta.py` puts tensors' deltas into one file. The tests are
`tests/unit/weights/test_codec.py`.
"""

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from tuneloop.core.errors import Corrupt, UserError
from tuneloop.weights.layout import Bytes

Encoding = Literal["gap8-xor", "xor", "overwrite"]
"""A further one needs a branch in `encode_delta` and in `apply_delta`, which take an unknown name
for ``overwrite``. `config/engine_weights.py` and `stages/base_model.py` offer it to users; readers
of earlier releases refuse a version that has it (`weights/versions.py: Metadata`).
"""
BLOCK = 1 << 21
"""Bytes a chunk: two chunks and the scratch memory stay in the cache of a core. A reader takes the
size of the chunks of ``gap8-xor`` from the payload.
"""
LEVEL = 1
"""Of zstd. It changes the bytes of a publication, not those of the weights that are read from it."""
_FEW_LONG_MATCHES = zstandard.ZstdCompressionParameters.from_level(
    LEVEL,
    min_match=7,
    hash_log=6,
)
"""For `_compress`: gaps and values have no meaningful short matches. A plane takes a third less
time, 8 % less space.
"""
_ESCAPE = 255
"""The byte of ``gap8-xor`` that adds 255 to a gap and continues it."""
_local = threading.local()  # compressors and decompressors are not safe to share between threads


@dataclass(frozen=True)
class Delta:
    """The result of `encode_delta`.

    Attributes:
        payload: the encoded difference; None if nothing changed.
        changed: the number of changed elements (``overwrite``: of changed bytes, which
            `weights/delta.py: write_delta` relates to bytes).
        old, new: xxh3-128 of both sides.
    """

    payload: bytes | None
    changed: int
    old: str
    new: str


def encode_delta(
    old: Bytes,
    new: Bytes,
    width: int,
    encoding: Encoding,
) -> Delta:
    """Encode the delta from `old` to `new`, and hash both by xxh3-128, in one pass.

    Args:
        old, new: flat uint8 of the same length, a multiple of `width`.
        width: bytes an element: 1, 2, 4 or 8.
        encoding: one of the module's three.

    Raises:
        UserError: ``overwrite`` of 4 GiB or more.
    """
    if encoding == "overwrite" and len(new) >= 1 << 32:
        remedy = "cannot address a tensor of 4 GiB; use xor or gap8-xor"
        raise UserError("delta_encoding", encoding, remedy)
    encoder: _GapEncoder | _XorEncoder | _OverwriteEncoder
    if encoding == "gap8-xor":
        encoder = _GapEncoder(width)
    elif encoding == "xor":
        encoder = _XorEncoder(len(new), width)
    else:
        encoder = _OverwriteEncoder()

    old_digest = xxhash.xxh3_128()
    new_digest = xxhash.xxh3_128()
    changed = 0
    for block in _slice_blocks(len(new), BLOCK):
        old_block = old[block]
        new_block = new[block]
        # Hashing brings the blocks into the cache, where the encoder compares them.
        old_digest.update(old_block.data)
        new_digest.update(new_block.data)
        changed += encoder.add(old_block, new_block)
    return Delta(
        payload=encoder.finish() if changed else None,
        changed=changed,
        old=old_digest.hexdigest(),
        new=new_digest.hexdigest(),
    )


def apply_delta(
    old: Bytes,
    new: Bytes,
    payload: Bytes,
    width: int,
    encoding: Encoding,
) -> str:
    """Write to `new` what the delta makes of `old`, and return its xxh3-128, in one pass.

    Args:
        old, new: flat uint8 of the same length, or the same array.
        payload: what `encode_delta` returned.
        width, encoding: as they were encoded.

    Raises:
        Corrupt: the payload does not fit the tensor; `new` may have changed in part.
    """
    patch = _Patch(old, new)
    try:
        if encoding == "gap8-xor":
            _apply_gaps(patch, payload, width)
        elif encoding == "xor":
            _apply_xor(patch, payload)
        else:
            _apply_overwrite(patch, payload)
    except Corrupt:
        raise
    except (zstandard.ZstdError, struct.error, ValueError, IndexError) as error:
        raise _report_damage(str(error)) from error
    return patch.digest.hexdigest()


def _slice_blocks(length: int, size: int) -> Iterator[slice]:
    """Yield the slices of `size` items that cover `length` items; the last one may be shorter."""
    for start in range(0, length, size):
        yield slice(start, start + size)


class _Patch:
    """Turns old bytes into new ones, block by block.

    A block stays in the CPU's cache from reading to hashing.
    """

    def __init__(self, old: Bytes, new: Bytes) -> None:
        self.old = old
        self.new = new
        self.digest = xxhash.xxh3_128()

    def walk_blocks(self, size: int) -> Iterator[Bytes]:
        """Yield the blocks of the new bytes, filled with the old bytes, for the caller to change."""
        for block_slice in _slice_blocks(len(self.new), size):
            block = self.new[block_slice]
            if self.old is self.new:
                # This loads it into the cache: scattered reads from memory are slower.
                xxhash.xxh3_64_intdigest(block.data)
            else:
                np.copyto(block, self.old[block_slice])
            yield block
            self.digest.update(block.data)


def _report_damage(damage: str) -> Corrupt:
    """Return the error of a damaged payload; the caller adds the file."""
    return Corrupt("weights", "delta", f"is damaged ({damage})")


def _compress(data: Any) -> bytes:
    """Compress a buffer to one zstd frame, which states its size."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_FEW_LONG_MATCHES)
    return bytes(_local.compressor.compress(data))


def _decompress(
    frame: Any,
    size: int | None = None,
    max_size: int = 1 << 62,
) -> Bytes:
    """Decompress a frame that states `size` bytes, or at most `max_size`.

    The stated size is checked before memory is taken. Raises Corrupt if it is another one.
    """
    stated = zstandard.frame_content_size(frame)
    if stated < 0 or stated > max_size or size not in (None, stated):
        raise _report_damage(f"a frame of {stated} bytes")
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    data = _local.decompressor.decompress(
        frame,
        allow_extra_data=False,
    )
    return np.frombuffer(data, np.uint8)


class _GapEncoder:
    """``gap8-xor``: a header (element width, elements a chunk), then the chunks in order."""

    def __init__(self, width: int) -> None:
        self.width = width
        elements = BLOCK // width
        self.parts = [struct.pack("<II", width, elements)]

    def add(self, old: Bytes, new: Bytes) -> int:
        """Encode the next chunk, and return the number of changed elements."""
        positions, values = find_changed_elements(old, new, self.width)
        count = len(positions)
        self.parts.append(struct.pack("<I", count))
        if not count:
            return 0
        frames = [_compress(_to_gaps(positions))]
        for plane in range(self.width):
            # The conversion drops all but the lowest byte.
            shifted = values >> 8 * plane
            frames.append(_compress(shifted.astype(np.uint8)))
        sizes = map(len, frames)
        self.parts.append(struct.pack(f"<{len(frames)}I", *sizes))
        self.parts += frames
        return count

    def finish(self) -> bytes:
        """Return the payload of all chunks."""
        return b"".join(self.parts)


def find_changed_elements(
    old: Bytes,
    new: Bytes,
    width: int,
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Find the positions of the elements that differ, ascending, and their differing bits.

    Groups of eight comparisons with any difference are found first, and then the positions in
    them. That is twice as fast as a search in all comparisons.

    Args:
        old, new: flat uint8 of the same length, a multiple of `width`.
        width: bytes an element: 1, 2, 4 or 8.

    Returns:
        int64 and ``u<width>`` of one shape: positions, and new XOR old at these.
    """
    old_elements = old.view(f"<u{width}")
    new_elements = new.view(f"<u{width}")
    count = len(old_elements)
    padding = -count % 8
    is_different = np.empty(count + padding, np.bool_)
    is_different[count:] = False
    np.not_equal(
        old_elements,
        new_elements,
        out=is_different[:count],
    )
    groups = is_different.view(np.uint64)
    changed_groups = np.flatnonzero(groups != 0)
    # Positions in the changed groups laid side by side: group * 8 + position in the group.
    comparisons = groups.take(changed_groups).view(np.bool_)
    flat = np.flatnonzero(comparisons)
    positions = changed_groups.take(flat >> 3)
    # In place, as these arrays are as long as the changes are many.
    positions <<= 3
    flat &= 7
    positions |= flat
    values = old_elements.take(positions)
    values ^= new_elements.take(positions)
    return positions, values


def _to_gaps(positions: NDArray[np.int64]) -> Bytes:
    """Encode the distance of each position from the previous one, of the first one from 0.

    A byte of 255 adds 255 to the distance and continues; any other byte ends it.
    """
    gaps = positions.astype(np.uint32)
    gaps[1:] -= gaps[:-1]
    last_bytes = gaps.astype(np.uint8)
    # Long gaps are few: dividing all gaps would take longer than finding the long ones.
    long_gaps = np.flatnonzero(gaps >= _ESCAPE)
    escapes, last_bytes[long_gaps] = np.divmod(gaps[long_gaps], _ESCAPE)
    # Each escape shifts the bytes behind it by one.
    escaped = np.repeat(long_gaps, escapes)
    count = len(last_bytes) + len(escaped)
    is_last_byte = np.ones(count, np.bool_)
    escape_positions = escaped + np.arange(len(escaped))
    is_last_byte[escape_positions] = False
    encoded = np.full(count, _ESCAPE, np.uint8)
    encoded[is_last_byte] = last_bytes
    return encoded


def _apply_gaps(patch: _Patch, payload: Bytes, width: int) -> None:
    """Apply a payload of ``gap8-xor``. Raises Corrupt, struct.error, ValueError, IndexError."""
    stated_width, chunk = struct.unpack_from("<II", payload.data)
    if stated_width != width or not 0 < chunk <= 1 << 31:
        raise _report_damage(f"elements of {stated_width} bytes, chunks of {chunk}")
    offset = 8
    for block in patch.walk_blocks(chunk * width):
        elements = block.view(f"<u{width}")
        (count,) = struct.unpack_from("<I", payload.data, offset)
        offset += 4
        if not count:
            continue
        sizes = struct.unpack_from(f"<{1 + width}I", payload.data, offset)
        offset += 4 * len(sizes)
        frames: list[Bytes] = []
        for size in sizes:
            frames.append(payload[offset : offset + size])
            offset += size
        gap_frame, *plane_frames = frames
        positions = _read_positions(gap_frame, count, elements=len(elements))
        values = elements.take(positions)
        for plane, frame in enumerate(plane_frames):
            plane_bytes = _decompress(frame, size=count)
            # Widened before the shift, which would lose the bits of a byte.
            plane_values = plane_bytes.astype(elements.dtype)
            values ^= plane_values << 8 * plane
        elements[positions] = values
    if offset != len(payload):
        raise _report_damage(f"{len(payload) - offset} bytes too many")


def _read_positions(
    frame: Bytes,
    count: int,
    elements: int,
) -> NDArray[np.int64]:
    """Decode the `count` positions of a chunk of `elements`. Raises Corrupt: they do not fit."""
    gaps = _decompress(frame, max_size=2 * elements)
    sums = np.cumsum(gaps, dtype=np.int64)
    positions = sums[gaps != _ESCAPE]
    # Positions ascend, so that the last one tells whether all lie in the chunk.
    if count > elements or len(positions) != count or positions[-1] >= elements:
        raise _report_damage(f"{len(positions)} positions, {count} stated, for {elements} elements")
    return positions


class _XorEncoder:
    """``xor``: one frame, compressed as a stream, so that no difference is held as a whole."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.parts: list[bytes] = []
        scratch_size = min(size, BLOCK)
        self.scratch = np.empty(scratch_size, np.uint8)
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.stream = compressor.compressobj(size=size)

    def add(self, old: Bytes, new: Bytes) -> int:
        """Encode the next block, and return the number of changed elements."""
        difference = np.bitwise_xor(old, new, out=self.scratch[: len(new)])
        part = self.stream.compress(difference.data)
        self.parts.append(part)
        elements = difference.view(f"<u{self.width}")
        return int(np.count_nonzero(elements))

    def finish(self) -> bytes:
        """Return the payload of all blocks."""
        self.parts.append(self.stream.flush())
        return b"".join(self.parts)


def _apply_xor(patch: _Patch, payload: Bytes) -> None:
    """Apply a payload of ``xor``. Raises Corrupt, ZstdError."""
    decompressor = zstandard.ZstdDecompressor()
    with decompressor.stream_reader(payload.data) as reader:
        for block in patch.walk_blocks(BLOCK):
            data = reader.read(len(block))
            difference = np.frombuffer(data, np.uint8)
            if len(difference) != len(block):
                raise _report_damage("a difference shorter than the tensor")
            block ^= difference
        if reader.read(1):
            raise _report_damage("a difference longer than the tensor")


class _OverwriteEncoder:
    """``overwrite``: the positions of all changed bytes, then the new bytes, in one frame."""

    def __init__(self) -> None:
        self.offset = 0
        self.positions: list[Bytes] = []
        self.values: list[Bytes] = []

    def add(self, old: Bytes, new: Bytes) -> int:
        """Collect the next block, and return the number of changed bytes."""
        positions = np.flatnonzero(old != new)
        # Positions in a payload count from the beginning of the tensor.
        absolute_positions = (positions + self.offset).astype("<u4")
        self.positions.append(absolute_positions.view(np.uint8))
        self.values.append(new[positions])
        self.offset += len(new)
        return len(positions)

    def finish(self) -> bytes:
        """Return the payload of all blocks."""
        count = sum(map(len, self.values))
        header = struct.pack("<I", count)
        parts = [np.frombuffer(header, np.uint8)]
        parts += self.positions
        parts += self.values
        return _compress(np.concatenate(parts))


def _apply_overwrite(patch: _Patch, payload: Bytes) -> None:
    """Apply a payload of ``overwrite``. Raises Corrupt, ZstdError, struct.error."""
    # Each changed byte takes four bytes of position and one of value.
    max_size = 4 + 5 * len(patch.new)
    data = _decompress(payload, max_size=max_size)
    (count,) = struct.unpack_from("<I", data.data)
    if len(data) != 4 + 5 * count:
        raise _report_damage(f"{count} positions in {len(data)} bytes")
    values_offset = 4 + 4 * count
    positions = data[4:values_offset].view("<u4")
    if count and int(positions.max()) >= len(patch.new):
        raise _report_damage("a position beyond the tensor")
    # One block: positions count from the beginning of the tensor.
    values = data[values_offset:]
    for block in patch.walk_blocks(max(len(patch.new), 1)):
        block[positions] = values
