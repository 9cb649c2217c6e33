"""Timings of each version on its way from the trainer to its tokens (docs/weights.md, "What each version took")."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tuneloop.core.artifacts import check_shape
from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Entry, Run
from tuneloop.weights import live
from tuneloop.weights.publication import read_publication, read_publications


@dataclass(frozen=True)
class Delivery:
    """The delivery of one version; `way` is ``pulled``, ``refitted``, or ``published`` where nobody has asked for it
    yet. Fields that are unknown, or that this way lacks, are None. `replicas` counts those known to have served it;
    `behind` is the mean staleness of its tokens, in versions; `proved` is ``n/m``: n of m tensors read back equal."""

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


SAMPLED = {"version": int, "staleness": dict[str, float | None]}
REFIT = {"workers": dict[str, float], "updates": dict[str, float], "seconds": float}
NUMBERS = tuple(f.name for f in fields(Delivery) if f.type == float | None)


def list_deliveries(run: Run) -> list[Delivery]:
    """List the delivery of every version that was published or brought to a fleet, as last measured."""
    records = read_publications(run.weights_url)
    found = {
        version: Delivery(version, "published", **_sent(about))
        for version, about in records.items()
    }
    for entry in run.with_role("sampler", "evaluator"):
        if one := _delivery(run, entry, records.get):
            before = found.get(
                one.version
            )  # a fleet is refitted once, and found refitted from then on
            if before is None or before.pause_s is None or one.pause_s is not None:
                found[one.version] = one
    return [found[version] for version in sorted(found)]


def find_delivery(run: Run, entry: Entry) -> Delivery | None:
    """Return the delivery of an entry's version; None if it was neither published nor refitted."""
    return _delivery(run, entry, functools.partial(read_publication, Store(run.weights_url)))


def _delivery(
    run: Run, entry: Entry, recorded: Callable[[int], dict[str, Any] | None]
) -> Delivery | None:
    """Do the work of `find_delivery`; `recorded` finds the publisher's record of a version."""
    facts, notes, took = entry.manifest.facts, entry.manifest.notes, entry.manifest.timings
    if "staleness" not in facts:
        return None
    version = _check_told(entry, facts, SAMPLED)["version"]
    refitted = notes.get("refitted") and _check_told(entry, notes["refitted"], REFIT)
    waited = took.get("load", 0.0) + took.get("canary", 0.0)
    behind = (
        None if "carried" in facts else facts["staleness"].get("mean")
    )  # carried tokens were requested earlier
    seen: dict[str, Any] = {"waited_s": waited, "behind": behind}
    if refitted:
        changed = [seconds for seconds in refitted["workers"].values() if seconds]
        seen |= {"pause_s": max(changed, default=None), "replicas": len(refitted["workers"])}
        seen |= {
            "materialize_s": max(refitted["updates"].values(), default=None),
            "converged_s": refitted["seconds"],
        }
        if checkpoint := run.policy_of(entry):
            files = checkpoint.manifest.files.items()
            size = sum(
                file.size
                for name, file in files
                if name.startswith("model/") and name.endswith(".safetensors")
            )
            seen |= {"sent_bytes": size, "full_bytes": size}
        return Delivery(version, "refitted", **seen)
    if (about := recorded(version)) is None:
        return None
    # The records of replicas from before `entry` was done; else the answer of the replica that the stage asked.
    recorded_pulls = live.read_pulls(Store(run.weights_url), version)
    pulls: list[Mapping[str, Any]] = [
        each for each in recorded_pulls if each["served_at"] <= entry.finished
    ]
    if (
        not pulls
        and (own := notes.get("pulled"))
        and _check_told(entry, own, live.PULL)["version"] == version
    ):
        pulls = [own]
    return Delivery(version, "pulled", **_sent(about), **_served(pulls, about["at"]), **seen)


def _check_told(entry: Entry, told: dict[str, Any], shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return an artifact's record of its delivery, `told`. Raises Corrupt if it does not have this shape."""
    try:
        return check_shape(told, shape)
    except (ValueError, KeyError, TypeError) as error:
        remedy = "has no readable delivery; restore the artifact's manifest from a copy"
        raise Corrupt("artifact", entry.key, remedy) from error


def get_measurements(one: Delivery) -> dict[str, float]:
    """Return the known measurements of a delivery by name, for charts."""
    return {name: float(value) for name in NUMBERS if (value := getattr(one, name)) is not None}


def _sent(about: Mapping[str, Any]) -> dict[str, Any]:
    took = about["timings"]
    return {
        **{name: about[name] for name in ("encoding", "sent_bytes", "full_bytes", "density")},
        "encode_s": took.get("base", 0.0) + took.get("encode", 0.0),
        "publish_s": took.get("publish"),
    }


def _served(pulls: list[Mapping[str, Any]], published_at: float) -> dict[str, Any]:
    if not pulls:
        return {}
    followed = [
        about["served_at"] for about in pulls if about["full"] is None
    ]  # leaves out late joiners
    worst = min(pulls, key=lambda about: about["identical"] / max(about["tensors"], 1))
    return {
        "materialize_s": max(about["fetch_s"] + about["apply_s"] for about in pulls),
        "pause_s": max(about["pause_s"] for about in pulls),
        "converged_s": max(0.0, max(followed) - published_at) if followed else None,
        "replicas": len(pulls),
        "proved": f"{worst['identical']}/{worst['tensors']}",
    }
