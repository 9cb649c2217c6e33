"""A Hugging Face model directory as bytes: where each tensor lies, without loading any.

The safetensors format (https://github.com/huggingface/safetensors#format): eight bytes give the length of a JSON
header, the header gives dtype, shape and byte range of each tensor, the rest is their data without holes. Two files
with equal headers and equal tensors are therefore byte-identical, which is what the weight protocol proves."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import open_for_reading

Bytes = NDArray[np.uint8]

# The safetensors library lays tensors out widest dtype first, then by name; the same order gives the same file.
_ORDER = [
    "U64",
    "I64",
    "F64",
    "C64",
    "F32",
    "U32",
    "I32",
    "BF16",
    "F16",
    "U16",
    "I16",
    "I8",
    "U8",
    "BOOL",
]
_MEND = "restore the file from a copy"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: `start` and `end` are byte offsets in it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def width(self) -> int:
        """Bytes an element; 1 where elements are not a whole number of 1, 2, 4 or 8 bytes."""
        elements = math.prod(self.shape)
        width = (self.end - self.start) // elements if elements else 1
        return width if width in (1, 2, 4, 8) and width * elements == self.end - self.start else 1


Blame = Callable[[str], Corrupt]
"""Turns what is wrong with a file into an error that names the file and says what to do."""


def build_blame(where: object, mend: str = _MEND) -> Blame:
    """Build the function that makes the errors of a file; `where` is how they name it."""
    return lambda wrong: Corrupt("weights", str(where), f"{wrong}; {mend}")


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file; `digest` is the xxh3-128 of all bytes before the data."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    digest: str


def read_header(path: Path, name: str = "", blame: Blame | None = None) -> Header:
    """Read the header of a safetensors file, whose tensors take `name` as their file. Raises Corrupt: it is not one."""
    with open_for_reading(path) as file:
        return parse_header(file, name, blame or build_blame(path))


def parse_header(file: BinaryIO, name: str, blame: Blame) -> Header:
    """Read the header of a safetensors file that is open. Raises as `read_header`."""
    whole = file.seek(0, 2)
    file.seek(0)
    size = file.read(8)
    length = int.from_bytes(size, "little")
    if len(size) < 8 or length > whole - 8:
        raise blame("is not a safetensors file: its header is cut short")
    raw = file.read(length)
    at = 8 + length
    try:
        entries = json.loads(raw)
        metadata = {str(k): str(v) for k, v in entries.pop("__metadata__", {}).items()}
        tensors = {
            key: Tensor(
                name,
                str(e["dtype"]),
                tuple(map(int, e["shape"])),
                *(at + int(o) for o in e["data_offsets"]),
            )
            for key, e in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise blame(f"is not a safetensors file ({error!r})") from error
    for start, end in sorted((t.start, t.end) for t in tensors.values()):
        if start != at or end < start:
            raise blame(f"its tensors overlap or leave holes at byte {at}")
        at = end
    if at != whole:
        raise blame(f"is {whole} bytes, its header says {at}")
    return Header(tensors, metadata, xxhash.xxh3_128_hexdigest(size + raw))


class Checkpoint:
    """A model directory with ``*.safetensors`` at its top, memory-mapped, for writing in place if `writable`.

    `blame` makes the errors of each file, which name its path by default. Raises UserError: no safetensors file there;
    Corrupt: a file is not what its header says, or two files hold the same tensor.

    Attributes:
        tensors: name → where it lies, sorted by name.
        headers: safetensors file → digest of its header: equal where names, dtypes, shapes and order are.
        others: the files that are not safetensors (config, tokenizer), hidden ones left out.
        size: bytes of all safetensors files.
    """

    def __init__(
        self,
        directory: Path,
        *,
        writable: bool = False,
        blame: Callable[[str], Blame] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.blame = blame or (lambda file: build_blame(self.directory / file))
        self.tensors: dict[str, Tensor] = {}
        self.headers: dict[str, str] = {}
        files = visible_files(self.directory)
        if not (found := [p for p in files if p.suffix == ".safetensors"]):
            raise UserError(
                "weights",
                str(directory),
                "has no .safetensors file; give a Hugging Face model directory",
            )
        self._maps: dict[str, Bytes] = {}
        for path in found:
            name = path.relative_to(self.directory).as_posix()
            header = read_header(path, name, self.blame(name))
            self.headers[name] = header.digest
            if twice := self.tensors.keys() & header.tensors.keys():
                raise Corrupt(
                    "weights",
                    str(path),
                    f"holds tensor {min(twice)!r}, and so does another file; drop one",
                )
            self.tensors |= header.tensors
            self._maps[name] = np.memmap(path, np.uint8, "r+" if writable else "r").view(np.ndarray)
        self.tensors = dict(sorted(self.tensors.items()))
        self.others = [p.relative_to(self.directory).as_posix() for p in files if p not in found]
        self.size = sum(len(m) for m in self._maps.values())

    def view(self, name: str) -> Bytes:
        """Return the bytes of a tensor (flat uint8), in the file itself."""
        tensor = self.tensors[name]
        return self._maps[tensor.file][tensor.start : tensor.end]

    def write(self, name: str, data: Bytes) -> None:
        tensor = self.tensors[name]
        write_bytes_at(self.directory / tensor.file, tensor.start, data)


def write_bytes_at(path: Path, start: int, data: Bytes) -> None:
    """Write `data` into an existing file at the byte `start`; other processes may write other bytes meanwhile."""
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        left = data.data
        while left:
            left = left[file.write(left) :]


def visible_files(directory: Path) -> list[Path]:
    """List files below `directory`, sorted, without those that are hidden or lie in a hidden directory."""
    paths = (p for p in directory.rglob("*") if p.is_file())
    return sorted(
        p for p in paths if not any(part.startswith(".") for part in p.relative_to(directory).parts)
    )


def preallocate_safetensors(
    path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> None:
    """Preallocate a safetensors file, all zeros, byte-compatible with the library's own.

    `entries`: tensor name → (safetensors dtype, shape, bytes). `metadata`: transformers wants ``{"format": "pt"}``.
    Several processes can then `write_bytes_at` what each holds (an FSDP shard of dimension 0 is a byte range): no rank
    gathers a tensor, and the file equals a full export."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in sorted(entries, key=lambda n: (_ORDER.index(entries[n][0]), n)):
        dtype, shape, size = entries[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    with path.open("wb") as file:
        file.write(encode_header(header))
        file.truncate(file.tell() + at)


def encode_header(header: Mapping[str, Any], length: int = 0) -> bytes:
    """Encode the bytes before the data, padded with spaces to a multiple of eight, to `length` if that is more."""
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw = raw.ljust(max(-(-len(raw) // 8) * 8, length - 8))
    return len(raw).to_bytes(8, "little") + raw
