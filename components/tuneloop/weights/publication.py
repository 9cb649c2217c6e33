"""Publish each checkpoint of a stage as a weight version, once it is committed.

The artifact is authoritative. Publishing follows the commit and may be repeated: running a stage again completes it."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tuneloop.core.artifacts import Artifact, Manifest, dump_checked_json, load_checked_json
from tuneloop.core.component import UNTRACKED, Stage
from tuneloop.core.store import Store, local_path
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publish import publish_version
from tuneloop.weights.versions import Chain

RECORDS = "published"
"""Below the root, ``published/NNNNNN.json`` records how long publishing took, for people and reports only."""
RECORD: dict[str, Any] = {
    "at": float,
    "timings": dict[str, float],
    "sent_bytes": int,
    "full_bytes": int,
}
RECORD |= {"density": float | None, "encoding": str | None}

Weights = Annotated[
    str | None,
    Field(
        description="publish the version below this URL once it is committed, for engines that pull; none: do not",
        json_schema_extra=UNTRACKED,
    ),
]


def publish_checkpoint(stage: Stage, manifest: Manifest) -> None:
    """Publish ``model/`` of a committed checkpoint below the stage's parameter ``weights``, if that is set. Raises
    PointerRewind: another run has moved the root on; PointerConflict: the version stands with other weights."""
    if (root := getattr(stage.params, "weights", None)) is None:
        return
    version: int = manifest.facts["version"]
    ran = bool(stage.timings)  # else an earlier attempt committed it, and later versions may exist
    chain = Chain(root)
    if chain.pointed is not None and chain.pointed.version > version:
        where = f"{chain.store.url} is at version {chain.latest} already"
        if version in chain.versions:
            if chain.entry(version).index.tuneloop.source != manifest.digest:
                raise PointerConflict(
                    "weights version", version, f"{where}, and holds another one; use another root"
                )
        elif ran:
            raise PointerRewind(
                "weights version", version, f"{where}; give each run a root of its own"
            )
        return
    began = time.time()
    made, ref = Artifact(stage.out_url), manifest.inputs.get("policy")
    policy = Artifact(ref) if ref else None
    base = _find_base(policy) if policy else None
    follows = policy.manifest.facts["version"] if policy and base else None
    about: dict[str, Any] = {"base": base, "base_version": follows, "source": manifest.digest}
    about["encoding"] = getattr(stage.params, "weight_encoding", "chain")
    about["held"] = not getattr(stage.params, "publish_weights", True)
    done = publish_version(root, version, made.part("model"), **about)
    if version not in chain.versions:
        record = {**dataclasses.asdict(done), "began": began, "at": time.time()}
        chain.store.put(key := f"{RECORDS}/{version:06d}.json", dump_checked_json(record, key))
        how = (
            f"{done.encoding}, {done.density or 0:.1%} of elements changed"
            if done.encoding
            else "full"
        )
        took = sum(done.timings.values()) * 1e3
        stage.log(
            f"published version {done.version}: {done.sent_bytes / 1e6:.2f} MB ({how}) in {took:.0f} ms"
        )


def read_publications(root: str) -> dict[int, dict[str, Any]]:
    """Read version → the record of publishing it below `root`: the fields of `Published`, and ``at``, its time."""
    store = Store(root)
    names = (key.removeprefix(f"{RECORDS}/").removesuffix(".json") for key in store.keys(RECORDS))
    versions = (int(name) for name in names if name.isdecimal())
    return {version: about for version in versions if (about := read_publication(store, version))}


def read_publication(store: Store, version: int) -> dict[str, Any] | None:
    """Read the record of publishing one version; None if there is none."""
    key = f"{RECORDS}/{version:06d}.json"
    return load_checked_json(store.get(key), key, store.url, "delete it", RECORD) or None


def _find_base(policy: Artifact) -> Path | None:
    """Find ``model/`` of the policy that was trained: without interruptions it is the base version, which
    `publish_version` verifies. None if its files were deleted (`tuneloop gc --keep`): the chain then has the base."""
    if (local := local_path(policy.url)) is None:
        return policy.part("model")
    held = local / policy.manifest.root
    there = all(
        (held / name).is_file() for name in policy.manifest.files if name.startswith("model/")
    )
    return held / "model" if there else None
