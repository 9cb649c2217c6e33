"""The next run of a loop that goes on: the run of a task once more, with the same name, pipeline and parameters.

Its stages are committed, so that it goes on with the iteration that is not. A task that is tried again finds the run
that it has started.
"""

from collections.abc import Mapping
from typing import Any

from tuneloop.core.errors import Interrupted
from tuneloop.kfp.api import RunApi

KEPT = (
    *("display_name", "description", "experiment_id", "pipeline_spec", "pipeline_version_reference"),
    *("runtime_config", "service_account"),
)
"""What a run is made of; the other fields of its message say how it went."""


def find_newer_run(api: RunApi, run: Mapping[str, Any]) -> str | None:
    """Return the id of the newest run with the name of `run`, if it was started after it."""
    newest = api.list_runs(run["experiment_id"], run["display_name"])[0]
    return str(newest["run_id"]) if newest["created_at"] > run["created_at"] else None


def start_next_run(api: RunApi, run_id: str) -> str:
    """Start a run like the run `run_id`, unless one of its name has been started after it.

    Returns:
        the id of the newer run.

    Raises:
        Interrupted: somebody is stopping the run.
    """
    own = api.read_run(run_id)
    if newer := find_newer_run(api, own):
        return newer
    refuse_stopped_run(own)
    return api.start_run({name: own[name] for name in KEPT if name in own})


def refuse_stopped_run(run: Mapping[str, Any]) -> None:
    """Raise Interrupted if somebody is stopping a run: nothing follows it."""
    if run.get("state") in ("CANCELING", "CANCELED"):
        raise Interrupted(f"run {run['run_id']} is being stopped: it does not go on")
