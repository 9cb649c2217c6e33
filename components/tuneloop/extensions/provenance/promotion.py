"""Promotion of a version by a person: a name for it, if its evaluation reaches minima.

Here it is chosen which evaluation of the version decides. The comparison with the minima, the audit
and the record are in `runs/promotions.py`, where schedules promote, too (`promote_result`), with
the former policy's reward as a further minimum.
"""

from collections.abc import Mapping
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.extensions.provenance.questions import find_artifact
from tuneloop.runs.committed import Entry
from tuneloop.runs.promotions import check_results, promote_entry
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run


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
    # Before the audit, which reads all files of the run.
    check_results(evaluation, minima)
    return promote_entry(run, entry, evaluation, name, minima)


def _find_evaluation(run: Run, version: int, entry: Entry, minima: Mapping[str, float]) -> Entry:
    """Find the newest evaluation of a checkpoint, of those with all metrics if there are any."""
    evaluations = run.list_evaluations(entry)
    if not evaluations:
        remedy = f"was not evaluated by {run.name} (loop.evaluate_every does)"
        raise UserError("VERSION", version, remedy)
    # An evaluation of another kind, which may be newer, measures other things.
    complete = [e for e in evaluations if minima.keys() <= e.manifest.scalars.keys()]
    return (complete or evaluations)[-1]
