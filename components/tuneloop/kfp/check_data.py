"""The task of a schedule's recurring run: ``python -m tuneloop.kfp.check_data --executor-input …``

It makes the prompts again and starts the run named after their digest, by the rule of `tuneloop.cluster.schedule`: a
successful run is not repeated, a failed one is resumed, and none starts while another is active."""

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


def start_scheduled_run(api: RunApi, own: JsonMapping, digest: str, wanted: JsonMapping) -> str:
    """Start the run of the prompts with `digest`, unless it has succeeded or a run of the schedule is active; return a
    line that says which. `own` is the recurring run itself; `wanted` has ``schedule``, ``store``, ``pipeline_id`` and
    ``pipeline_version_id``. Raises Interrupted if `own` is being stopped."""
    schedule = wanted["schedule"]
    name = f"{schedule}-{digest.partition(':')[2][:DIGITS]}"
    pattern = re.compile(rf"{re.escape(schedule)}-[0-9a-f]{{{DIGITS}}}")
    listed = api.list_runs(own["experiment_id"], f"{schedule}-", part=True)
    mine = [run for run in listed if pattern.fullmatch(run["display_name"])]
    if active := [run["display_name"] for run in mine if run.get("state") not in DONE]:
        return f"skipped: {active[0]} is under way"
    newest = next((run for run in mine if run["display_name"] == name), None)
    if newest and newest["state"] == "SUCCEEDED":
        return f"skipped: no new data since {name}"
    refuse_stopped_run(own)
    root = own.get("runtime_config", {}).get("pipeline_root")
    config: JsonObject = {"parameters": {"run": name, "store": wanted["store"]}}
    version = {key: wanted[key] for key in ("pipeline_id", "pipeline_version_id")}
    run_id = api.start_run(
        {
            "display_name": name,
            "experiment_id": own["experiment_id"],
            "pipeline_version_reference": version,
            "runtime_config": {**config, **({"pipeline_root": root} if root else {})},
            **{key: own[key] for key in ("service_account",) if own.get(key)},
        }
    )
    return f"started {name} as {run_id}"


def main(argv: Sequence[str]) -> int:
    """Run as a program."""
    task = Task.read(argv[1])
    given = task.parameters
    flags = [
        word
        for k, v in given["data"].items()
        for word in (f"--{to_kebab_case(k)}", encode_parameter(v))
    ]

    @report_errors
    def start_run() -> int:
        api = RunApi(given["api"])
        manifest = find_manifest(url)
        assert manifest is not None, "the stage has just committed it"
        line = start_scheduled_run(api, api.read_run(given["run_id"]), manifest.digest, given)
        print(line, file=sys.stderr)
        task.results = {"done": line}
        return 0

    with tempfile.TemporaryDirectory() as scratch:
        url = f"file://{scratch}/prompts"
        code = retry_in_process(lambda: data_prep.run([*flags, "--prompts", url]), str)
        code = code or retry_in_process(start_run, str)
    if code == 0:
        task.finish()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
