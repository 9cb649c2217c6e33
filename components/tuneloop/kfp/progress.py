"""Describe the progress of a run on Kubeflow Pipelines, for
`tuneloop.ui.describe.describe_state`.

`cli/kfp.py: connect_to_executor` passes it on to ``tuneloop watch --kfp`` and ``tuneloop ui
--kfp``. Its tests are in `tests/unit/kfp/test_client.py`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tuneloop.kfp.client import find_run, list_tasks
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import StageStatus, list_stages

if TYPE_CHECKING:
    from tuneloop.ui.describe import Progress

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
"""KFP's states of a run and of its tasks → those that Argo has for them.

In lower case they are phases of a run, and `cli/watch.py: CODES` says which of them end a watch. An
unknown state counts as ``Pending``, so that its run is watched on.
"""


def describe_progress(client: Any, run: Run) -> "Progress":
    """Describe a run's progress: its phase, and the stages that it has committed or that are tasks
    of KFP.

    Raises:
        UserError: there is no run of that name.
        Retryable: the API does not answer.
    """
    record = find_run(client, run.name)
    stages = {stage.stage: stage for stage in list_stages(run)}
    for task in list_tasks(record):
        phase = PHASES.get(task.phase, "Pending")
        # A committed stage has more to tell than its task: the artifact, and its own seconds.
        stage = stages.get(task.task) or StageStatus(task.task, phase, seconds=task.seconds)
        stages[task.task] = replace(stage, phase=phase, message=task.message)
    messages: list[str] = []
    if record.error and record.error.message:
        messages.append(record.error.message)
    # Argo has no phase for it: a canceled run has failed.
    if record.state == "CANCELED":
        messages.append("canceled")
    return {
        "phase": PHASES.get(record.state, "Pending").lower(),
        "message": "; ".join(messages),
        "stages": list(stages.values()),
    }
