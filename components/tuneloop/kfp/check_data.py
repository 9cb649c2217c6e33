"""The task of a schedule's recurring run: ``python -m tuneloop.kfp.check_data --executor-input …``

It makes the prompts again and starts the run named after their digest, by the rule of
`tuneloop.cluster.schedule`: a successful run is not repeated, a failed one is resumed (a new run of
KFP with the same name goes on with its artifacts), and none starts while another is active.

`kfp/schedule.py: DESCRIPTIONS` declares the parameters of this task, and `create_schedule` there
fills them in: a parameter that is read here has to be added there. It looks at the artifact of
`data_prep` alone, whatever else the pipeline reads. Its tests are in
`tests/unit/kfp/test_client.py`.
"""

import re
import sys
import tempfile
from collections.abc import Sequence

from tuneloop.core.artifacts import find_manifest
from tuneloop.core.errors import report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import to_kebab_case
from tuneloop.kfp.api import DONE, RunApi, refuse_stopped_run
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import encode_parameter
from tuneloop.runs.records import DIGITS
from tuneloop.stages.data_prep import data_prep


def start_scheduled_run(api: RunApi, tick: JsonMapping, digest: str, schedule: JsonMapping) -> str:
    """Start the run of the prompts with `digest`, unless it has succeeded or a run of the schedule
    is active.

    Args:
        api: of the backend that the task runs on.
        tick: the API's message of the run that the recurring run has started now, with this task.
        digest: of the prompts, ``sha256:…``.
        schedule: has ``schedule`` (its name), ``store``, ``pipeline_id`` and
            ``pipeline_version_id``.

    Returns:
        A line that says what was started, or why nothing was.

    Raises:
        Interrupted: that run is being stopped.
    """
    prefix = schedule["schedule"]
    name = f"{prefix}-{digest.partition(':')[2][:DIGITS]}"
    # The API matches parts of names, so it also lists runs of a schedule whose name is longer.
    pattern = re.compile(rf"{re.escape(prefix)}-[0-9a-f]{{{DIGITS}}}")
    experiment_id = tick["experiment_id"]
    candidates = api.list_runs(experiment_id, f"{prefix}-", part=True)
    runs = [run for run in candidates if pattern.fullmatch(run["display_name"])]
    for run in runs:
        if run.get("state") not in DONE:
            return f"skipped: {run['display_name']} is under way"
    # The list begins with the newest, so an earlier failure does not hide a success.
    newest = next((run for run in runs if run["display_name"] == name), None)
    if newest and newest["state"] == "SUCCEEDED":
        return f"skipped: no new data since {name}"
    refuse_stopped_run(tick)
    config: JsonObject = {"parameters": {"run": name, "store": schedule["store"]}}
    root = tick.get("runtime_config", {}).get("pipeline_root")
    if root:
        config["pipeline_root"] = root
    request: JsonObject = {
        "display_name": name,
        "experiment_id": experiment_id,
        "pipeline_version_reference": {
            "pipeline_id": schedule["pipeline_id"],
            "pipeline_version_id": schedule["pipeline_version_id"],
        },
        "runtime_config": config,
    }
    if tick.get("service_account"):
        request["service_account"] = tick["service_account"]
    run_id = api.start_run(request)
    return f"started {name} as {run_id}"


def main(argv: Sequence[str]) -> int:
    """Make the prompts, and start a run if they are new; return the exit code."""
    task = Task.read(argv[1])
    parameters = task.parameters
    flags: list[str] = []
    for name, value in parameters["data"].items():
        flags += [f"--{to_kebab_case(name)}", encode_parameter(value)]

    @report_errors
    def start_run() -> int:
        api = RunApi(parameters["api"])
        manifest = find_manifest(url)
        assert manifest is not None, "the stage has just committed it"
        tick = api.read_run(parameters["run_id"])
        line = start_scheduled_run(api, tick, manifest.digest, parameters)
        print(line, file=sys.stderr)
        task.results = {"done": line}
        return 0

    # Only the digest is of use: the run that is started makes the prompts in the store.
    with tempfile.TemporaryDirectory() as scratch:
        url = f"file://{scratch}/prompts"
        flags += ["--prompts", url]
        code = retry_in_process(lambda: data_prep.run(flags), str)
        if code == 0:
            code = retry_in_process(start_run, str)
    if code == 0:
        task.finish()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
