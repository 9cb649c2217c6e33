"""Run a pipeline again when its data has changed: `create_schedule` uploads it, and creates a recurring run of another
pipeline, whose task makes the prompts again and starts the first one if they are new (`tuneloop.kfp.check_data`). The
scheduled time cannot name a run: KFP leaves ``[[ScheduledTime]]`` in parameters as it is (kubeflow/pipelines#12494)."""

import contextlib
import os
from pathlib import Path
from typing import Any

import xxhash
import yaml
from kfp import dsl

from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.api import match_name
from tuneloop.kfp.client import EXPERIMENT, compiled_package, translate_api_errors
from tuneloop.kfp.template import define_uncached_step
from tuneloop.runs.records import check_schedule_name

DATA_PREP = "tuneloop.stages.data_prep:data_prep"
ABOUT = {
    "run_id": "of the tick",
    "api": "address of the KFP API, as pods reach it",
    "schedule": "name of the schedule",
    "store": "URL of the store",
    "pipeline_id": "of the pipeline to start",
    "pipeline_version_id": "of the pipeline to start",
    "data": "parameters of the stage data_prep",
}


def create_schedule(
    client: Any,
    built: Any,
    config: PipelineConfig,
    *,
    name: str,
    store: str,
    cron: str,
    root: str | None = None,
    experiment: str = EXPERIMENT,
) -> str:
    """Check for new data at the times of `cron` (five fields), one check at a time and none for times that were missed;
    runs are named ``<name>-<first 8 digits of the prompts' digest>``. Raises UserError for another number of fields, an
    invalid name, a name that another schedule has, and a pipeline without the stage `data_prep`."""
    check_schedule_name(name)
    fields = convert_cron(cron)
    with translate_api_errors(name):
        if client.list_recurring_runs(filter=match_name(name)).recurring_runs:
            remedy = f"is a schedule already: `tuneloop kfp unschedule {name}` it first, or choose another name"
            raise UserError("--name", name, remedy)
    with compiled_package(built) as package:
        data = find_data_parameters(
            next(yaml.load_all(Path(package).read_text(), yaml.CSafeLoader)), name
        )
        with translate_api_errors(name):
            version = _upload(client, package, name)
    given = {"schedule": name, "store": store, **version, "data": data}
    with compiled_package(build_data_check(config, given)) as package, translate_api_errors(name):
        made = client.create_recurring_run(
            client.create_experiment(experiment).experiment_id,
            name,
            cron_expression=fields,
            max_concurrency=1,
            no_catchup=True,
            pipeline_package_path=package,
            pipeline_root=root,
        )
    return str(made.recurring_run_id)


def delete_schedule(client: Any, name: str) -> None:
    """Delete the recurring runs of a name, but neither pipeline nor runs. Raises UserError where there is none."""
    with translate_api_errors(name):
        found = client.list_recurring_runs(filter=match_name(name)).recurring_runs or []
        if not found:
            raise UserError("schedule", name, "no recurring run of that name")
        for each in found:
            client.delete_recurring_run(each.recurring_run_id)


def convert_cron(cron: str) -> str:
    """Convert five cron fields to KFP's six, which begin with the seconds. Raises UserError at other than five."""
    if len(cron.split()) != 5:
        raise UserError(
            "--cron",
            cron,
            "write five fields, as in '0 3 * * *': minute, hour, day, month, day of week",
        )
    return f"0 {cron}"


def build_data_check(config: PipelineConfig, given: JsonMapping) -> Any:
    """Return the pipeline of the recurring run."""
    kinds = {
        **{name: dict if name == "data" else str for name in ABOUT},
        "done": dsl.OutputPath(str),
    }
    summary = "Start a run where the data is new."
    step = define_uncached_step("check_data", summary, kinds, ABOUT, config.cluster, config.kfp)

    def check_data():  # type: ignore[no-untyped-def]  # kfp would read an annotation as an output
        """Look for new data, and start the pipeline if there is any."""
        step("check-data", run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, api=config.kfp.api, **given)

    return dsl.pipeline(name=f"{given['schedule']}-tick")(check_data)


def find_data_parameters(spec: JsonMapping, name: str) -> JsonObject:
    """Return the parameters of a compiled pipeline's stage `data_prep`. Raises UserError where it has no such stage."""
    executors = spec["deploymentSpec"]["executors"]
    labels = {
        label
        for label, each in executors.items()
        if DATA_PREP in each["container"].get("command", ())
    }
    components = {
        k for k, each in spec["components"].items() if each.get("executorLabel") in labels
    }
    graphs = [spec["root"], *spec["components"].values()]
    tasks = [task for graph in graphs for task in graph.get("dag", {}).get("tasks", {}).values()]
    task = next((each for each in tasks if each["componentRef"]["name"] in components), None)
    if task is None:
        raise UserError(
            "pipeline", name, "has no stage data_prep, whose prompts show whether there is new data"
        )
    defaults = {
        k: v.get("defaultValue") for k, v in spec["root"]["inputDefinitions"]["parameters"].items()
    }
    found = {}
    for key, source in task["inputs"]["parameters"].items():
        channel = source.get("componentInputParameter", "").removeprefix("pipelinechannel--")
        found[key] = (
            source["runtimeValue"]["constant"]
            if "runtimeValue" in source
            else defaults.get(channel)
        )
    return {
        key: value
        for key, value in found.items()
        if key != "url" and not key.startswith("pipelinechannel--")
    }


def _upload(client: Any, package: str, name: str) -> dict[str, str]:
    """Upload a version of the pipeline `name`, unless it has been; return its ids."""
    version = f"{name}-{xxhash.xxh3_64_hexdigest(Path(package).read_bytes())}"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # kfp prints links
        pipeline_id = (
            client.get_pipeline_id(name) or client.upload_pipeline(package, name).pipeline_id
        )
        known = client.list_pipeline_versions(
            pipeline_id, filter=match_name(version)
        ).pipeline_versions
        made = known[0] if known else client.upload_pipeline_version(package, version, pipeline_id)
    return {"pipeline_id": pipeline_id, "pipeline_version_id": made.pipeline_version_id}
