"""Artifacts: the directories that cross a stage border, their manifests, and how they are committed.

An artifact is a URL. Below it lie ``manifest.json`` and one data directory that the manifest names::

    <url>/manifest.json            created if absent, last: its existence means the artifact is whole
    <url>/<attempt>/<files …>      written by one attempt; a duplicate attempt writes elsewhere
    <url>/resume/<name>/…          artifacts of their own: what an interrupted stage left for its retry
    <url>/<name>/…                 an artifact of its own, committed later (`tuneloop.core.context`)

The manifest lists every file with size and xxh3-128, and the artifact's digest is the digest of that list, so
equal bytes have equal digests wherever they lie. A *reference* is ``<url>@<digest>``: what stages hand to one
another. A reader checks every byte it opens against the manifest; nothing without a manifest is read.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash
from pydantic import BaseModel, Field, ValidationError, field_validator

from tuneloop.core import cache, fencing
from tuneloop.core.errors import Corrupt, UserError
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
PARTS = ".parts"
DIGEST = "xxh3-128"
Role = Literal["sampler", "scorer", "trainer", "evaluator"]
"""What a stage is in a loop: it makes completions, judges them, learns from them, or measures the policy."""


class File(BaseModel, frozen=True):
    """Size in bytes and digest of one file."""

    size: int
    digest: str


class Manifest(BaseModel, frozen=True):
    """What is known of a committed artifact. `digest` covers the files alone, never times or places."""

    format: int = 1
    stage: str
    role: Role | None = Field(None, description="what the stage is in a loop")
    kind: str = Field("", description="what the artifact is: checkpoint, rollouts, ...")
    params: dict[str, Any] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict, description="input name → reference")
    root: str = Field(description="the data directory below the artifact's URL")
    files: dict[str, File]
    digest: str = Field(pattern=rf"^({DIGEST}:[0-9a-f]{{32}})?$")
    results: dict[str, Any] = Field(default_factory=dict, description="scalars that the workflow reads")
    facts: dict[str, Any] = Field(default_factory=dict, description="what the stage says of its output")
    timings: dict[str, float] = Field(default_factory=dict, description="seconds, and rates where the name says so")
    provenance: dict[str, Any] = Field(default_factory=dict)

    @field_validator("root", "files")
    @classmethod
    def _inside(cls, names: Any) -> Any:
        """Refuse names that lead out of the directory that a reader gives them."""
        several = [names] if isinstance(names, str) else [*names]
        if several and not is_contained_path("/".join(several)):  # looked at one by one they take a third of parsing
            wrong = next(name for name in several if not is_contained_path(name))
            raise ValueError(f"{wrong!r} is not a name for a file of an artifact")
        return names

    @property
    def scalars(self) -> dict[str, float]:
        """The results that can be drawn."""
        return {name: value for name, value in self.results.items() if isinstance(value, int | float)}


def file_digest(path: Path) -> str:
    """Compute the xxh3-128 of a file's bytes, in hexadecimal."""
    state = xxhash.xxh3_128()
    with open_for_reading(path) as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def digest_of(files: Mapping[str, File]) -> str:
    """Compute the digest of a list of files: over name, size and digest, in the order of names."""
    state = xxhash.xxh3_128()
    for name in sorted(files):
        state.update(f"{name}\0{files[name].size}\0{files[name].digest}\n".encode())
    return f"{DIGEST}:{state.hexdigest()}"


def hash_files(directory: Path) -> dict[str, File]:
    """Compute size and digest of every file below `directory`."""
    paths = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): File(size=p.stat().st_size, digest=file_digest(p)) for p in paths}


def split_ref(ref: str) -> tuple[str, str | None]:
    """Split ``url@digest`` into URL and digest; a bare URL has no digest."""
    url, mark, digest = ref.rpartition(f"@{DIGEST}:")
    return (normalize_url(url), f"{DIGEST}:{digest}") if mark else (normalize_url(ref), None)


class Artifact:
    """A committed artifact, opened for reading.

    Args:
        ref: its URL, or URL and digest.

    Raises:
        UserError: nothing is committed there.
        Corrupt: what is committed there is not what the reference says.
    """

    def __init__(self, ref: str) -> None:
        self.url, wanted = split_ref(ref)
        manifest = find_manifest(self.url)
        if manifest is None:
            raise UserError("artifact", self.url, f"has no {MANIFEST}; run the stage that makes it, or correct the URL")
        self.manifest = manifest
        listed = digest_of(manifest.files)  # what a proof of a part rests on
        for asked in (wanted, manifest.digest):
            if asked not in (None, listed):
                raise Corrupt("artifact", self.url, f"holds {listed}, but {asked} was asked for")
        self._proved: dict[str, object] = {}  # name → what keeps the file in the cache

    @property
    def ref(self) -> str:
        return f"{self.url}@{self.manifest.digest}"

    def part(self, name: str) -> Path:
        """Return one of the artifact's files or directories as a local path: its bytes are proved, no others are read.

        Where the store is a folder, files are read where they lie. Others are fetched into the cache
        (`tuneloop.core.cache`), where they stay at least as long as this object does.

        Raises:
            UserError: the artifact has no such part.
            Corrupt: some of it is missing, or differs from the manifest.
        """
        names = [each for each in self.manifest.files if each == name or each.startswith(f"{name}/")]
        if not names:
            raise UserError("artifact", self.url, f"holds no {name}")
        return self._prove(names) / name

    @property
    def path(self) -> Path:
        """A local directory with all of the artifact's files, each as `part` gives it."""
        return self._prove(self.manifest.files)

    def _prove(self, names: Iterable[str]) -> Path:
        local = local_path(self.url)
        directory = local / self.manifest.root if local else cache.open_directory(self.manifest.digest)
        for name in names:
            if name in self._proved:
                continue
            want, where = self.manifest.files[name], f"{self.url}/{self.manifest.root}/{name}"
            if local and not (directory / name).is_file():
                raise Corrupt("artifact", where, "is missing; " + _MEND)
            proof = _is_whole(directory / name, want) if local else self._take(directory, name, want)
            if not proof:
                raise Corrupt("artifact", where, f"differs from its manifest ({DIGEST} {want.digest}); " + _MEND)
            self._proved[name] = proof
        return directory

    def _take(self, directory: Path, name: str, want: File) -> BinaryIO | None:
        def fetch(path: Path) -> None:
            Store(self.url).copy_file(f"{self.manifest.root}/{name}", path, want.size)

        return cache.take_file(directory, name, want.size, lambda path: _is_whole(path, want), fetch)


def _is_whole(path: Path, want: File) -> bool:
    return path.stat().st_size == want.size and file_digest(path) == want.digest


_MEND = "restore it from a copy, or delete the artifact's URL and run the stage again"


def find_manifest(url: str) -> Manifest | None:
    """Return the manifest committed at `url`, or None."""
    data = Store(url).get(MANIFEST)
    return None if data is None else parse_manifest(url, data)


def parse_manifest(url: str, data: bytes) -> Manifest:
    """Parse a manifest from the bytes read below `url`.

    Raises:
        Corrupt: they are none, or it names files outside its artifact.
    """
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise Corrupt("artifact", f"{normalize_url(url)}/{MANIFEST}", f"is not a manifest ({why}); {_MEND}") from error


class Draft:
    """An artifact being written: a scratch directory, then one atomic commit.

    Args:
        url: where it will be committed.
        attempt: names this attempt's data directory; all ranks of one attempt pass the same.
    """

    def __init__(self, url: str, attempt: str | None = None) -> None:
        self.url = normalize_url(url)
        self.attempt = attempt or f"data-{os.urandom(6).hex()}"
        self._store = Store(self.url)  # here: where a draft is committed on another thread, the environment may change
        if self._store.root is not None:
            self.path = (
                self._store.root / self.attempt
            )  # written in place: no reader looks there before the manifest exists
        else:
            # One attempt writes several artifacts: its output, and resume points meanwhile.
            place = xxhash.xxh3_64_hexdigest(self.url.encode())
            self.path = Path(tempfile.gettempdir()) / f"tuneloop-{self.attempt}-{place}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError("store", self.url, f"{error.strerror}; choose a place that can be written") from error

    def contribute(self, part: int) -> None:
        """Hand this machine's files to the one that commits, where the store is not a volume that they share.

        Args:
            part: a number that no other machine of the attempt has.
        """
        store = self._store
        if store.root is None:
            files = self._upload(store)
            listing = {name: file.model_dump() for name, file in files.items()}
            store.put(f"{self.attempt}/{PARTS}/{part}", dump_canonical_json(listing).encode())
            self.discard()

    def _upload(self, store: Store) -> dict[str, File]:
        files = hash_files(self.path)
        for name in files:
            store.upload(f"{self.attempt}/{name}", self.path / name)
        return files

    def _parts(self, store: Store) -> dict[str, File]:
        """Return the files that other machines contributed."""
        listings = [json.loads(store.get(key) or b"{}") for key in store.keys(f"{self.attempt}/{PARTS}")]
        return {name: File(**about) for listing in listings for name, about in listing.items()}

    def commit(self, **about: Any) -> Manifest:
        """Digest the files, move them, create the manifest if absent.

        Those that other machines have contributed belong to it, too.

        `about` are the Manifest's other fields. Returns the manifest that now stands at the URL: ours, or that
        of a duplicate which was faster; ours is dropped then.

        Raises:
            Retryable: the process has lost its turn (`tuneloop.core.fencing`), asked right before the manifest is
            created.
        """
        store = self._store
        if store.root is None:
            files = self._parts(store) | self._upload(store)
        else:
            files = hash_files(self.path)
            for name in files:
                fsync_path(self.path / name)
        manifest = Manifest(root=self.attempt, files=files, digest=digest_of(files), **about)
        fencing.check_lease()
        try:
            store.create(MANIFEST, manifest.model_dump_json(indent=1).encode())
        except Conflict:
            store.delete(self.attempt)
            self.discard()
            standing = find_manifest(self.url)
            assert standing is not None
            return standing
        if store.root is None:
            store.delete(f"{self.attempt}/{PARTS}")
            self.discard()
        return manifest

    def discard(self) -> None:
        """Forget what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


def dump_canonical_json(value: Any) -> str:
    """Dump `value` as JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
