"""The name of a run in the store, where KFP's UI has started it without one."""

from tuneloop.core.json_types import JsonMapping
from tuneloop.runs.records import SCHEDULE_LENGTH

DIGITS = 8
"""The number of digits of KFP's id of the run that are in its name.

With another number, a run that is retried in newer images gets another name, and begins anew.
"""


def name_run(parameters: JsonMapping) -> str:
    """Return the name of a run.

    `configure.py` and `report.py` ask it in their tasks, with the parameters that `pipeline.py:
    build_pipeline` passes to both (`identity` there). Other tasks get the URL that `configure.py`
    makes of the name.

    Args:
        parameters: of a task: ``run``, the name that was chosen; else ``pipeline`` and ``run_id``,
            from which it is made. So a run that is retried keeps its name, and each run of a
            recurring one has its own.
    """
    # A run that another one continues has the name of the first as its parameter.
    if parameters["run"]:
        return str(parameters["run"])
    # As long as the name of a schedule, whose runs have as many digits.
    pipeline = str(parameters["pipeline"])[:SCHEDULE_LENGTH].rstrip("-")
    run_id = str(parameters["run_id"])
    return f"{pipeline}-{run_id.replace('-', '')[:DIGITS]}"
