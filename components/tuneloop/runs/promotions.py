"""Promotions: who may stand under a name, and how it is recorded (`tuneloop.formats.promotions`).

A version is promoted by a person, with minima for its evaluation
(`extensions/provenance/promotion.py: promote_version`), or by its line (`promote_result`). A line
is the runs of a schedule that begin with the version which was promoted last (`cluster/schedule.py:
find_base_model`).
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneloop.core.artifacts import Artifact, dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.store import Conflict, Store
from tuneloop.formats.promotions import KEY, find_newest, read_history
from tuneloop.runs.audit import prove_chain
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import pin_artifact

METRIC = "mean_reward"
"""What a line compares: the mean reward on the held-out prompts."""
EXPORT_KIND = "model"
"""The kind of what `stages/export.py` commits. `runs/summary.py`, `runs/tracking.py`,
`runs/mirroring.py` and `cli/generate.py` know it, too, as a text of their own."""


def parse_minima(items: Iterable[str]) -> dict[str, float]:
    """Parse items ``METRIC=VALUE`` of the option ``--min``. Raises UserError if one is none."""
    minima: dict[str, float] = {}
    for item in items:
        metric, _, value = item.partition("=")
        try:
            minima[metric] = float(value)
        except ValueError:
            remedy = "write METRIC=VALUE, as in mean_reward=0.9"
            raise UserError("--min", item, remedy) from None
    return minima


def promote_entry(
    run: Run,
    checkpoint: Entry,
    evaluation: Entry,
    name: str,
    minima: Mapping[str, float],
) -> dict[str, Any]:
    """Give a checkpoint of a run the name `name`, after the audit of what it was made from.

    Args:
        run: the run that made it.
        checkpoint: of the version.
        evaluation: whose results reached the `minima`, metric → value.

    Returns:
        The record of the promotion, whose keys are those of `formats/promotions.py: Promotion`; the
        standing one if it says the same.

    Raises:
        UserError: it does not pass the audit.
    """
    version = checkpoint.version
    prove_chain(run, version, checkpoint, [evaluation])
    reference = run.reference(checkpoint)
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
    store = Store(run.store_url)
    while True:
        history, data = read_history(store)
        newest = find_newest(history, name)
        if all(newest.get(key) == promotion[key] for key in ("ref", "evaluation", "least")):
            return newest
        history.append(promotion)
        try:
            store.swap(KEY, data, dump_checked_json({"promotions": history}, KEY))
        except Conflict:
            # Another promotion was recorded meanwhile: append to that.
            continue
        return promotion


@dataclass(frozen=True)
class Candidate:
    """The result of a run that its line may go on from.

    Attributes:
        checkpoint: of the version that the run exports.
        evaluation: the newest of that version.
        former: the first evaluation of the policy that the run began with; None without one, as of
            a pipeline that evaluates only what its fine-tuning made of that policy.
    """

    checkpoint: Entry
    evaluation: Entry
    former: Entry | None


def promote_result(run: Run, name: str, minima: Mapping[str, float]) -> str:
    """Promote the version that a finished run exports as `name`, if it is good enough.

    It has to reach `minima`, metric → value, and the mean reward that the policy with which the run
    began has on the same held-out prompts. Where the run did not evaluate that policy, it has to
    reach the mean reward with which the standing version was promoted. Otherwise the version that
    stands under the name stays.

    Returns:
        A line that says what was done and why; empty where the version stands already.
    """
    history, _ = read_history(Store(run.store_url))
    try:
        candidate = find_candidate(run)
        newest = find_newest(history, name)
        required = find_requirements(candidate, minima, newest.get("figures", {}))
        if newest.get("ref") == run.reference(candidate.checkpoint):
            return ""
        check_results(candidate.evaluation, required)
        promote_entry(run, candidate.checkpoint, candidate.evaluation, name, required)
    except UserError as error:
        return f"not promoted: {run.name}: {error}"
    results = candidate.evaluation.manifest.scalars
    figures = [f"{metric} {results[metric]:g} (≥ {required[metric]:g})" for metric in required]
    return f"promoted: {run.name}: {', '.join(figures)}"


def find_candidate(run: Run) -> Candidate:
    """Find what a run exports, and its evaluations.

    Raises:
        UserError: it exports no model, or did not evaluate the exported version.
    """
    exports = [entry for entry in run.entries if entry.manifest.kind == EXPORT_KIND]
    checkpoint = run.find_policy(exports[-1]) if exports else None
    if checkpoint is None:
        raise UserError("run", run.name, "exports no version of its policy")
    evaluations = [
        evaluation
        for evaluation in run.list_evaluations(checkpoint)
        if METRIC in evaluation.manifest.scalars
    ]
    if not evaluations:
        remedy = f"was not evaluated: there is no {METRIC} of held-out prompts"
        raise UserError("version", checkpoint.version, remedy)
    return Candidate(checkpoint, evaluations[-1], _find_former(run, checkpoint))


def _find_former(run: Run, checkpoint: Entry) -> Entry | None:
    """Find the first evaluation of the policy that a run began with; None without one, and where
    that policy is the `checkpoint` itself.
    """
    for evaluation in run.with_role("evaluator"):
        policy = run.find_policy(evaluation)
        if policy is None or policy == checkpoint or METRIC not in evaluation.manifest.scalars:
            continue
        # What a stage made of another policy is not what the run began with.
        if "policy" not in policy.manifest.inputs:
            return evaluation
    return None


def find_requirements(
    candidate: Candidate,
    minima: Mapping[str, float],
    standing: Mapping[str, float],
) -> dict[str, float]:
    """Return metric → the value that a candidate has to reach.

    Args:
        candidate: the result, with the evaluation of what its run began with.
        minima: metric → value, as the user gave them.
        standing: metric → value with which the version was promoted that stands under the name.
            They count where the run did not evaluate what it began with.

    Raises:
        UserError: there is nothing to compare with.
    """
    required = dict(minima)
    former = standing.get(METRIC)
    if candidate.former is not None:
        former = candidate.former.manifest.scalars[METRIC]
    if former is not None:
        required[METRIC] = max(former, required.get(METRIC, former))
    if not required:
        remedy = "was evaluated alone, without the policy that the run began with; give --min"
        raise UserError("version", candidate.checkpoint.version, remedy)
    return required


def check_results(evaluation: Entry, minima: Mapping[str, float]) -> None:
    """Raise UserError unless the results of an evaluation reach the minima, metric → value."""
    results = evaluation.manifest.scalars
    for metric, minimum in minima.items():
        if metric not in results:
            remedy = f"is not a figure of {evaluation.key}, which has {', '.join(results)}"
            raise UserError("--min", metric, remedy)
        # Not `<`: a result that is no number reaches nothing.
        if not results[metric] >= minimum:
            remedy = f"is not reached by {evaluation.key}: {results[metric]:g}"
            raise UserError("--min", f"{metric}={minimum:g}", remedy)
