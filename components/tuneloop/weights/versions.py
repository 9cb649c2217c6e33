"""The layout below a weights URL: versions, how each is stored, and how they follow one another::

    <root>/latest                                           the pointer (`pointer.py`), moved last
    <root>/weight_v000016/model.safetensors.index.json      created last: with it the version exists
    <root>/weight_v000016/model-00000-of-00001.<x>.safetensors …
    <root>/weight_v000017/delta.<x>/model.safetensors.index.json   beside a full version: the same
                                                                   step as a delta

`docs/weights.md` is the protocol.

An index is written once and read by older and newer releases: a field that is added to `Extra` or
`File` is one that older readers refuse (``extra="forbid"``), and needs another `format`. The tests
are in `tests/unit/weights/test_protocol.py` and `tests/unit/weights/test_layout.py`, which has a
reader of its own.
"""

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
_INDEX_KEY = re.compile(rf"(weight_v(\d{{6,}}))/{re.escape(INDEX)}")
_REMEDY = "publish it, or ask for one that `tuneloop weights ls` shows"

Hex = str


class File(BaseModel, frozen=True, extra="forbid"):
    """A file of the assembled directory.

    Safetensors have a `header`, others the `digest` of all their bytes. Code that asks whether a
    file is safetensors asks for its `header`.
    """

    size: int = Field(ge=0)
    header: Hex | None = None
    digest: Hex | None = None
    stored: str | None = Field(
        None,
        description="its name in this version's directory; None: as in the base version",
    )

    @property
    def content(self) -> tuple[int, Hex | None, Hex | None]:
        """What the file is, however it is stored."""
        return self.size, self.header, self.digest


class Metadata(BaseModel, frozen=True, extra="forbid"):
    """The published keys (strings, as other systems write them), and the Hub's ``total_size``."""

    version: str = Field(pattern=r"^\d+$")
    base_version: str | None = Field(None, pattern=r"^\d+$")
    delta_encoding: Encoding | None = Field(None, description="absent: a full version")
    compression_format: Literal["zstd"] | None = None
    checksum_format: Literal["xxh3-128"] = "xxh3-128"
    total_size: int


class Extra(BaseModel, frozen=True, extra="forbid"):
    """The fields that tuneloop adds, under its own key, which other readers ignore.

    `weights/publish.py` fills them, `describe_full` for full versions and `_describe_delta` for
    deltas. Readers need `stored_bytes`, too: `weights/restoration.py` chooses by it, and
    `weights/materialize.py: _take_from_cache` computes the size of a delta's file from it.
    """

    format: Literal[1] = 1
    files: dict[str, File]
    checksums: dict[str, Hex] = Field(
        description="of every tensor's bytes in this version's state",
    )
    base_index: Hex | None = Field(
        None,
        description="xxh3-128 of the base version's index",
    )
    delta_index: Hex | None = Field(
        None,
        description="xxh3-128 of the index in delta.<x>/ of a full version",
    )
    stored_bytes: int = Field(description="of the files in this directory")
    elements: int = 0
    changed: int | None = Field(
        None,
        description="elements that differ from the base version",
    )
    restore_cost: float = Field(
        0.0,
        description="of the deltas since the last full version; see publish.RESTORE_BOUND",
    )
    source: str | None = Field(
        None,
        description="digest of the checkpoint that it was published from",
    )
    deltas: Encoding | None = Field(
        None,
        description="of a version without base: how those that follow are encoded",
    )
    roles: dict[str, str] | None = Field(
        None,
        description="of a version without base, and its deltas: see roles.py",
    )
    readers_digest: Hex | None = Field(
        None,
        alias="held",
        description="of a version whose weights readers hold: `digest_weights` of these",
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
        """The version that the delta applies to; None for a full version."""
        base_version = self.metadata.base_version
        return None if base_version is None else int(base_version)

    @property
    def encoding(self) -> Encoding | None:
        return self.metadata.delta_encoding

    @property
    def density(self) -> float | None:
        """The share of elements that differ from the base version; None without a base."""
        changed = self.tuneloop.changed
        return None if changed is None else changed / max(self.tuneloop.elements, 1)

    @property
    def stored_files(self) -> dict[str, str]:
        """Name in the assembled directory → name in this version's directory."""
        files = self.tuneloop.files.items()
        return {name: file.stored for name, file in files if file.stored}

    @property
    def stored_names(self) -> set[str]:
        """All files in this version's directory, without the index."""
        names = set(self.stored_files.values())
        names.update(self.weight_map.values())
        return names

    @property
    def headers(self) -> dict[str, Hex]:
        """Safetensors file → digest of its header."""
        files = self.tuneloop.files.items()
        return {name: file.header for name, file in files if file.header}

    def encode_json(self) -> bytes:
        """Return the bytes of the index in the store; its digest is that of these.

        `weights/materialize.py: _find_cache` names a directory of the cache by them. So another
        form of the same index is another delta to caches, and to the index after it.
        """
        text = self.model_dump_json(exclude_none=True, by_alias=True)
        return text.encode()

    def has_state_of(self, other: "Index") -> bool:
        """Return whether both assemble to the same files.

        Publishers decide by it whether a version that exists is theirs.
        """
        if self.tuneloop.checksums != other.tuneloop.checksums:
            return False
        # How a file is stored makes no difference.
        files = self.tuneloop.files
        other_files = other.tuneloop.files
        if files.keys() != other_files.keys():
            return False
        return all(file.content == other_files[name].content for name, file in files.items())


class Entry:
    """An index in the store, with its digest.

    Attributes:
        folder: the key of the version's directory, or of the delta beside a full version.
        digest: xxh3-128 of the bytes of the index.
    """

    def __init__(self, store: Store, folder: str) -> None:
        """Read the index in `folder`.

        Raises:
            UserError: there is none.
            Corrupt: it is damaged, or not that of a version in this directory.
        """
        url = f"{store.url}/{folder}"
        data = store.get(f"{folder}/{INDEX}")
        if data is None:
            raise UserError("weights", url, f"is not published; {_REMEDY}")
        # Of the bytes as they are stored: another writer's JSON may differ from ours.
        self.folder = folder
        self.digest = xxhash.xxh3_128_hexdigest(data)
        try:
            self.index = Index.model_validate_json(data)
            self.version = self.index.version
        except ValueError as error:
            raise Corrupt(
                "weights",
                f"{url}/{INDEX}",
                f"is not an index of a version ({error!r})",
            ) from error
        self._check_names()
        if get_version_directory(self.version) != folder.partition("/")[0]:
            raise Corrupt(
                "weights",
                url,
                f"says that it is version {self.version}",
            )
        base = self.index.base
        has_base = base is not None
        is_delta = self.index.encoding is not None
        # A base that is not older would make a walk along the chain endless.
        if has_base != is_delta or (base or -1) >= self.version:
            raise Corrupt(
                "weights",
                url,
                f"cannot be a delta on version {base}",
            )

    def _check_names(self) -> None:
        """Raise Corrupt if a file has a name that would lie outside its directory, or be hidden."""
        # The index comes from a store that others may write to.
        names = set(self.index.tuneloop.files)
        names.update(self.index.stored_names)
        for name in sorted(names):
            parts = name.split("/")
            is_hidden = any(part.startswith(".") for part in parts)
            if is_hidden or not is_contained_path(name):
                raise Corrupt(
                    "weights",
                    name,
                    "is not a name for a file of a model directory; publish the version again",
                )

    def list_keys(self) -> set[str]:
        """Return all keys that the version consists of in this folder."""
        names = self.index.stored_names | {INDEX}
        return {f"{self.folder}/{name}" for name in names}


def get_version_directory(version: int) -> str:
    """Return the key of the directory of `version`, relative to the root."""
    return f"weight_v{version:06d}"


class Chain:
    """The versions below a root when this object was made; indexes are read when asked for.

    Attributes:
        pointed: the pointer; None before the first publication.
        keys: all keys below the root.
        versions: the versions that exist, ascending.
    """

    def __init__(self, root: str | Store) -> None:
        self.store = root if isinstance(root, Store) else Store(root)
        # Read before the listing, which then includes the version that it names.
        self.pointed = pointer.read_pointer(self.store)
        self.keys = self.store.keys()
        versions: list[int] = []
        for key in self.keys:
            match = _INDEX_KEY.fullmatch(key)
            if match is None:
                continue
            version = int(match[2])
            # weight_v0000001 is no directory of a version: that has six digits, if they suffice.
            if match[1] == get_version_directory(version):
                versions.append(version)
        self.versions = sorted(versions)
        self._entries: dict[int, Entry] = {}
        # The digest of an index, as the pointer or a later index states it.
        self._expected_digests: dict[int | None, str] = {}
        if self.pointed:
            _, _, digest = self.pointed.ref.rpartition(":")
            self._expected_digests[self.pointed.version] = digest

    def entry(self, version: int) -> Entry:
        """Read the index of a version, verified by the later ones up to the one of the pointer.

        Raises:
            UserError: the version is not published.
            Corrupt: its index is damaged, or not the one that later versions build on.
        """
        if version not in self._entries and self.pointed is not None:
            # From the pointer down, as each index states the digest of the one before it.
            later_versions = [v for v in self.versions if version < v <= self.pointed.version]
            for later in reversed(later_versions):
                # A damaged index verifies nothing.
                with contextlib.suppress(UserError):
                    self._read_entry(later)
        return self._read_entry(version)

    def _read_entry(self, version: int) -> Entry:
        """Read the index of a version, and note the digest of its base's index."""
        if version in self._entries:
            return self._entries[version]
        entry = Entry(self.store, get_version_directory(version))
        expected = self._expected_digests.get(version, entry.digest)
        if expected != entry.digest:
            raise Corrupt(
                "weights",
                f"{self.store.url}/{entry.folder}/{INDEX}",
                f"has xxh3-128 {entry.digest}, but {expected} is what `latest` or the next"
                " version builds on",
            )
        self._entries[version] = entry
        # A full version can be read without the delta beside it.
        with contextlib.suppress(UserError):
            delta = self.find_delta(entry)
            base_digest = delta.index.tuneloop.base_index if delta else None
            if delta and base_digest:
                self._expected_digests[delta.index.base] = base_digest
        return entry

    @functools.cached_property
    def latest(self) -> int | None:
        """The version that the pointer names, checked to be the one it was moved to."""
        if self.pointed is None:
            return None
        entry = self.entry(self.pointed.version)
        return entry.version

    def resolve_version(self, version: int | None) -> int:
        """Return `version`, or the latest if it is None. Raises UserError: it is not published."""
        resolved = self.latest if version is None else version
        if resolved is None or resolved not in self.versions:
            value = "latest" if version is None else version
            raise UserError(
                "weights version",
                value,
                f"is not in {self.store.url}; {_REMEDY}",
            )
        return resolved

    def walk_back(self, version: int) -> Iterator[tuple[Entry | None, Entry]]:
        """Yield pairs (delta, entry) from `version` back to its base, the base's base and so on.

        The walk ends with a version without a stored delta (None), or whose base is gone.

        Raises:
            UserError, Corrupt: as `entry`.
        """
        while True:
            entry = self.entry(version)
            delta = self.find_delta(entry)
            yield delta, entry
            if delta is None or delta.index.base not in self.versions:
                return
            version = delta.index.base

    def find_delta(self, entry: Entry) -> Entry | None:
        """Return the entry that holds the step from the base version, if one is stored.

        Raises:
            UserError: the delta beside a full version is gone.
            Corrupt: it is another one.
        """
        if entry.index.encoding is not None:
            return entry
        # A full version without a delta beside it begins a chain.
        expected = entry.index.tuneloop.delta_index
        if expected is None:
            return None
        delta = Entry(self.store, get_delta_folder(entry.folder, expected))
        if delta.digest != expected or not delta.index.has_state_of(entry.index):
            raise Corrupt(
                "weights",
                f"{self.store.url}/{delta.folder}",
                "is not the delta of the version it lies in",
            )
        return delta


def digest_weights(headers: Mapping[str, Hex], checksums: Mapping[str, Hex]) -> Hex:
    """Compute the digest that stands for all weights of a model: xxh3-128, in hexadecimal.

    It is that of lines ``name digest``: first of the safetensors files with the digests of their
    headers, then of the tensors with their checksums, both sorted by name. The text is published
    (`Extra.readers_digest`), and engines prove their tensors by it
    (`inference/engines/_tensors.py`).
    """
    lines: list[str] = []
    for digest_by_name in (headers, checksums):
        for name, digest in sorted(digest_by_name.items()):
            lines.append(f"{name} {digest}\n")
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def get_delta_folder(folder: str, delta_index: Hex) -> str:
    """Return where a full version keeps the step from its base version.

    It is named by the digest of its index, so that two publishers never write to the same key.
    """
    return f"{folder}/delta.{delta_index[:12]}"


def get_version_reference(entry: Entry) -> str:
    """Return the pointer's reference to a version: relative, so that a root can be moved.

    `Chain` takes the digest of the index from behind its last colon.
    """
    return f"{entry.folder}@xxh3-128:{entry.digest}"
