"""Publish each checkpoint of a stage as a weight version, once it is committed.

The artifact is authoritative. Publishing follows the commit and may be repeated: running a stage
again completes it.

It is the ``after`` of the stages that write checkpoints (`core/component.py`: `component`), so it
runs once the artifact is committed, on the first rank. `training/checkpoint.py: checkpoint_stage`
sets it for those that train, `stages/base_model.py` for itself.
"""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tuneloop.core.artifacts import Artifact, Manifest, dump_checked_json, load_checked_json
from tuneloop.core.component import UNTRACKED, Stage
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store, local_path
from tuneloop.formats.facts import VersionFacts
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publish import Published, publish_version
from tuneloop.weights.versions import Chain

RECORDS = "published"
"""Below the root, ``published/NNNNNN.json`` records how long publishing took. No weights depend on it;
`inference/follower.py` and `runs/delivery.py` compute delays and sizes with it."""

RECORD: JsonObject = {
    "at": float,
    "timings": dict[str, float],
    "sent_bytes": int,
    "full_bytes": int,
    "density": float | None,
    "encoding": str | None,
}
"""Field → type, of the fields that readers require of such a record: ``at`` is its time, the others
are those of `Published`. A field that is added here refuses the records of all earlier runs."""

# The parameter ``weights`` of the stages that write checkpoints.
Weights = Annotated[
    str | None,
    Field(
        description="publish the version below this URL once it is committed, for engines that pull"
        "; none: do not",
        json_schema_extra=UNTRACKED,
    ),
]


def publish_checkpoint(stage: Stage, manifest: Manifest) -> None:
    """Publish ``model/`` of a committed checkpoint below the root that the stage's ``weights`` names.

    Without this parameter nothing is published. A version that the root has passed already is not
    published again. The parameters ``weights``, ``weight_encoding`` and ``publish_weights`` are
    read by name: a stage without one has its default here.

    Args:
        stage: the stage that committed the checkpoint.
        manifest: the manifest of the checkpoint.

    Raises:
        PointerRewind: another run has moved the root on.
        PointerConflict: the version exists with other weights.
    """
    params = dict(stage.params)
    root = params.get("weights")
    if root is None:
        return
    version = VersionFacts.read(manifest).version
    # Read before the publication below, so that it says whether the version existed before.
    chain = Chain(root)
    # Without timings an earlier attempt committed it, and later versions may exist.
    committed_now = bool(stage.timings)
    if _is_superseded(chain, version, manifest.digest, committed_now):
        return

    began = time.time()
    # The model before training: the checkpoint of the base model has none.
    policy_reference = manifest.inputs.get("policy")
    policy = Artifact(policy_reference) if policy_reference else None
    base = _find_base(policy) if policy else None
    published = publish_version(
        root,
        version,
        Artifact(stage.out_url).part("model"),
        base=base,
        base_version=VersionFacts.read(policy).version if policy and base else None,
        source=manifest.digest,
        # Only the stage that writes the base model has these two parameters. ``chain`` is no encoding:
        # `publish_version` then takes that of the chain's newest version.
        encoding=params.get("weight_encoding", "chain"),
        held_by_readers=not params.get("publish_weights", True),
    )
    # The record of the attempt that published it stays: this one only moved the pointer.
    if version not in chain.versions:
        _record_publication(chain.store, published, began)
        stage.log(_describe_publication(published))


def _is_superseded(chain: Chain, version: int, digest: str, committed_now: bool) -> bool:
    """Return whether the chain has passed `version`, which was made from the checkpoint `digest`.

    Raises:
        PointerRewind, PointerConflict: the chain is that of another run.
    """
    if chain.pointed is None or chain.pointed.version <= version:
        return False
    state = f"{chain.store.url} is at version {chain.latest} already"
    if version in chain.versions:
        if chain.entry(version).index.tuneloop.source != digest:
            raise PointerConflict(
                "weights version",
                version,
                f"{state}, and holds another one; use another root",
            )
    elif committed_now:
        raise PointerRewind(
            "weights version",
            version,
            f"{state}; give each run a root of its own",
        )
    return True


def _record_publication(store: Store, published: Published, began: float) -> None:
    """Write the record of a publication that began at the Unix time `began`."""
    key = _get_record_key(published.version)
    record = dataclasses.asdict(published)
    record["began"] = began
    record["at"] = time.time()
    store.put(key, dump_checked_json(record, key))


def _describe_publication(published: Published) -> str:
    """Return the line of progress about a publication."""
    storage = "full"
    if published.encoding:
        storage = f"{published.encoding}, {published.density or 0:.1%} of elements changed"
    milliseconds = sum(published.timings.values()) * 1e3
    return (
        f"published version {published.version}: {published.sent_bytes / 1e6:.2f} MB ({storage})"
        f" in {milliseconds:.0f} ms"
    )


def _get_record_key(version: int) -> str:
    """Return the key of the record of publishing `version`."""
    return f"{RECORDS}/{version:06d}.json"


def read_publications(root: str) -> dict[int, JsonObject]:
    """Read version → the record of publishing it, for all versions below `root`.

    A record has the fields of `Published`, and ``at``, the time at which it was published.

    Raises:
        Corrupt: a record is damaged.
    """
    store = Store(root)
    publications: dict[int, JsonObject] = {}
    for key in store.keys(RECORDS):
        number = key.removeprefix(f"{RECORDS}/").removesuffix(".json")
        if not number.isdecimal():
            continue
        record = read_publication(store, int(number))
        if record:
            publications[int(number)] = record
    return publications


def read_publication(store: Store, version: int) -> JsonObject | None:
    """Read the record of publishing one version; None if there is none. Raises Corrupt: damage."""
    key = _get_record_key(version)
    record = load_checked_json(
        store.get(key),
        key,
        store.url,
        "delete it",
        shape=RECORD,
    )
    return record or None


def _find_base(policy: Artifact) -> Path | None:
    """Find ``model/`` of the policy that was trained.

    Without interruptions it is the base version, which `publish_version` verifies. Return None if
    its files were deleted (`tuneloop gc --keep`): the base is then assembled from the chain.
    """
    local = local_path(policy.url)
    if local is None:
        return policy.part("model")
    root = local / policy.manifest.root
    model_files = [name for name in policy.manifest.files if name.startswith("model/")]
    is_complete = all((root / name).is_file() for name in model_files)
    return root / "model" if is_complete else None
