"""Promotions: names such as ``production`` for weight versions that passed a gate
(`tuneloop.formats.promotions`).

Deployments outside of a run read such a name; `training/old_checkpoints.py` keeps what is promoted,
by a pin.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from tuneloop.core.artifacts import Artifact, dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.store import Conflict, Store
from tuneloop.extensions.provenance.questions import find_artifact
from tuneloop.formats.promotions import KEY, find_newest, read_history
from tuneloop.runs.audit import prove_chain
from tuneloop.runs.committed import Entry
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import pin_artifact


def promote_version(
    run: Run,
    version: int,
    name: str,
    minima: Mapping[str, float],
) -> dict[str, Any]:
    """Name a version, so that retention keeps it.

    The version, its newest evaluation that measured the metrics of `minima`, and everything that
    both were made from have to pass the audit.

    Args:
        run: the run that made the version.
        version: its number.
        name: the name to give it, such as ``production``.
        minima: metric → the value that the evaluation has to reach.

    Returns:
        The record of the promotion; the standing one if it says the same.

    Raises:
        UserError: the version is not in the run, was not evaluated, or fails.
    """
    check_name(name, "NAME")
    entry = find_artifact(run, f"v{version}")
    evaluation = _find_evaluation(run, version, entry, minima)
    prove_chain(run, version, entry, [evaluation])
    _check_results(evaluation, minima)
    reference = run.reference(entry)
    promotion = {
        "name": name,
        "run": run.name,
        "version": version,
        "ref": reference,
        "least": dict(minima),
        "figures": evaluation.manifest.scalars,
        "evaluation": run.reference(evaluation),
        "who": os.environ.get("USER", f"uid {os.getuid()}"),
        "time": time.time(),
    }
    # It is pinned before it is recorded: retention must at no time delete a promoted version.
    pin_artifact(Artifact(reference), f"promoted-{name}")
    return _record_promotion(Store(run.store_url), promotion)


def _find_evaluation(run: Run, version: int, entry: Entry, minima: Mapping[str, float]) -> Entry:
    """Find the newest evaluation of a checkpoint, of those with all metrics if there are any."""
    evaluations: list[Entry] = []
    for evaluation in run.with_role("evaluator"):
        policy = run.find_policy(evaluation)
        if policy and policy.key == entry.key:
            evaluations.append(evaluation)
    if not evaluations:
        remedy = f"was not evaluated by {run.name} (loop.evaluate_every does)"
        raise UserError("VERSION", version, remedy)
    complete = [e for e in evaluations if minima.keys() <= e.manifest.scalars.keys()]
    return (complete or evaluations)[-1]


def _check_results(evaluation: Entry, minima: Mapping[str, float]) -> None:
    """Raise UserError unless the results of an evaluation reach the minima."""
    results = evaluation.manifest.scalars
    for metric, minimum in minima.items():
        if metric not in results:
            remedy = f"is not a figure of {evaluation.key}, which has {', '.join(results)}"
            raise UserError("--min", metric, remedy)
        # Not `<`: a result that is no number reaches nothing.
        if not results[metric] >= minimum:
            remedy = f"is not reached by {evaluation.key}: {results[metric]:g}"
            raise UserError("--min", f"{metric}={minimum:g}", remedy)


def _record_promotion(
    store: Store,
    promotion: dict[str, Any],
) -> dict[str, Any]:
    """Append a promotion to the history, and return it; return the newest of its name if that
    says the same.
    """
    while True:
        history, data = read_history(store)
        newest = find_newest(history, promotion["name"])
        if all(newest.get(key) == promotion[key] for key in ("ref", "evaluation", "least")):
            return newest
        history.append(promotion)
        try:
            store.swap(KEY, data, dump_checked_json({"promotions": history}, KEY))
        except Conflict:
            # Another promotion was recorded meanwhile: append to that.
            continue
        return promotion
