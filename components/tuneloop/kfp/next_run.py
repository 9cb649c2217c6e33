"""The next run of a loop that goes on: the run of a task once more, with the same name, pipeline and parameters.

Its stages are committed, so that it goes on with the iteration that is not. A task that is tried again finds the run
that it has started.
"""

from __future__ import annotations

from tuneloop.kfp.api import RunApi

KEPT = (
    *("display_name", "description", "experiment_id", "pipeline_spec", "pipeline_version_reference"),
    *("runtime_config", "service_account"),
)
"""What a run is made of; the other fields of its message say how it went."""


def start_next_run(api: RunApi, run_id: str) -> str:
    """Start a run like the run `run_id`, unless one of its name has been started after it.

    Returns:
        the id of the newer run.
    """
    own = api.read_run(run_id)
    newest = api.list_runs(own["experiment_id"], own["display_name"])[0]
    if newest["run_id"] != run_id and newest["created_at"] > own["created_at"]:
        return str(newest["run_id"])
    return api.start_run({name: own[name] for name in KEPT if name in own})
