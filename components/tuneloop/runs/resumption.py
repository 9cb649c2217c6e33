"""Whether a run of this machine may be continued, and under which settings.

`run` and `resume` ask it before they execute (`cli/execute.py`). For a run on a cluster
`cluster/submit.py: check_resubmission` has the same rule: both change together.
"""

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import local_path
from tuneloop.runs.completeness import describe_missing, list_missing
from tuneloop.runs.records import find_differences
from tuneloop.runs.run_record import Run


def find_changed_settings(
    run: Run,
    pipeline: str,
    config: JsonObject,
    store: str,
) -> list[str]:
    """Compare settings with those that a run was started with, and return the keys that differ.

    Before the first iteration of its loop has committed a version, a failed run may be continued
    with other settings: the stages refuse those that do not fit their committed outputs. After
    that, a change could leave iterations behind that are no longer part of the run.

    Args:
        run: it was started on this machine.
        pipeline: the name of the pipeline.
        config: all settings, resolved.
        store: its normalized URL.

    Raises:
        UserError: the run's name stands for another run.
    """
    record = run.record
    assert record
    requested = {"pipeline": pipeline, "store": store} | config
    recorded = {"pipeline": record.pipeline, "store": record.store} | record.config
    changed = find_differences(requested, recorded)
    has_version = any(checkpoint.iteration for checkpoint in run.checkpoints)
    is_final = has_version or run.origin or run.phase in ("running", "succeeded")
    if changed and (is_final or "pipeline" in changed or "store" in changed):
        keys = ", ".join(changed[:5])
        raise UserError(
            "--run",
            run.name,
            f"exists with another {keys}; `tuneloop resume {run.name}` continues it; or choose"
            " another name",
        )
    return changed


def check_resumable(run: Run) -> None:
    """Check that a run of this machine may be continued; a finished run only if it is complete.

    Raises:
        UserError: its store was moved, it is running, or artifacts of a finished run are missing.
    """
    assert run.record
    store_path = local_path(run.record.store)
    if store_path and store_path.resolve() != run.directory.parent.resolve():
        raise UserError(
            "run", run.name, f"was begun in {store_path}, and goes on there alone: move it back"
        )
    if run.phase == "running":
        raise UserError(
            "run",
            run.name,
            f"is running; see `tuneloop status {run.name}`, or `tuneloop stop` it first",
        )
    missing = list_missing(run) if run.phase == "succeeded" else []
    if missing:
        raise UserError(
            "run",
            run.name,
            f"has succeeded, but {describe_missing(missing)} in {run.url} is missing; restore it"
            " from a copy, or delete the run and run it again under this name",
        )
