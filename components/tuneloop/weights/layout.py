"""A Hugging Face model directory as bytes: where each tensor lies, without loading any.

The safetensors format (https://github.com/huggingface/safetensors#format): eight bytes give the
length of a JSON header, the header gives dtype, shape and byte range of each tensor, and the
tensors' data follow without holes. Two files with equal headers and equal tensors are therefore
byte-identical, which is what the weight protocol proves.

All code that needs bytes or shapes of a model without torch reads them here (settings, plans and
`stages/export.py`, too). A header that is not as the format says is refused as `Corrupt`, by a
`Blame` that names the file.
"""

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
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import open_for_reading

Bytes = NDArray[np.uint8]

# The safetensors library lays tensors out by this order of dtypes, widest first, then by name. The
# same order gives the same file. `preallocate_safetensors` raises ValueError for a dtype that is
# not here, such as those of 8-bit floats.
_DTYPE_ORDER = [
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
_REMEDY = "restore the file from a copy"


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
        size = self.end - self.start
        elements = math.prod(self.shape)
        if not elements:
            return 1
        width = size // elements
        is_whole = width in (1, 2, 4, 8) and width * elements == size
        return width if is_whole else 1


Blame = Callable[[str], Corrupt]
"""Turns what is wrong with a file into an error that names the file and its remedy."""


def build_blame(file: object, remedy: str = _REMEDY) -> Blame:
    """Build the function that makes the errors of a file; `file` is how they name it."""
    return lambda fault: Corrupt("weights", str(file), f"{fault}; {remedy}")


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file; `digest` is the xxh3-128 of all bytes before the data."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    digest: str


def read_header(
    path: Path,
    name: str = "",
    blame: Blame | None = None,
) -> Header:
    """Read the header of the safetensors file `path`; its tensors get `name` as their file.

    Raises:
        Corrupt: it is not a safetensors file.
    """
    with open_for_reading(path) as file:
        return parse_header(file, name, blame or build_blame(path))


def parse_header(file: BinaryIO, name: str, blame: Blame) -> Header:
    """Read the header of a safetensors file that is open. Raises as `read_header`."""
    file_size = file.seek(0, 2)
    file.seek(0)
    length_field = file.read(8)
    header_size = int.from_bytes(length_field, "little")
    # Checked before memory is taken for the header.
    if len(length_field) < 8 or header_size > file_size - 8:
        raise blame("is not a safetensors file: its header is cut short")
    raw = file.read(header_size)
    data_start = 8 + header_size
    try:
        entries = json.loads(raw)
        raw_metadata = entries.pop("__metadata__", {})
        metadata = {str(key): str(value) for key, value in raw_metadata.items()}
        tensors: dict[str, Tensor] = {}
        for key, entry in entries.items():
            tensors[key] = _parse_entry(entry, name, data_start)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise blame(f"is not a safetensors file ({error!r})") from error

    # Without holes and overlaps, header and tensors together fix every byte of the file.
    data_end = data_start
    ranges = [(tensor.start, tensor.end) for tensor in tensors.values()]
    for start, end in sorted(ranges):
        if start != data_end or end < start:
            raise blame(f"its tensors overlap or leave holes at byte {data_end}")
        data_end = end
    if data_end != file_size:
        raise blame(f"is {file_size} bytes, its header says {data_end}")
    digest = xxhash.xxh3_128_hexdigest(length_field + raw)
    return Header(tensors=tensors, metadata=metadata, digest=digest)


def _parse_entry(entry: Any, file: str, data_start: int) -> Tensor:
    """Parse the entry of a tensor; its offsets count from `data_start`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not such an entry.
    """
    start, end = entry["data_offsets"]
    return Tensor(
        file=file,
        dtype=str(entry["dtype"]),
        shape=tuple(map(int, entry["shape"])),
        start=data_start + int(start),
        end=data_start + int(end),
    )


class Checkpoint:
    """A model directory with ``*.safetensors`` files, memory-mapped.

    Attributes:
        directory: the model directory.
        blame: makes the errors of a file, by its name.
        tensors: name → where it lies, sorted by name.
        headers: safetensors file → digest of its header. Files with equal names, dtypes, shapes
            and order of tensors have equal digests, if their ``__metadata__`` is equal, too.
        others: the files that are not safetensors (config, tokenizer), without hidden ones.
        size: bytes of all safetensors files.
    """

    def __init__(
        self,
        directory: Path,
        *,
        writable: bool = False,
        blame: Callable[[str], Blame] | None = None,
    ) -> None:
        """Map the files of `directory`, for writing in place if `writable`.

        Errors name the path of a file, unless `blame` says otherwise.

        Raises:
            UserError: there is no safetensors file.
            Corrupt: a file is not what its header says, or two files hold the same tensor.
        """
        self.directory = Path(directory)
        self.blame = blame or (lambda file: build_blame(self.directory / file))
        self.headers: dict[str, str] = {}
        self.others: list[str] = []
        self._maps: dict[str, Bytes] = {}
        tensors: dict[str, Tensor] = {}
        for path in visible_files(self.directory):
            name = path.relative_to(self.directory).as_posix()
            if path.suffix != ".safetensors":
                self.others.append(name)
                continue
            header = read_header(path, name, self.blame(name))
            duplicates = tensors.keys() & header.tensors.keys()
            if duplicates:
                remedy = f"holds tensor {min(duplicates)!r}, and so does another file; drop one"
                raise Corrupt("weights", str(path), remedy)
            tensors |= header.tensors
            self.headers[name] = header.digest
            content = np.memmap(path, np.uint8, "r+" if writable else "r")
            # A plain array: a slice of a memmap is a memmap again, which takes longer to make.
            self._maps[name] = content.view(np.ndarray)
        if not self.headers:
            remedy = "has no .safetensors file; give a Hugging Face model directory"
            raise UserError("weights", str(directory), remedy)
        self.tensors = dict(sorted(tensors.items()))
        self.size = sum(map(len, self._maps.values()))

    def view(self, name: str) -> Bytes:
        """Return the bytes of a tensor (flat uint8), in the file itself."""
        tensor = self.tensors[name]
        return self._maps[tensor.file][tensor.start : tensor.end]

    def write(self, name: str, data: Bytes) -> None:
        """Write `data` (flat uint8) over the bytes of a tensor in its file."""
        tensor = self.tensors[name]
        write_bytes_at(
            self.directory / tensor.file,
            tensor.start,
            data,
        )


def write_bytes_at(path: Path, start: int, data: Bytes) -> None:
    """Write `data` into an existing file at the byte `start`.

    Other processes may write other bytes of the file meanwhile.
    """
    with path.open("r+b", buffering=0) as file:
        file.seek(start)
        # An unbuffered write may write less than it was asked to.
        remaining = data.data
        while remaining:
            size = file.write(remaining)
            remaining = remaining[size:]


def read_bytes_at(path: Path, start: int, data: Bytes) -> None:
    """Fill `data` with the bytes of a file from the byte `start` on.

    Raises:
        Corrupt: the file ends before.
    """
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        # An unbuffered read may read less than it was asked to.
        remaining = data.data
        while remaining:
            size = file.readinto(remaining)
            if not size:
                raise build_blame(path)(f"ends at byte {file.tell()}")
            remaining = remaining[size:]


def visible_files(directory: Path) -> list[Path]:
    """List files below `directory`, sorted, without hidden ones and those in hidden directories.

    These are the files of a published version: what else lies in a directory has to be hidden
    (`weights/materialize.py: MARKER`).
    """
    files: list[Path] = []
    for path in directory.rglob("*"):
        parts = path.relative_to(directory).parts
        if any(part.startswith(".") for part in parts):
            continue
        if path.is_file():
            files.append(path)
    return sorted(files)


def preallocate_safetensors(
    path: Path,
    entries: Mapping[str, tuple[str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
) -> None:
    """Preallocate a safetensors file, all zeros, byte-compatible with the library's own.

    Several processes can then `write_bytes_at` what each holds, as an FSDP shard of dimension 0 is
    a byte range. No rank gathers a tensor, and the file equals a full export.

    Args:
        path: the file to write.
        entries: tensor name → (safetensors dtype, shape, bytes).
        metadata: the file's ``__metadata__``; transformers wants ``{"format": "pt"}``.

    `training/fsdp/export.py` fills the file of a checkpoint, `stages/export.py` that of an adapter.
    """
    header: JsonObject = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    by_name = sorted(entries)
    # A stable sort: tensors of one dtype stay in the order of their names.
    for name in sorted(by_name, key=lambda name: _DTYPE_ORDER.index(entries[name][0])):
        dtype, shape, size = entries[name]
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    with path.open("wb") as file:
        file.write(encode_header(header))
        file.truncate(file.tell() + offset)


def encode_header(header: JsonMapping, length: int = 0) -> bytes:
    """Encode the bytes before the data, with their length field.

    They are padded with spaces to a multiple of eight bytes, or to `length` if that is more.
    """
    text = json.dumps(
        header,
        separators=(",", ":"),
        ensure_ascii=False,
    )
    raw = text.encode()
    # The length field has eight bytes itself.
    aligned_size = len(raw) + -len(raw) % 8
    raw = raw.ljust(max(aligned_size, length - 8))
    return len(raw).to_bytes(8, "little") + raw
