"""Describe the progress of a run on Kubeflow Pipelines, for `tuneloop.ui.describe.describe_state`."""

from dataclasses import replace
from typing import Any

from tuneloop.kfp.client import find_run, list_tasks
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import StageStatus, list_stages

PHASES = {
    "PENDING": "Pending",
    "PAUSED": "Pending",
    "RUNNING": "Running",
    "CANCELING": "Running",
    "SUCCEEDED": "Succeeded",
    "SKIPPED": "Skipped",
    "FAILED": "Failed",
    "CANCELED": "Failed",
}
"""KFP's states of a run and of its tasks → those that Argo has for them."""


def describe_progress(client: Any, run: Run) -> dict[str, Any]:
    """Describe a run's progress: its phase, and the stages that it has committed or that are tasks of KFP. Raises
    UserError if there is no run of that name, Retryable if the API does not answer."""
    found = find_run(client, run.name)
    stages = {stage.stage: stage for stage in list_stages(run)}
    for task in list_tasks(found):
        phase = PHASES.get(task.state, "Pending")
        known = stages.get(task.name, StageStatus(task.name, phase, seconds=task.seconds))
        stages[task.name] = replace(known, phase=phase, message=task.error)
    said = [
        (found.error and found.error.message) or "",
        "canceled" if found.state == "CANCELED" else "",
    ]
    phase = PHASES.get(found.state, "Pending").lower()
    return {"phase": phase, "message": "; ".join(filter(None, said)), "stages": [*stages.values()]}
