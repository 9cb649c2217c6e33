"""Artifacts: directories that cross a stage border, their manifests, and how they are committed.

An artifact is a URL. Below it lie ``manifest.json`` and one data directory that the manifest
names::

    <url>/manifest.json        created if absent, last: the artifact is whole if it exists
    <url>/<attempt>/<files …>  written by one attempt; a duplicate attempt writes elsewhere
    <url>/resume/<name>/…      artifacts of their own: what an interrupted stage left for its retry
    <url>/<name>/…             an artifact of its own, committed later (`tuneloop.core.context`)

The manifest lists every file with size, SHA-256 and xxh3-128. The artifact's digest is the SHA-256
of all that the manifest states (`STATED`): these files, the stage, its parameters, results and
facts, and of its inputs their digests. So equal statements have equal digests wherever they lie,
and the artifacts of a run are a hash tree: the digest of an exported model covers everything that
it was made from, back to the data. Times, places and notes are not covered.

A *reference* is ``<url>@<digest>``: what stages hand to one another. A reader computes the digest
again, and checks every byte it opens against the manifest by xxh3-128, which is no proof against an
attacker but twenty times as fast; `tuneloop.runs.audit` checks SHA-256. Nothing without a manifest
is read.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from tuneloop.core import cache, fencing
from tuneloop.core.errors import Corrupt, Unavailable, UserError, find_disk_error
from tuneloop.core.json_types import JsonMapping, JsonObject
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
"""The file beside a manifest whose artifact's files retention has deleted, with the rule by which it
did."""
PARTS = ".parts"
"""The folder below an attempt in which other machines than the leader's list their files
(`Draft.contribute`); the commit deletes it."""
CHECKSUM = "checksum"
"""The key that `dump_checked_json` adds."""
BLOCK = 4 << 20
"""Bytes that are hashed at a time."""
DIGEST = "sha256"
"""How digests begin, also in references (`split_ref`) and as directories of the cache
(`core/cache.py: PREFIX`)."""
STATED = ("format", "stage", "role", "kind", "params", "inputs", "results", "facts", "files")
"""The fields of a manifest that its digest covers, absent ones as null. A field that is added here
changes the digest of every artifact there is: all that are committed would be refused as
changed."""
ENTRY_TYPES: dict[str, tuple[JsonObject, Any]] = {
    "results": ({}, str | int | float | None),
    "facts": ({"version": int | None, "staleness": dict}, object),
    "provenance": ({"packages": dict, "processor": dict}, object),
}
"""Field of a manifest → the types of the entries that readers of any artifact use, and the type of
all others."""
# To create a validator takes longer than to use it.
get_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
"""Return the validator of a type; it is created once."""
_ADDRESS = re.compile(rf'"[^"]*@(?={DIGEST}:[0-9a-f]{{64}}")')
"""Matches the URL of a reference in JSON, without its digest."""
_REMEDY = "restore it from a copy, or delete the artifact's URL and run the stage again"
Role = Literal["sampler", "scorer", "trainer", "evaluator"]
"""What a stage is in a loop: it makes completions, judges them, learns from them, or measures the
policy. Readers of runs ask for it (`Run.with_role`), plans and estimates by `StagePlan.role`, and
`argo/pod_fields.py: find_role` derives from it what a pod requests."""


class File(BaseModel, frozen=True):
    """Size in bytes of one file, its xxh3-128 and its SHA-256, in hexadecimal."""

    size: int
    digest: str
    sha256: str


class Manifest(BaseModel, frozen=True):
    """The statements about a committed artifact.

    `digest` covers the fields in `STATED`, never times or places. A new field needs a default,
    which older manifests have, and has to be given by those who commit:
    `core/component.py: Component._run`, `Stage.save_resume` and `Stage.commit_later` of
    `core/context.py`, and the gateway (`extensions/gateway/resident.py`).
    """

    format: int = 1
    stage: str
    role: Role | None = Field(None, description="what the stage is in a loop")
    kind: str = Field("", description="what the artifact is: checkpoint, rollouts, ...")
    params: JsonObject = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="input name → reference")
    root: str = Field(description="the data directory below the artifact's URL")
    files: dict[str, File]
    digest: str = Field("", pattern=rf"^({DIGEST}:[0-9a-f]{{64}})?$")
    results: JsonObject = Field(default_factory=dict, description="scalars that the workflow reads")
    facts: JsonObject = Field(default_factory=dict, description="what the stage says of its output")
    notes: JsonObject = Field(
        default_factory=dict,
        description="how this attempt went: another may differ",
    )
    timings: dict[str, float] = Field(
        default_factory=dict,
        description="seconds, and rates where the name says so",
    )
    provenance: JsonObject = Field(default_factory=dict)
    place: str = Field("", description="the end of the artifact's URL, as iterations/3/reward")

    @field_validator("root")
    @classmethod
    def _check_root(cls, root: str) -> str:
        _check_names([root])
        return root

    @field_validator("files")
    @classmethod
    def _check_files(cls, files: dict[str, File]) -> dict[str, File]:
        _check_names(files)
        return files

    @field_validator("results", "facts", "provenance")
    @classmethod
    def _check_types(cls, entries: JsonObject, info: ValidationInfo) -> JsonObject:
        """Refuse a result that is no scalar, and an entry of `ENTRY_TYPES` of another type."""
        types, default_type = ENTRY_TYPES[str(info.field_name)]
        for name, value in entries.items():
            if not isinstance(value, types.get(name, default_type)):
                raise ValueError(f"{info.field_name}.{name} cannot be {value!r:.40}")
        return entries

    def compute_digest(self) -> str:
        """Compute the digest of what the manifest states; references count by their digests, not by
        their places.
        """
        # A reader computes it from JSON, where tuples are lists and keys are text.
        return _compute_digest(json.loads(self.model_dump_json()))

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


def _check_names(names: Collection[str]) -> None:
    """Refuse names that lead out of the directory that a reader appends them to."""
    # To check each name takes a third of parsing a manifest, and their path is as good as they are.
    if names and not is_contained_path("/".join(names)):
        name = next(name for name in names if not is_contained_path(name))
        raise ValueError(f"{name!r} is not a name for a file of an artifact")


def _compute_digest(manifest: JsonMapping) -> str:
    statement = dump_canonical_json({field: manifest.get(field) for field in STATED})
    text = _ADDRESS.sub('"', statement)
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
        while block := file.read(BLOCK):
            fast.update(block)
            strong.update(block)
            size += len(block)
    return File(size=size, digest=fast.hexdigest(), sha256=strong.hexdigest())


def hash_files(directory: Path) -> dict[str, File]:
    """Compute size and digests of every file below `directory`, of several at a time."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(hash_file, paths))
    return {str(path.relative_to(directory)): file for path, file in zip(paths, files)}


def split_ref(ref: str) -> tuple[str, str | None]:
    """Split ``url@digest`` into URL and digest; a bare URL has no digest."""
    url, mark, digest = ref.rpartition(f"@{DIGEST}:")
    if not mark:
        return normalize_url(ref), None
    return normalize_url(url), f"{DIGEST}:{digest}"


class Artifact:
    """A committed artifact, opened for reading."""

    def __init__(self, ref: str) -> None:
        """Open the artifact at a reference or a bare URL.

        Raises:
            UserError: nothing was committed there.
            Corrupt: what was committed there has another digest.
        """
        self.url, digest = split_ref(ref)
        manifest = find_manifest(self.url)
        if manifest is None:
            remedy = f"has no {MANIFEST}; run the stage that makes it, or correct the URL"
            raise UserError("artifact", self.url, remedy)
        self.manifest = manifest
        if digest not in (None, manifest.digest):
            problem = f"holds {manifest.digest}, but {digest} was asked for"
            raise Corrupt("artifact", self.url, problem)
        # Name of a verified file → what keeps it in the cache.
        self._proofs: dict[str, object] = {}

    @property
    def ref(self) -> str:
        return f"{self.url}@{self.manifest.digest}"

    def part(self, name: str, flag: str = "artifact", remedy: str = "") -> Path:
        """Return the local path of one of the artifact's files or directories; only its bytes are
        read and verified.

        Where the store is a folder, files are read in place. Others are fetched into
        `tuneloop.core.cache`, where they stay at least as long as this object does: keep the object
        while you use the path. What a stage asks for so is what its pod fetches
        (`tests/unit/stages/test_parts.py`).

        Raises:
            UserError: the artifact, given as `flag`, has no such part, and the `remedy` says what
                to give.
            Corrupt: some of it is missing, or differs from the manifest.
        """
        names = [
            file for file in self.manifest.files if file == name or file.startswith(f"{name}/")
        ]
        if not names:
            raise UserError(flag, self.url, f"holds no {name}" + (remedy and f"; {remedy}"))
        return self._prove(names) / name

    @property
    def path(self) -> Path:
        """A local directory with all of the artifact's files, each as `part` returns it."""
        return self._prove(self.manifest.files)

    def _prove(self, names: Iterable[str]) -> Path:
        """Verify files, once each, and return the local directory that has them."""
        folder = local_path(self.url)
        manifest = self.manifest
        directory = folder / manifest.root if folder else cache.open_directory(manifest.digest)
        for name in names:
            if name not in self._proofs:
                proof = (
                    self._prove_local(directory, name) if folder else self._fetch(directory, name)
                )
                if not proof:
                    digest = self.manifest.files[name].sha256
                    problem = f"differs from its manifest (SHA-256 {digest}); {_REMEDY}"
                    raise Corrupt("artifact", self._locate(name), problem)
                self._proofs[name] = proof
        return directory

    def _prove_local(self, directory: Path, name: str) -> bool:
        """Return whether a file is whole where it lies. Raises Corrupt if it is missing."""
        if not (directory / name).is_file():
            self._check_pruned(name)
            raise Corrupt("artifact", self._locate(name), f"is missing; {_REMEDY}")
        return is_whole(directory / name, self.manifest.files[name])

    def _fetch(self, directory: Path, name: str) -> object:
        """Fetch a file into the cache. Returns None if it is damaged; raises Corrupt if missing."""
        file = self.manifest.files[name]
        check = functools.partial(is_whole, file=file)
        key = f"{self.manifest.root}/{name}"
        fetch = functools.partial(Store(self.url).copy_file, key, size=file.size)
        try:
            return cache.take_file(directory, name, file.size, check, fetch)
        except Corrupt:
            self._check_pruned(name)
            raise

    def _locate(self, name: str) -> str:
        return f"{self.url}/{self.manifest.root}/{name}"

    def _check_pruned(self, name: str) -> None:
        """Raise Corrupt, with the rule, where retention has deleted files of this artifact."""
        rule = Store(self.url).get(PRUNED)
        if rule is not None:
            text = rule.decode(errors="replace")
            problem = f"was pruned by retention ({text}); take a newer version"
            raise Corrupt("artifact", self._locate(name), problem)


def is_whole(path: Path, file: File) -> bool:
    """Return whether a local file has the size and the xxh3-128 that its manifest states."""
    return path.stat().st_size == file.size and file_digest(path) == file.digest


def find_manifest(url: str) -> Manifest | None:
    """Return the manifest committed at `url`, or None."""
    data = Store(url).get(MANIFEST)
    return None if data is None else parse_manifest(url, data)


def parse_manifest(url: str, data: bytes, *, proved: bool = False) -> Manifest:
    """Parse a manifest read below `url`, and prove it.

    Args:
        proved: these very bytes were proved before.

    Raises Corrupt if it is no manifest, names files outside its artifact, or states something else
    than was committed.
    """
    url = normalize_url(url)
    path = f"{url}/{MANIFEST}"
    value = {} if proved else load_checked_json(data, MANIFEST, url, _REMEDY)
    try:
        manifest = Manifest.model_validate(value) if value else Manifest.model_validate_json(data)
    except ValidationError as error:
        problem = f"is not a manifest ({_describe(error)}); {_REMEDY}"
        raise Corrupt("artifact", path, problem) from error
    digest = _compute_digest(value) if value else manifest.digest
    if digest != manifest.digest:
        problem = f"was changed: it states {digest}, {manifest.digest} was committed; {_REMEDY}"
        raise Corrupt("artifact", path, problem)
    return manifest


def _describe(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")


class Draft:
    """An artifact being written: a directory, then one atomic commit."""

    def __init__(self, url: str, attempt: str | None = None) -> None:
        """Make the directory.

        Args:
            url: where the artifact will be committed.
            attempt: the name of the data directory, which all ranks of an attempt share.

        Raises UserError or DiskError if it cannot be made.
        """
        self.url = normalize_url(url)
        self.attempt = attempt or f"data-{os.urandom(6).hex()}"
        # Opened now: when another thread commits, the environment may have changed.
        self._store = Store(self.url)
        if self._store.root is not None:
            # Written in place: no reader looks there before the manifest exists.
            self.path = self._store.root / self.attempt
        else:
            # One attempt writes several artifacts: its output, and resume points meanwhile.
            suffix = xxhash.xxh3_64_hexdigest(self.url.encode())
            self.path = Path(tempfile.gettempdir()) / f"tuneloop-{self.attempt}-{suffix}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = f"{error.strerror}; choose a place that can be written"
            mistake = UserError("store", self.url, remedy)
            raise find_disk_error(error, [self.path]) or mistake from error

    def contribute(self, part: int) -> None:
        """Upload this machine's files as one `part` for the leader to commit, unless the store is a
        shared volume.
        """
        if self._store.root is None:
            listing = {name: file.model_dump() for name, file in self._upload().items()}
            key = f"{self.attempt}/{PARTS}/{part}"
            self._store.put(key, dump_canonical_json(listing).encode())
            delete_draft(self.path)

    def _upload(self) -> dict[str, File]:
        files = hash_files(self.path)
        for name in files:
            self._store.upload(f"{self.attempt}/{name}", self.path / name)
        return files

    def commit(self, **fields: Any) -> Manifest:
        """Commit the files, including those that other machines contributed.

        They are hashed and uploaded, and the manifest is created if it is absent.

        Args:
            fields: the other fields of the `Manifest`.

        Returns:
            The manifest that is then committed at the URL: this attempt's, or that of a duplicate
            that was faster, in which case this attempt's files are deleted.

        Raises:
            UserError: a field cannot be committed.
            Retryable: the process has lost its device lease (`tuneloop.core.fencing`), which is
                checked right before the manifest is created; or the store refuses the manifest
                because of another one that it does not return.
        """
        store = self._store
        files = self._collect_files()
        parts = self.url.split("/")
        url_end = "/".join(parts[-3 if parts[-3] == "iterations" else -1 :])
        try:
            manifest = Manifest(root=self.attempt, files=files, place=url_end, **fields)
        except ValidationError as error:
            problem = f"cannot be committed: {_describe(error)}"
            raise UserError("artifact", self.url, problem) from error
        manifest = manifest.model_copy(update={"digest": manifest.compute_digest()})
        data = dump_checked_json(json.loads(manifest.model_dump_json()), MANIFEST)
        fencing.check_lease()
        try:
            store.create(MANIFEST, data)
        except Conflict as error:
            committed = find_manifest(self.url)
            # The other writer has not finished, or the store lags behind.
            if committed is None:
                problem = "a write beside ours got in its way"
                raise Unavailable(f"store: {self.url}/{MANIFEST}: {problem}") from error
            # If it is this attempt's, only the store's answer was lost.
            if committed.root != self.attempt:
                store.delete(self.attempt)
                delete_draft(self.path)
                return committed
        if store.root is None:
            store.delete(f"{self.attempt}/{PARTS}")
            delete_draft(self.path)
        return manifest

    def _collect_files(self) -> dict[str, File]:
        """Upload the files, or make them durable, and list them with those of other machines."""
        files: dict[str, File] = {}
        if self._store.root is None:
            for key in self._store.keys(f"{self.attempt}/{PARTS}"):
                for name, file in json.loads(self._store.get(key) or b"{}").items():
                    files[name] = File(**file)
            return files | self._upload()
        files = hash_files(self.path)
        # Each name is durable once the directory that has it is.
        for path in self.path.rglob("*"):
            fsync_path(path)
        fsync_path(self.path)
        fsync_path(self.path.parent)
        return files


def delete_draft(path: Path) -> None:
    """Delete what was written to `path`, unless the manifest beside it names it: it is committed
    then.
    """
    manifest = path.with_name(MANIFEST)
    if not (manifest.is_file() and path.name in manifest.read_text()):
        shutil.rmtree(path, ignore_errors=True)


def dump_canonical_json(value: object) -> str:
    """Dump `value` as JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def dump_checked_json(value: JsonMapping, key: str) -> bytes:
    """Dump `value` as JSON with ``checksum``: the xxh3-128 of `key`, where it will lie, and of its
    canonical JSON. Read it back by `load_checked_json` with the same `key`.
    """
    checked = dict(value)
    checked[CHECKSUM] = _compute_checksum(value, key)
    return json.dumps(checked, indent=1).encode()


def _compute_checksum(value: object, key: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{key}{dump_canonical_json(value)}".encode())


def load_checked_json(
    data: bytes | None,
    key: str,
    url: str,
    remedy: str,
    shape: JsonMapping | None = None,
) -> JsonObject:
    """Load what `dump_checked_json` dumped for `key`.

    Args:
        data: the bytes; None: there is no such file, and the result is empty.
        key, url: where they were read, for the checksum and the message.
        remedy: what a person does about a damaged file.
        shape: key → type of the entries that it must have. With a key that is added, files of
            earlier runs are refused as damaged.

    Raises Corrupt if it is damaged or not of `shape`.
    """
    if data is None:
        return {}
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        value: JsonObject = from_json(data)
        if value.pop(CHECKSUM) == _compute_checksum(value, key):
            return check_shape(value, shape or {})
    problem = f"was changed since it was written, or is another file; {remedy}"
    raise Corrupt("file", f"{url}/{key}", problem)


def check_shape(value: JsonObject, shape: JsonMapping) -> JsonObject:
    """Return `value`.

    Raises ValueError, KeyError, TypeError: it lacks a key of `shape`, or has it of another type.
    """
    for name, kind in shape.items():
        get_adapter(kind).validate_python(value[name], strict=True)
    return value


def hash_canonical_json(value: object) -> str:
    """Compute the SHA-256 of `value` as `dump_canonical_json` dumps it, in hexadecimal."""
    return hashlib.sha256(dump_canonical_json(value).encode()).hexdigest()
