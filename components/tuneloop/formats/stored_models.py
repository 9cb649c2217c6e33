"""Models in a store: a directory as of Hugging Face, or an artifact of a run, by reference.

::

    s3://bucket/models/smollm2    a directory in a store (gs:// and az:// likewise)
    s3://bucket/runs/demo/export  an artifact: a checkpoint or an export
    run://demo/export             an artifact of a run in the store of the run that asks
    run://demo/iterations/3       the checkpoint of an iteration
    run://nightly@promoted        the version that was last promoted under this name

Each but the last may end with ``@sha256:…``: then it names these bytes and no others. The digest
is the artifact's, or that of the directory's listing, which states the size and the SHA-256 of each
file where the directory has ``SHA256SUMS``, and the store's entity tag where it has none.

A reference ``run://…`` can be read only where the store is known. So those who know it resolve it
first, and a new form of it passes through them: `config/loading.py: configure_for`,
`kfp/configure.py`, and `stages/base_model.py: resolve_model`. `config/stored_facts.py` and
`config/model_facts.py` read models before a run. Tests: `tests/unit/stages/test_stored_models.py`,
`tests/unit/planning/test_model_references.py`, `tests/unit/cli/test_store_put.py`.
"""

import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tuneloop.core import cache
from tuneloop.core.artifacts import (
    DIGEST,
    MANIFEST,
    Artifact,
    find_manifest,
    hash_canonical_json,
    hash_file,
    split_ref,
)
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import BUCKET_SCHEMES, Store, is_contained_path, local_path
from tuneloop.formats.checksums import CLAIM, SUMS, parse_sums
from tuneloop.formats.model_files import holds_weights
from tuneloop.formats.promotions import find_newest, read_history

FIELD = "base_model"
"""The setting that names a model, for messages."""
RUN = "run://"
SCHEMES = ("run", "file", *BUCKET_SCHEMES)
"""Schemes of references to models. ``hf://`` is none of them: it names a model of the hub
(`core/hub.py`)."""
PROMOTED = "promoted"
EXPORT = "export"
"""The artifact that a reference to a run names where it names none."""
ITERATION = re.compile(r"iterations/\d+")
CONFIGS = ("config.json", "adapter_config.json")
"""Names of configurations: a directory with one of them is a model, or adapters."""
FETCHED_TOGETHER = 4
"""Files that are fetched at a time; a large one travels in several ranges
(`core/store.py: READERS`)."""
FORM = "write run://RUN/ARTIFACT, run://RUN/iterations/N or run://NAME@promoted"


@dataclass(frozen=True)
class StoredFile:
    """A file as its store lists it: bytes, and its SHA-256 in hexadecimal, where that is known."""

    size: int
    sha256: str | None = None

    def is_intact(self, path: Path) -> bool:
        """Return whether a local copy has the size and the digest."""
        # The size is compared first: it costs nothing.
        if path.stat().st_size != self.size:
            return False
        if self.sha256 is None:
            return True
        digests = hash_file(path)
        return digests.sha256 == self.sha256


@dataclass
class StoredModel:
    """A model in a store, as it is now.

    Attributes:
        url: of the directory, or of the artifact.
        digest: what the reference is pinned to.
        folder: the key of the folder with the model's files, below `url`; empty: `url` itself.
        files: name → file, those directly in the folder.
        artifact: what verifies the files; None: a directory.
    """

    url: str
    digest: str
    folder: str
    files: dict[str, StoredFile]
    artifact: Artifact | None = None
    # While they are open, no other process deletes them from the cache.
    _handles: list[BinaryIO] = field(default_factory=list)

    @property
    def reference(self) -> str:
        """The reference that names these bytes and no others."""
        return f"{self.url}@{self.digest}"

    def open(self, name: str) -> BinaryIO:
        """Open a file where it lies; of an object only what is read travels. Nothing is verified."""
        store = Store(f"{self.url}/{self.folder}")
        return store.open(name)

    def fetch(self) -> Path:
        """Return a local directory with the files that loading the model takes, all verified.

        Files of a local store stay where they are. Others are fetched into `tuneloop.core.cache`,
        where they stay at least as long as this object does.

        Raises Corrupt: a file is missing, or differs from its digest.
        """
        names = list_loaded_files(self.files)
        fetch = self._fetch_file if self.artifact is None else self._fetch_part
        with ThreadPoolExecutor(FETCHED_TOGETHER) as pool:
            # The list raises what a thread has raised.
            paths = list(pool.map(fetch, names))
        return paths[0].parent

    def _fetch_part(self, name: str) -> Path:
        assert self.artifact
        # The names of an artifact's files begin below its data directory.
        _, _, prefix = self.folder.partition("/")
        return self.artifact.part(f"{prefix}/{name}" if prefix else name)

    def _fetch_file(self, name: str) -> Path:
        file = self.files[name]
        root = local_path(self.url)
        if root is not None:
            if not file.is_intact(root / name):
                raise self._blame(name)
            return root / name
        directory = cache.open_directory(self.digest)
        store = Store(self.url)
        handle = cache.take_file(
            directory,
            name,
            size=file.size,
            is_whole=file.is_intact,
            fetch=partial(store.copy_file, name, size=file.size),
        )
        if handle is None:
            raise self._blame(name)
        self._handles.append(handle)
        return directory / name

    def _blame(self, name: str) -> Corrupt:
        problem = f"differs from its line in {SUMS}; put the directory there again"
        return Corrupt("file", f"{self.url}/{name}", problem)


def is_reference(name: str) -> bool:
    """Return whether `name` names a model in a store, and not a local directory or one of the hub.

    A local directory is one where it is an artifact.
    """
    scheme, mark, _ = name.partition("://")
    if mark:
        return scheme.lower() in SCHEMES
    if f"@{DIGEST}:" in name:
        return True
    directory = Path(name)
    has_manifest = (directory / MANIFEST).is_file()
    return has_manifest and not (directory / CONFIGS[0]).is_file()


def find_run_store(output: str) -> str | None:
    """Return the store of the run whose stage writes to the URL `output`: ``STORE/RUN/STAGE``.

    Returns None where the URL has no such parts.
    """
    parts = output.rsplit("/", 2)
    if len(parts) < 3:
        return None
    store = parts[0]
    # What is left of a bucket's name alone is no store.
    is_cut = store.endswith((":", "/"))
    return None if is_cut else store


def open_model(reference: str, store: str | None = None) -> StoredModel:
    """Open the model that `reference` names.

    Args:
        reference: as `is_reference` recognizes it.
        store: the URL where ``run://`` looks for runs; None: not known.

    Raises:
        UserError: nothing is there, it is no model, or its bytes are not those of the reference's
            digest.
        Retryable: the store does not answer.
    """
    address = reference
    if reference.startswith(RUN):
        address = locate_run(reference, store)
    url, digest = split_ref(address)
    files = Store(url).list_files()
    has_config = not files.keys().isdisjoint(CONFIGS)
    if MANIFEST in files and not has_config:
        model = _open_artifact(reference, url)
    else:
        model = _open_directory(reference, url, files)
    if digest not in (None, model.digest):
        remedy = (
            f"holds {model.digest} now: its files were changed; restore them, or leave the digest "
            "out to take them as they are"
        )
        raise UserError(FIELD, reference, remedy)
    return model


def locate_run(reference: str, store: str | None) -> str:
    """Return the address, in a store, of the artifact that a reference ``run://…`` names.

    Raises as `open_model`.
    """
    if store is None:
        raise UserError(FIELD, reference, "can be read only where the store of a run is known")
    text = reference.removeprefix(RUN)
    path, _, mark = text.partition("@")
    name, _, key = path.partition("/")
    is_pinned = mark.startswith(f"{DIGEST}:")
    is_form = is_pinned or mark in ("", PROMOTED)
    # A path that leads out of the store names no run of it.
    if not is_form or not is_contained_path(path):
        remedy = f"is not a reference to a run; {FORM}"
        raise UserError(FIELD, reference, remedy)
    if mark == PROMOTED:
        return _locate_promoted(reference, store, name, key)
    url = f"{store}/{name}/{key or EXPORT}"
    if ITERATION.fullmatch(key):
        url = _find_checkpoint(reference, url)
    return f"{url}@{mark}" if is_pinned else url


def _locate_promoted(reference: str, store: str, name: str, key: str) -> str:
    """Return the reference of the version that was last promoted as `name`; with a `key`, the
    reference of the artifact at this key of its run, which must have this version."""
    history, _ = read_history(Store(store))
    promotion = find_newest(history, name)
    if not promotion:
        remedy = f"nothing was promoted as {name} in {store}; `tuneloop promote` does that"
        raise UserError(FIELD, reference, remedy)
    version: str = promotion["ref"]
    if not key:
        return version
    url = f"{store}/{promotion['run']}/{key}"
    _, digest = split_ref(version)
    manifest = find_manifest(url)
    digests: list[object] = []
    if manifest is not None:
        # An export states the digest of the checkpoint that it was copied from.
        digests = [manifest.digest, manifest.facts.get("digest")]
    if manifest is None or digest not in digests:
        remedy = (
            f"{url} is not of version {promotion['version']}, which was promoted as {name}; write "
            f"{RUN}{name}@{PROMOTED}"
        )
        raise UserError(FIELD, reference, remedy)
    return f"{url}@{manifest.digest}"


def _find_checkpoint(reference: str, url: str) -> str:
    """Return the URL of the checkpoint that an iteration, whose artifacts lie below `url`, made."""
    store = Store(url)
    for name in store.parts():
        artifact = f"{url}/{name}"
        manifest = find_manifest(artifact)
        if manifest and "model/config.json" in manifest.files:
            return artifact
    remedy = "has no checkpoint; `tuneloop status` shows the iterations of a run"
    raise UserError(FIELD, reference, remedy)


def _open_artifact(reference: str, url: str) -> StoredModel:
    """Open the model of an artifact: a checkpoint has it in a folder, an export is one."""
    artifact = Artifact(url)
    manifest = artifact.manifest
    for prefix in ("model/", ""):
        files: dict[str, StoredFile] = {}
        for path, file in manifest.files.items():
            name = path.removeprefix(prefix)
            is_inside = path.startswith(prefix)
            if is_inside and "/" not in name:
                files[name] = StoredFile(file.size, file.sha256)
        if files.keys().isdisjoint(CONFIGS):
            continue
        folder = f"{manifest.root}/{prefix}"
        return StoredModel(
            url=url,
            digest=manifest.digest,
            folder=folder.rstrip("/"),
            files=files,
            artifact=artifact,
        )
    remedy = f"is an artifact of the kind {manifest.kind}; name a checkpoint or an export"
    raise UserError(FIELD, reference, remedy)


def _open_directory(
    reference: str, url: str, listing: Mapping[str, tuple[int, str]]
) -> StoredModel:
    """Open a directory, whose files and their marks are the `listing`."""
    if not listing:
        remedy = "has no files; correct the address, or bring them by `tuneloop store put`"
        raise UserError(FIELD, reference, remedy)
    if CLAIM in listing:
        remedy = "is not whole: its upload goes on, or run `tuneloop store put` again"
        raise UserError(FIELD, reference, remedy)
    if listing.keys().isdisjoint(CONFIGS):
        remedy = f"has no {CONFIGS[0]}; name the directory of a model"
        raise UserError(FIELD, reference, remedy)
    sums = _read_sums(reference, url, listing)
    files: dict[str, StoredFile] = {}
    statement: dict[str, tuple[int, str]] = {}
    for name in sorted(listing):
        # As on the hub, hidden files are no part of a model.
        if name == SUMS or name.startswith("."):
            continue
        size, mark = listing[name]
        digest = sums.get(name)
        files[name] = StoredFile(size, digest)
        # A file without a digest is recognized by the mark that the store gives it.
        statement[name] = (size, digest or mark)
    digest = hash_canonical_json(statement)
    return StoredModel(
        url=url,
        digest=f"{DIGEST}:{digest}",
        folder="",
        files=files,
    )


def _read_sums(reference: str, url: str, names: Collection[str]) -> dict[str, str]:
    """Read the SHA-256 of the files directly in a directory, whose names are `names`; empty where
    it has no sums. Raises UserError: a file is missing."""
    if SUMS not in names:
        return {}
    data = Store(url).get(SUMS)
    sums = parse_sums(data or b"", f"{url}/{SUMS}")
    for name in sums:
        # Subdirectories are no part of a model.
        if "/" not in name and name not in names:
            remedy = f"lacks {name}, which its {SUMS} lists; put the directory there again"
            raise UserError(FIELD, reference, remedy)
    return sums


def list_loaded_files(names: Collection[str]) -> list[str]:
    """List the files that loading a model takes: of the weights those of one format, safetensors
    where they are there. Without either format none: then loading says what is missing.
    """
    companions = [name for name in names if not holds_weights(name)]
    for extension in (".safetensors", ".bin"):
        ends = (extension, f"{extension}.index.json")
        weights = [name for name in names if name.endswith(ends)]
        if weights:
            return companions + weights
    return companions
