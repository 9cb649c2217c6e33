"""Artifacts: the directories that cross a stage border, their manifests, and how they are committed.

An artifact is a URL. Below it lie ``manifest.json`` and one data directory that the manifest names::

    <url>/manifest.json            created if absent, last: its existence means the artifact is whole
    <url>/<attempt>/<files …>      written by one attempt; a duplicate attempt writes elsewhere
    <url>/resume/<name>/…          artifacts of their own: what an interrupted stage left for its retry
    <url>/<name>/…                 an artifact of its own, committed later (`tuneloop.core.context`)

The manifest lists every file with size, SHA-256 and xxh3-128. The artifact's digest is the SHA-256 of all that the
manifest states (`STATED`): these files, the stage, its parameters, results and facts, and of its inputs their digests.
So equal statements have equal digests wherever they lie, and what a run has made is a hash tree: the digest of an
exported model covers everything that it was made from, back to the data. Times, places and notes are not covered.

A *reference* is ``<url>@<digest>``: what stages hand to one another. A reader computes the digest again, and checks
every byte it opens against the manifest by xxh3-128, which is no proof against an attacker but twenty times as fast;
`tuneloop.runs.audit` checks SHA-256. Nothing without a manifest is read."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from tuneloop.core import cache, fencing
from tuneloop.core.errors import Corrupt, Unavailable, UserError, find_disk_error
from tuneloop.core.store import (
    Conflict,
    Store,
    fsync_path,
    is_contained_path,
    local_path,
    normalize_url,
    open_for_reading,
)

MANIFEST = "manifest.json"
PRUNED = "pruned.txt"
"""The file beside a manifest whose artifact's files retention has deleted, with the rule by which it did."""
PARTS = ".parts"
CHECKSUM = "checksum"
DIGEST = "sha256"
STATED = ("format", "stage", "role", "kind", "params", "inputs", "results", "facts", "files")
"""The fields of a manifest that its digest covers."""
ENTRY_TYPES: dict[str, tuple[dict[str, Any], Any]] = {
    "results": ({}, str | int | float | None),
    "facts": ({"version": int | None, "staleness": dict}, object),
    "provenance": ({"packages": dict, "processor": dict}, object),
}
"""Field of a manifest → the types of the entries that readers of any artifact use, and the type of all others."""
get_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
"""Return the validator of a type; it is created once."""
_PLACE = re.compile(rf'"[^"]*@(?={DIGEST}:[0-9a-f]{{64}}")')
Role = Literal["sampler", "scorer", "trainer", "evaluator"]
"""What a stage is in a loop: it makes completions, judges them, learns from them, or measures the policy."""


class File(BaseModel, frozen=True):
    """Size in bytes of one file, its xxh3-128 and its SHA-256, in hexadecimal."""

    size: int
    digest: str
    sha256: str


class Manifest(BaseModel, frozen=True):
    """What is known of a committed artifact. `digest` covers the fields in `STATED`, never times or places."""

    format: int = 1
    stage: str
    role: Role | None = Field(None, description="what the stage is in a loop")
    kind: str = Field("", description="what the artifact is: checkpoint, rollouts, ...")
    params: dict[str, Any] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="input name → reference")
    root: str = Field(description="the data directory below the artifact's URL")
    files: dict[str, File]
    digest: str = Field("", pattern=rf"^({DIGEST}:[0-9a-f]{{64}})?$")
    results: dict[str, Any] = Field(
        default_factory=dict, description="scalars that the workflow reads"
    )
    facts: dict[str, Any] = Field(
        default_factory=dict, description="what the stage says of its output"
    )
    notes: dict[str, Any] = Field(
        default_factory=dict, description="how this attempt went: another may differ"
    )
    timings: dict[str, float] = Field(
        default_factory=dict, description="seconds, and rates where the name says so"
    )
    provenance: dict[str, Any] = Field(default_factory=dict)
    place: str = Field("", description="the end of the artifact's URL, as iterations/3/reward")

    @field_validator("root", "files")
    @classmethod
    def _inside(cls, names: Any) -> Any:
        """Refuse names that lead out of the directory that a reader gives them."""
        several = [names] if isinstance(names, str) else [*names]
        if several and not is_contained_path(
            "/".join(several)
        ):  # checking them one by one takes a third of parsing
            wrong = next(name for name in several if not is_contained_path(name))
            raise ValueError(f"{wrong!r} is not a name for a file of an artifact")
        return names

    @field_validator("results", "facts", "provenance")
    @classmethod
    def _fit_for_readers(cls, told: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Refuse a result that is no scalar, and an entry of `ENTRY_TYPES` of another type."""
        types, other = ENTRY_TYPES[str(info.field_name)]
        for name, value in told.items():
            if not isinstance(value, types.get(name, other)):
                raise ValueError(f"{info.field_name}.{name} cannot be {value!r:.40}")
        return told

    def compute_digest(self) -> str:
        """Compute the digest of what the manifest states; references count by their digests, not by their places."""
        return _compute_digest(
            json.loads(self.model_dump_json())
        )  # as a reader of the JSON would have it

    @property
    def version(self) -> int | None:
        """The policy version that the artifact holds or was made with; None if it has none."""
        version: int | None = self.facts.get("version")
        return version

    @property
    def scalars(self) -> dict[str, float]:
        """The results that can be drawn."""
        return {
            name: value for name, value in self.results.items() if isinstance(value, int | float)
        }


def _compute_digest(manifest: Mapping[str, Any]) -> str:
    text = _PLACE.sub('"', dump_canonical_json({field: manifest.get(field) for field in STATED}))
    return f"{DIGEST}:{hashlib.sha256(text.encode()).hexdigest()}"


def file_digest(path: Path) -> str:
    """Compute the xxh3-128 of a file's bytes, in hexadecimal."""
    with open_for_reading(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_file(path: Path) -> File:
    """Compute size and both digests of a file, in one pass."""
    fast = xxhash.xxh3_128()
    strong = hashlib.sha256()
    size = 0
    with open_for_reading(path) as file:
        while block := file.read(1 << 22):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return File(size=size, digest=fast.hexdigest(), sha256=strong.hexdigest())


def hash_files(directory: Path) -> dict[str, File]:
    """Compute size and digests of every file below `directory`, of several at a time."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file())
    with ThreadPoolExecutor() as pool:
        return {
            str(path.relative_to(directory)): file
            for path, file in zip(paths, pool.map(hash_file, paths))
        }


def split_ref(ref: str) -> tuple[str, str | None]:
    """Split ``url@digest`` into URL and digest; a bare URL has no digest."""
    url, mark, digest = ref.rpartition(f"@{DIGEST}:")
    return (normalize_url(url), f"{DIGEST}:{digest}") if mark else (normalize_url(ref), None)


class Artifact:
    """A committed artifact, opened for reading. Raises UserError if there is none, Corrupt if its digest differs."""

    def __init__(self, ref: str) -> None:
        self.url, wanted = split_ref(ref)
        manifest = find_manifest(self.url)
        if manifest is None:
            raise UserError(
                "artifact",
                self.url,
                f"has no {MANIFEST}; run the stage that makes it, or correct the URL",
            )
        self.manifest = manifest
        if wanted not in (None, manifest.digest):
            raise Corrupt(
                "artifact", self.url, f"holds {manifest.digest}, but {wanted} was asked for"
            )
        self._proved: dict[str, object] = {}  # name → what keeps the file in the cache

    @property
    def ref(self) -> str:
        return f"{self.url}@{self.manifest.digest}"

    def part(self, name: str, flag: str = "artifact", remedy: str = "") -> Path:
        """Return the local path of one of the artifact's files or directories; only its bytes are read and verified.

        Where the store is a folder, files are read where they lie. Others are fetched into `tuneloop.core.cache`, where
        they stay at least as long as this object does. Raises UserError: the artifact, given as `flag`, has no such
        part, and the `remedy` says what to give; Corrupt: some of it is missing, or differs from the manifest."""
        names = [
            each for each in self.manifest.files if each == name or each.startswith(f"{name}/")
        ]
        if not names:
            raise UserError(flag, self.url, f"holds no {name}" + (remedy and f"; {remedy}"))
        return self._prove(names) / name

    @property
    def path(self) -> Path:
        """A local directory with all of the artifact's files, each as `part` gives it."""
        return self._prove(self.manifest.files)

    def _prove(self, names: Iterable[str]) -> Path:
        local = local_path(self.url)
        directory = (
            local / self.manifest.root if local else cache.open_directory(self.manifest.digest)
        )
        for name in names:
            if name in self._proved:
                continue
            want = self.manifest.files[name]
            where = f"{self.url}/{self.manifest.root}/{name}"
            if local and not (directory / name).is_file():
                self._check_pruned(where)
                raise Corrupt("artifact", where, "is missing; " + _MEND)
            check = functools.partial(is_whole, want=want)
            if local:
                proof: object = check(directory / name)
            else:
                fetch = functools.partial(
                    Store(self.url).copy_file, f"{self.manifest.root}/{name}", size=want.size
                )
                try:
                    proof = cache.take_file(directory, name, want.size, check, fetch)
                except Corrupt:
                    self._check_pruned(where)
                    raise
            if not proof:
                raise Corrupt(
                    "artifact",
                    where,
                    f"differs from its manifest (SHA-256 {want.sha256}); " + _MEND,
                )
            self._proved[name] = proof
        return directory

    def _check_pruned(self, where: str) -> None:
        """Raise Corrupt, with the rule, where retention has deleted files of this artifact."""
        rule = Store(self.url).get(PRUNED)
        if rule is not None:
            remedy = (
                f"was pruned by retention ({rule.decode(errors='replace')}); take a newer version"
            )
            raise Corrupt("artifact", where, remedy)


def is_whole(path: Path, want: File) -> bool:
    """Return whether a local file has the size and the xxh3-128 that its manifest states."""
    return path.stat().st_size == want.size and file_digest(path) == want.digest


_MEND = "restore it from a copy, or delete the artifact's URL and run the stage again"


def find_manifest(url: str) -> Manifest | None:
    """Return the manifest committed at `url`, or None."""
    data = Store(url).get(MANIFEST)
    return None if data is None else parse_manifest(url, data)


def parse_manifest(url: str, data: bytes, *, proved: bool = False) -> Manifest:
    """Parse a manifest read below `url`, and prove it, unless these very bytes were `proved` before. Raises Corrupt: it
    is no manifest, names files outside its artifact, or states something else than was committed."""
    where = f"{(url := normalize_url(url))}/{MANIFEST}"
    told = {} if proved else load_checked_json(data, MANIFEST, url, _MEND)
    try:
        manifest = Manifest.model_validate(told) if told else Manifest.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(
            "artifact", where, f"is not a manifest ({_describe(error)}); {_MEND}"
        ) from error
    if told and (digest := _compute_digest(told)) != manifest.digest:
        raise Corrupt(
            "artifact",
            where,
            f"was changed: it states {digest}, {manifest.digest} was committed; {_MEND}",
        )
    return manifest


def _describe(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


class Draft:
    """An artifact being written: a directory, then one atomic commit. All ranks of an attempt pass one `attempt`."""

    def __init__(self, url: str, attempt: str | None = None) -> None:
        self.url = normalize_url(url)
        self.attempt = attempt or f"data-{os.urandom(6).hex()}"
        self._store = Store(
            self.url
        )  # opened now: when another thread commits, the environment may have changed
        if self._store.root is not None:
            # Written in place: no reader looks there before the manifest exists.
            self.path = self._store.root / self.attempt
        else:
            # One attempt writes several artifacts: its output, and resume points meanwhile.
            place = xxhash.xxh3_64_hexdigest(self.url.encode())
            self.path = Path(tempfile.gettempdir()) / f"tuneloop-{self.attempt}-{place}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            mistake = UserError(
                "store", self.url, f"{error.strerror}; choose a place that can be written"
            )
            raise find_disk_error(error, [self.path]) or mistake from error

    def contribute(self, part: int) -> None:
        """Upload this machine's files as one `part` for the leader to commit, unless the store is a shared volume."""
        store = self._store
        if store.root is None:
            files = self._upload(store)
            listing = {name: file.model_dump() for name, file in files.items()}
            store.put(f"{self.attempt}/{PARTS}/{part}", dump_canonical_json(listing).encode())
            delete_draft(self.path)

    def _upload(self, store: Store) -> dict[str, File]:
        files = hash_files(self.path)
        for name in files:
            store.upload(f"{self.attempt}/{name}", self.path / name)
        return files

    def commit(self, **about: Any) -> Manifest:
        """Commit the files, including those that other machines contributed: hash them, upload them, and create the
        manifest if it is absent; `about` are its other fields. Return the manifest that is then committed at the URL:
        this attempt's, or that of a duplicate that was faster, in which case this attempt's files are deleted.

        Raises UserError if a field cannot be committed. Raises Retryable if the process has lost its device lease
        (`tuneloop.core.fencing`), which is checked right before the manifest is created, or if the store refuses the
        manifest because of another one that it does not return."""
        store = self._store
        if store.root is None:
            listings = [
                json.loads(store.get(key) or b"{}") for key in store.keys(f"{self.attempt}/{PARTS}")
            ]
            theirs = {
                name: File(**about) for listing in listings for name, about in listing.items()
            }
            files = theirs | self._upload(store)
        else:
            files = hash_files(self.path)
            folders = [*filter(Path.is_dir, self.path.rglob("*")), self.path, self.path.parent]
            for each in [
                *(self.path / name for name in files),
                *folders,
            ]:  # durable before the manifest is
                fsync_path(each)
        parts = self.url.split("/")
        place = "/".join(parts[-3 if parts[-3] == "iterations" else -1 :])
        try:
            manifest = Manifest(root=self.attempt, files=files, place=place, **about)
        except ValidationError as error:
            raise UserError(
                "artifact", self.url, f"cannot be committed: {_describe(error)}"
            ) from error
        manifest = manifest.model_copy(update={"digest": manifest.compute_digest()})
        fencing.check_lease()
        try:
            store.create(
                MANIFEST, dump_checked_json(json.loads(manifest.model_dump_json()), MANIFEST)
            )
        except Conflict as error:
            standing = find_manifest(self.url)
            if standing is None:  # the other writer has not finished, or the store lags behind
                raise Unavailable(
                    f"store: {self.url}/{MANIFEST}: a write beside ours got in its way"
                ) from error
            if (
                standing.root != self.attempt
            ):  # else it is ours, and only the store's answer was lost
                store.delete(self.attempt)
                delete_draft(self.path)
                return standing
        if store.root is None:
            store.delete(f"{self.attempt}/{PARTS}")
            delete_draft(self.path)
        return manifest


def delete_draft(path: Path) -> None:
    """Delete what was written to `path`, unless the manifest beside it names it: it is committed then."""
    manifest = path.with_name(MANIFEST)
    if not (manifest.is_file() and path.name in manifest.read_text()):
        shutil.rmtree(path, ignore_errors=True)


def dump_canonical_json(value: Any) -> str:
    """Dump `value` as JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def dump_checked_json(value: Mapping[str, Any], key: str) -> bytes:
    """Dump `value` as JSON with ``checksum``: the xxh3-128 of `key`, where it will lie, and of its canonical JSON."""
    return json.dumps({**value, CHECKSUM: _compute_checksum(value, key)}, indent=1).encode()


def _compute_checksum(value: Any, key: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{key}{dump_canonical_json(value)}".encode())


def load_checked_json(
    data: bytes | None, key: str, url: str, remedy: str, shape: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load what `dump_checked_json` dumped for `key`; {} if None. Raises Corrupt if it is damaged or not of `shape`."""
    if data is None:
        return {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        value: dict[str, Any] = from_json(data)
        if value.pop(CHECKSUM) == _compute_checksum(value, key):
            return check_shape(value, shape or {})
    raise Corrupt(
        "file", f"{url}/{key}", f"was changed since it was written, or is another file; {remedy}"
    )


def check_shape(value: dict[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value`. Raises ValueError, KeyError, TypeError: it lacks a key of `shape`, or has it of another type."""
    for name, kind in shape.items():
        get_adapter(kind).validate_python(value[name], strict=True)
    return value


def hash_canonical_json(value: Any) -> str:
    """Compute the SHA-256 of `value` as `dump_canonical_json` dumps it, in hexadecimal."""
    return hashlib.sha256(dump_canonical_json(value).encode()).hexdigest()
