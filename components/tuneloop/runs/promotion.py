"""Promotions: names such as ``production`` for weight versions that passed a gate. ``<store>/promoted.json`` lists all
promotions, the newest last; it is only appended to."""

import os
import time
from collections.abc import Mapping
from typing import Any

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from tuneloop.core.artifacts import Artifact, dump_checked_json, load_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.store import Conflict, Store
from tuneloop.runs.audit import prove_chain
from tuneloop.runs.questions import find_made
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import pin_artifact

KEY = "promoted.json"


class Promotion(TypedDict):
    """The record of a promotion: the version that was named, and the evaluation whose results reached the minimum."""

    name: str
    run: str
    version: int
    ref: str
    least: dict[str, float]
    figures: dict[str, float | bool]
    evaluation: str
    who: str
    time: FiniteFloat


def promote_version(
    run: Run, version: int, name: str, least: Mapping[str, float]
) -> dict[str, Any]:
    """Name a version if it, its newest evaluation with these results, and their sources pass the audit, and the results
    reach the minima `least`. Retention then keeps the version. Raises UserError if it fails, or is not in the run."""
    check_name(name, "NAME")
    entry = find_made(run, f"v{version}")
    judged = [
        e
        for e in run.with_role("evaluator")
        if (policy := run.policy_of(e)) and policy.key == entry.key
    ]
    judged = ([e for e in judged if least.keys() <= e.manifest.scalars.keys()] or judged)[-1:]
    if not judged:
        raise UserError(
            "VERSION", version, f"was not evaluated by {run.name} (loop.evaluate_every does)"
        )
    prove_chain(run, version, entry, *judged)
    results = judged[0].manifest.scalars
    ref, evaluation = (f"{run.url}/{each.key}@{each.manifest.digest}" for each in (entry, *judged))
    for metric, wanted in least.items():
        if metric not in results:
            raise UserError(
                "--min",
                metric,
                f"is not a figure of {judged[0].key}, which has {', '.join(results)}",
            )
        if not results[metric] >= wanted:
            raise UserError(
                "--min",
                f"{metric}={wanted:g}",
                f"is not reached by {judged[0].key}: {results[metric]:g}",
            )
    told = {
        "name": name,
        "run": run.name,
        "version": version,
        "ref": ref,
        "least": dict(least),
        "figures": results,
    }
    told |= {
        "evaluation": evaluation,
        "who": os.environ.get("USER", f"uid {os.getuid()}"),
        "time": time.time(),
    }
    pin_artifact(Artifact(ref), f"promoted-{name}")
    store = Store(run.store_url)
    while True:
        history, seen = read_history(store)
        newest: dict[str, Any] = next(
            (each for each in reversed(history) if each["name"] == name), {}
        )
        if all(newest.get(key) == told[key] for key in ("ref", "evaluation", "least")):
            return newest  # it is already recorded
        try:
            store.swap(KEY, seen, dump_checked_json({"promotions": [*history, told]}, KEY))
            return told
        except Conflict:
            continue  # another promotion was recorded meanwhile: append to that


def read_history(store: Store) -> tuple[list[dict[str, Any]], bytes | None]:
    """Read all promotions in a store, the oldest first, and the file's bytes; None if nothing was promoted."""
    data = store.get(KEY)
    told = load_checked_json(
        data, KEY, store.url, "restore it from a copy", {"promotions": list[Promotion]}
    )
    return told.get("promotions", []), data
