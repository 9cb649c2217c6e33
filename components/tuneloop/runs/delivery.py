"""Timings of each version on its way from the trainer to its tokens (docs/weights.md, "What each
version took").

It joins three records: the publisher's (`weights/publication.py`), the replicas'
(`weights/live.py`), and what sampling stages state. The page, the report and trackers show it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tuneloop.core.artifacts import check_shape
from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Store
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.weights import live
from tuneloop.weights.publication import read_publication, read_publications


@dataclass(frozen=True)
class Delivery:
    """The delivery of one version. Fields that are unknown, or that this way lacks, are None.

    Attributes:
        version: of the policy.
        way: ``pulled``, ``refitted``, or ``published`` if nobody has asked for it yet.
        encoding: of the published files.
        sent_bytes, full_bytes: of what was sent, and of the whole model.
        density: the share of elements that changed.
        encode_s, publish_s: seconds that the publisher took.
        materialize_s, pause_s: seconds that the slowest replica took, and did not generate.
        converged_s: seconds until the last replica had the version.
        waited_s: seconds that the stage waited for it.
        behind: the mean staleness of its tokens, in versions.
        replicas: how many are known to have served it.
        proved: ``n/m``: n of m tensors were read back equal.
    """

    version: int
    way: str
    encoding: str | None = None
    sent_bytes: float | None = None
    full_bytes: float | None = None
    density: float | None = None
    encode_s: float | None = None
    publish_s: float | None = None
    materialize_s: float | None = None
    pause_s: float | None = None
    converged_s: float | None = None
    waited_s: float | None = None
    behind: float | None = None
    replicas: int = 0
    proved: str = ""


FACTS_SHAPE = {
    "version": int,
    "staleness": dict[str, float | None],
}
"""The facts of an artifact whose tokens have versions. ``staleness`` is what
`inference/generate.py: measure_staleness` returns."""
REFIT_SHAPE = {
    "workers": dict[str, float],
    "updates": dict[str, float],
    "seconds": float,
}
"""The note of a stage that has refitted a fleet (`inference/fleet/refit.py: Refitted`): seconds by
worker, seconds by update, and seconds in all. The note ``pulled`` has the shape `PULL` of
`weights/live.py`.
"""
NUMBERS = tuple(field.name for field in fields(Delivery) if field.type == float | None)
"""The fields that are curves of a tracker, as ``weights/<name>`` (`runs/mirroring.py`). A field of
any other type is none of them. The page names each curve and column itself: `ui/static/weights.js`.
"""


def list_deliveries(run: Run) -> list[Delivery]:
    """List the delivery of every version that was published or brought to a fleet, as last
    measured.
    """
    publications = read_publications(run.weights_url)
    deliveries: dict[int, Delivery] = {}
    for version, publication in publications.items():
        deliveries[version] = _describe_publication(version, publication)
    for entry in run.with_role("sampler", "evaluator"):
        delivery = _measure_delivery(run, entry, publications.get)
        if delivery is None:
            continue
        # A fleet is refitted once; later stages find it refitted, and measure no pause.
        former = deliveries.get(delivery.version)
        if former is None or former.pause_s is None or delivery.pause_s is not None:
            deliveries[delivery.version] = delivery
    return [deliveries[version] for version in sorted(deliveries)]


def find_delivery(run: Run, entry: Entry) -> Delivery | None:
    """Return the delivery of an entry's version; None if it was neither published nor refitted."""
    find_publication = functools.partial(read_publication, Store(run.weights_url))
    return _measure_delivery(run, entry, find_publication)


def get_measurements(delivery: Delivery) -> dict[str, float]:
    """Return the known measurements of a delivery by name, for charts."""
    measurements: dict[str, float] = {}
    for name in NUMBERS:
        value = getattr(delivery, name)
        if value is not None:
            measurements[name] = float(value)
    return measurements


def _measure_delivery(
    run: Run,
    entry: Entry,
    find_publication: Callable[[int], dict[str, Any] | None],
) -> Delivery | None:
    """Do the work of `find_delivery`; `find_publication` returns the publisher's record of a
    version.
    """
    facts = entry.manifest.facts
    if "staleness" not in facts:
        return None
    version = _check_shape(entry, facts, FACTS_SHAPE)["version"]
    timings = entry.manifest.timings
    waited_s = timings.get("load", 0.0) + timings.get("canary", 0.0)
    # Carried tokens were requested from an earlier version: they do not tell how late this one
    # came.
    behind = None if "carried" in facts else facts["staleness"].get("mean")
    # A fleet of somebody else loads checkpoints, our servers pull published versions.
    if entry.manifest.notes.get("refitted"):
        delivery = _measure_refit(run, entry, version)
    else:
        publication = find_publication(version)
        if publication is None:
            return None
        pulls = _list_pulls(run, entry, version)
        delivery = _measure_pulls(_describe_publication(version, publication), pulls, publication)
    return replace(delivery, waited_s=waited_s, behind=behind)


def _measure_refit(run: Run, entry: Entry, version: int) -> Delivery:
    """Measure a delivery to a fleet whose workers load the whole checkpoint."""
    refit = _check_shape(
        entry,
        entry.manifest.notes["refitted"],
        REFIT_SHAPE,
    )
    # A worker that already had the version did not pause.
    pauses = [seconds for seconds in refit["workers"].values() if seconds]
    checkpoint = run.find_policy(entry)
    size = _count_model_bytes(checkpoint) if checkpoint else None
    return Delivery(
        version,
        "refitted",
        sent_bytes=size,
        full_bytes=size,
        materialize_s=max(refit["updates"].values(), default=None),
        pause_s=max(pauses, default=None),
        converged_s=refit["seconds"],
        replicas=len(refit["workers"]),
    )


def _count_model_bytes(checkpoint: Entry) -> int:
    """Return the bytes of a checkpoint's weights."""
    size = 0
    for name, file in checkpoint.manifest.files.items():
        if name.startswith("model/") and name.endswith(".safetensors"):
            size += file.size
    return size


def _list_pulls(
    run: Run,
    entry: Entry,
    version: int,
) -> list[Mapping[str, Any]]:
    """List what replicas recorded of their pulls of a version, before a stage was done with it."""
    pulls: list[Mapping[str, Any]] = []
    for pull in live.read_pulls(Store(run.weights_url), version):
        if pull["served_at"] <= entry.finished:
            pulls.append(pull)
    answer = entry.manifest.notes.get("pulled")
    # Without records there is the answer of the replica that the stage asked.
    if not pulls and answer and _check_shape(entry, answer, live.PULL)["version"] == version:
        pulls.append(answer)
    return pulls


def _describe_publication(
    version: int,
    publication: Mapping[str, Any],
) -> Delivery:
    """Return the delivery of a version as its publisher's record tells it."""
    timings = publication["timings"]
    return Delivery(
        version,
        "published",
        encoding=publication["encoding"],
        sent_bytes=publication["sent_bytes"],
        full_bytes=publication["full_bytes"],
        density=publication["density"],
        encode_s=timings.get("base", 0.0) + timings.get("encode", 0.0),
        publish_s=timings.get("publish"),
    )


def _measure_pulls(
    delivery: Delivery,
    pulls: Sequence[Mapping[str, Any]],
    publication: Mapping[str, Any],
) -> Delivery:
    """Add to a published version's delivery what its replicas recorded of their pulls."""
    if not pulls:
        return replace(delivery, way="pulled")
    # A replica that starts late pulls a full version; the fleet did not wait for it.
    served_at = [pull["served_at"] for pull in pulls if pull["full"] is None]
    converged_s = max(0.0, max(served_at) - publication["at"]) if served_at else None
    worst = min(
        pulls,
        key=lambda pull: pull["identical"] / max(pull["tensors"], 1),
    )
    return replace(
        delivery,
        way="pulled",
        materialize_s=max(pull["fetch_s"] + pull["apply_s"] for pull in pulls),
        pause_s=max(pull["pause_s"] for pull in pulls),
        converged_s=converged_s,
        replicas=len(pulls),
        proved=f"{worst['identical']}/{worst['tensors']}",
    )


def _check_shape(
    entry: Entry,
    record: dict[str, Any],
    shape: Mapping[str, Any],
) -> dict[str, Any]:
    """Return an artifact's record of its delivery. Raises Corrupt if it does not have this
    shape.
    """
    try:
        return check_shape(record, shape)
    except (ValueError, KeyError, TypeError) as error:
        remedy = "has no readable delivery; restore the artifact's manifest from a copy"
        raise Corrupt("artifact", entry.key, remedy) from error
