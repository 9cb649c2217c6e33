"""The layout below a weights URL: versions, how each is stored, and how they follow from one another::

    <root>/latest                                           the pointer (`pointer.py`), moved last
    <root>/weight_v000016/model.safetensors.index.json      created last: its existence means the version is whole
    <root>/weight_v000016/model-00000-of-00001.<x>.safetensors …
    <root>/weight_v000017/delta.<x>/model.safetensors.index.json   beside a full version: the same step as a delta

`docs/weights.md` is the protocol."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import xxhash
from pydantic import BaseModel, Field

from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store, is_contained_path
from tuneloop.weights import pointer
from tuneloop.weights.codec import Encoding

INDEX = "model.safetensors.index.json"
_DIRECTORY = re.compile(rf"(weight_v(\d{{6,}}))/{re.escape(INDEX)}")
_GONE = "publish it, or ask for one that `tuneloop weights ls` shows"

Hex = str


class File(BaseModel, frozen=True, extra="forbid"):
    """A file of the assembled directory. Safetensors have a `header`, others the `digest` of all their bytes."""

    size: int = Field(ge=0)
    header: Hex | None = None
    digest: Hex | None = None
    stored: str | None = Field(
        None, description="its name in this version's directory; None: as in the base version"
    )


class Metadata(BaseModel, frozen=True, extra="forbid"):
    """The published keys (strings, as other systems write them), and the Hub's ``total_size``."""

    version: str = Field(pattern=r"^\d+$")
    base_version: str | None = Field(None, pattern=r"^\d+$")
    delta_encoding: Encoding | None = Field(None, description="absent: a full version")
    compression_format: Literal["zstd"] | None = None
    checksum_format: Literal["xxh3-128"] = "xxh3-128"
    total_size: int


class Extra(BaseModel, frozen=True, extra="forbid"):
    """The fields that tuneloop adds, under its own key, which other readers ignore."""

    format: Literal[1] = 1
    files: dict[str, File]
    checksums: dict[str, Hex] = Field(description="of every tensor's bytes in this version's state")
    base_index: Hex | None = Field(None, description="xxh3-128 of the base version's index")
    delta_index: Hex | None = Field(
        None, description="xxh3-128 of the index in delta.<x>/ of a full version"
    )
    stored_bytes: int = Field(description="of the files in this directory")
    elements: int = 0
    changed: int | None = Field(None, description="elements that differ from the base version")
    restore_cost: float = Field(
        0.0, description="of the deltas since the last full version; see publish.RESTORE_BOUND"
    )
    source: str | None = Field(
        None, description="digest of the checkpoint that it was published from"
    )
    deltas: Encoding | None = Field(
        None, description="of a version without base: how those that follow are encoded"
    )
    roles: dict[str, str] | None = Field(
        None, description="of a version without base, and its deltas: see roles.py"
    )
    held: Hex | None = Field(
        None, description="of a version whose weights readers hold: what digest_weights says"
    )


class Index(BaseModel, frozen=True, extra="forbid"):
    """``model.safetensors.index.json`` of one version."""

    metadata: Metadata
    weight_map: dict[str, str]
    tuneloop: Extra

    @property
    def version(self) -> int:
        return int(self.metadata.version)

    @property
    def base(self) -> int | None:
        return None if self.metadata.base_version is None else int(self.metadata.base_version)

    @property
    def encoding(self) -> Encoding | None:
        return self.metadata.delta_encoding

    @property
    def density(self) -> float | None:
        """Share of elements that differ from the base version."""
        return (
            None
            if self.tuneloop.changed is None
            else self.tuneloop.changed / max(self.tuneloop.elements, 1)
        )

    def encoded(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()

    def same_state(self, other: "Index") -> bool:
        """Return whether both assemble to the same files."""

        def bare(index: Index) -> dict[str, tuple[int, str | None, str | None]]:
            return {name: (f.size, f.header, f.digest) for name, f in index.tuneloop.files.items()}

        return self.tuneloop.checksums == other.tuneloop.checksums and bare(self) == bare(other)


class Entry:
    """An index in the store, with its digest and place."""

    def __init__(self, store: Store, place: str) -> None:
        if (data := store.get(f"{place}/{INDEX}")) is None:
            raise UserError("weights", f"{store.url}/{place}", f"is not published; {_GONE}")
        self.place, self.digest = place, xxhash.xxh3_128_hexdigest(data)
        try:
            self.index = Index.model_validate_json(data)
            self.version = self.index.version
        except ValueError as error:
            wrong = f"is not an index of a version ({error!r})"
            raise Corrupt("weights", f"{store.url}/{place}/{INDEX}", wrong) from error
        files = self.index.tuneloop.files
        for name in (
            *files,
            *(f.stored for f in files.values() if f.stored),
            *self.index.weight_map.values(),
        ):
            if not is_contained_path(name) or any(part.startswith(".") for part in name.split("/")):
                wrong = "is not a name for a file of a model directory; publish the version again"
                raise Corrupt("weights", name, wrong)
        if get_version_directory(self.version) != place.partition("/")[0]:
            raise Corrupt(
                "weights", f"{store.url}/{place}", f"says that it is version {self.version}"
            )
        if (self.index.encoding is None) != (self.index.base is None) or (
            self.index.base or -1
        ) >= self.version:
            raise Corrupt(
                "weights", f"{store.url}/{place}", f"cannot be a delta on version {self.index.base}"
            )

    def keys(self) -> set[str]:
        """Return all keys that the version consists of at this place."""
        stored = {f.stored for f in self.index.tuneloop.files.values() if f.stored}
        return {
            f"{self.place}/{name}" for name in (INDEX, *stored, *self.index.weight_map.values())
        }


def get_version_directory(version: int) -> str:
    return f"weight_v{version:06d}"


class Chain:
    """The versions below a root as they are now; indexes are read when asked for."""

    def __init__(self, root: str | Store) -> None:
        self.store = root if isinstance(root, Store) else Store(root)
        self.pointed = pointer.read_pointer(self.store)  # before the listing, which must include it
        self.keys = self.store.keys()
        found = (match for key in self.keys if (match := _DIRECTORY.fullmatch(key)))
        self.versions = sorted(
            int(match[2]) for match in found if match[1] == get_version_directory(int(match[2]))
        )
        self._entries = dict[int, Entry]()
        self._named: dict[int | None, str] = {
            at.version: at.ref.rpartition(":")[2] for at in [self.pointed] if at
        }

    def entry(self, version: int) -> Entry:
        """Read the index of a version, verified by the later indexes, up to the one that the pointer names."""
        latest = -1 if self.pointed is None or version in self._entries else self.pointed.version
        for later in [v for v in reversed(self.versions) if version < v <= latest]:
            with contextlib.suppress(UserError):  # a damaged index verifies nothing
                self._read_entry(later)
        return self._read_entry(version)

    def _read_entry(self, version: int) -> Entry:
        if version not in self._entries:
            entry = Entry(self.store, get_version_directory(version))
            if (named := self._named.get(version, entry.digest)) != entry.digest:
                wrong = f"has xxh3-128 {entry.digest}, but {named} is what `latest` or the next version builds on"
                raise Corrupt("weights", f"{self.store.url}/{entry.place}/{INDEX}", wrong)
            self._entries[version] = entry
            with contextlib.suppress(
                UserError
            ):  # a full version can be read without the delta beside it
                if (step := self.delta(entry)) and (before := step.index.tuneloop.base_index):
                    self._named[step.index.base] = before
        return self._entries[version]

    @functools.cached_property
    def latest(self) -> int | None:
        """The version that the pointer names, checked to be the one it was moved to."""
        return None if self.pointed is None else self.entry(self.pointed.version).version

    def target(self, version: int | None) -> int:
        """Return `version`, or the latest. Raises UserError where it is not published."""
        wanted = self.latest if version is None else version
        if wanted is None or wanted not in self.versions:
            asked = "latest" if version is None else version
            raise UserError("weights version", asked, f"is not in {self.store.url}; {_GONE}")
        return wanted

    def steps(self, version: int) -> Iterator[tuple[Entry | None, Entry]]:
        """Walk back from `version`, until no delta is stored (None) or the base is gone: yield deltas, own entries."""
        while True:
            entry = self.entry(version)
            delta = self.delta(entry)
            yield delta, entry
            if delta is None or delta.index.base not in self.versions:
                return
            version = delta.index.base

    def delta(self, entry: Entry) -> Entry | None:
        """Return the entry that holds the step from the base version, if one is stored."""
        if entry.index.encoding is not None:
            return entry
        if entry.index.tuneloop.delta_index is None:
            return None
        delta = Entry(self.store, delta_place(entry.place, entry.index))
        if delta.digest != entry.index.tuneloop.delta_index or not delta.index.same_state(
            entry.index
        ):
            raise Corrupt(
                "weights",
                f"{self.store.url}/{delta.place}",
                "is not the delta of the version it lies in",
            )
        return delta


def digest_weights(headers: Mapping[str, Hex], checksums: Mapping[str, Hex]) -> Hex:
    """Hash lines ``name digest`` by xxh3-128: of the safetensors files' headers, then of tensors, each by name."""
    lines = [
        f"{name} {digest}\n"
        for each in (headers, checksums)
        for name, digest in sorted(each.items())
    ]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def delta_place(place: str, full: Index) -> str:
    """Return where a full version keeps the step from its base version; named by content, as weights are."""
    return f"{place}/delta.{(full.tuneloop.delta_index or '')[:12]}"


def get_version_reference(entry: Entry) -> str:
    """Return the pointer's reference to a version: relative, so that a root can be moved as a whole."""
    return f"{entry.place}@xxh3-128:{entry.digest}"
