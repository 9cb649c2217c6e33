"""Run a pipeline again when its data has changed.

`create_schedule` uploads it, and creates a recurring run of another pipeline, whose task makes the
prompts again and starts the first one if they are new (`tuneloop.kfp.check_data`). The scheduled
time cannot name a run: KFP leaves ``[[ScheduledTime]]`` in parameters as it is
(kubeflow/pipelines#12494).
"""

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
"""The stage whose prompts tell whether there is new data, as the command of its task names it
(`template.py: stage_component`). Only this stage is known here and in `check_data.py`."""
DESCRIPTIONS = {
    "run_id": "of the tick",
    "api": "address of the KFP API, as pods reach it",
    "schedule": "name of the schedule",
    "store": "URL of the store",
    "pipeline_id": "of the pipeline to start",
    "pipeline_version_id": "of the pipeline to start",
    "data": "parameters of the stage data_prep",
}
"""Parameter of the recurring run's task → description.

`build_data_check` declares each as a text, but for ``data``. `create_schedule` gives values to all
but ``run_id`` and ``api``, which `build_data_check` passes; `check_data.py` reads them. An existing
schedule keeps the values with which it was created.
"""


def create_schedule(
    client: Any,
    pipeline: Any,
    config: PipelineConfig,
    *,
    name: str,
    store: str,
    cron: str,
    root: str | None = None,
    experiment: str = EXPERIMENT,
) -> str:
    """Check for new data at given times, one check at a time and none for times that were missed.

    Args:
        client: of the backend.
        pipeline: what runs when there is new data.
        config: its settings.
        name: of the schedule; its runs are named ``<name>-<first 8 digits of the prompts' digest>``.
        store: the URL of the store, as pods reach it.
        cron: the times, in five fields.
        root: where KFP has handles and previews; by default the backend's.
        experiment: what lists the runs.

    Returns:
        The id of the recurring run.

    Raises:
        UserError: `cron` has another number of fields, `name` is invalid or that of another
            schedule, or the pipeline has no stage `data_prep`.
    """
    check_schedule_name(name)
    fields = convert_cron(cron)
    with translate_api_errors(name):
        if client.list_recurring_runs(filter=match_name(name)).recurring_runs:
            remedy = (
                f"is a schedule already: `tuneloop kfp unschedule {name}` it first, "
                "or choose another name"
            )
            raise UserError("--name", name, remedy)
    with compiled_package(pipeline) as package:
        documents = yaml.load_all(Path(package).read_text(), yaml.CSafeLoader)
        # The first document is the pipeline, the second its platform's settings.
        data = find_data_parameters(next(documents), name)
        with translate_api_errors(name):
            version = _upload(client, package, name)
    arguments: JsonObject = {"schedule": name, "store": store, "data": data}
    arguments |= version
    data_check = build_data_check(config, arguments)
    with compiled_package(data_check) as package, translate_api_errors(name):
        recurring_run = client.create_recurring_run(
            client.create_experiment(experiment).experiment_id,
            name,
            cron_expression=fields,
            max_concurrency=1,
            no_catchup=True,
            pipeline_package_path=package,
            pipeline_root=root,
        )
    return str(recurring_run.recurring_run_id)


def delete_schedule(client: Any, name: str) -> None:
    """Delete the recurring runs of a name, but neither pipeline nor runs. Raises UserError if there
    is none.
    """
    with translate_api_errors(name):
        recurring_runs = client.list_recurring_runs(filter=match_name(name)).recurring_runs or []
        if not recurring_runs:
            raise UserError("schedule", name, "no recurring run of that name")
        for recurring_run in recurring_runs:
            client.delete_recurring_run(recurring_run.recurring_run_id)


def convert_cron(cron: str) -> str:
    """Convert five cron fields to KFP's six, which begin with the seconds. Raises UserError for
    another number of fields.
    """
    if len(cron.split()) != 5:
        remedy = "write five fields, as in '0 3 * * *': minute, hour, day, month, day of week"
        raise UserError("--cron", cron, remedy)
    return f"0 {cron}"


def build_data_check(config: PipelineConfig, arguments: JsonMapping) -> Any:
    """Build the pipeline of the recurring run.

    Args:
        config: settings of the pipeline that it starts, for the image and the task's pod.
        arguments: of its task, as `DESCRIPTIONS` lists them, without ``run_id`` and ``api``.
    """
    kinds: JsonObject = dict.fromkeys(DESCRIPTIONS, str)
    kinds["data"] = dict
    kinds["done"] = dsl.OutputPath(str)
    summary = "Start a run where the data is new."
    step = define_uncached_step(
        "check_data", summary, kinds, DESCRIPTIONS, config.cluster, config.kfp
    )

    def check_data():  # type: ignore[no-untyped-def]  # kfp would read an annotation as an output
        """Look for new data, and start the pipeline if there is any."""
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        step("check-data", run_id=run_id, api=config.kfp.api, **arguments)

    return dsl.pipeline(name=f"{arguments['schedule']}-tick")(check_data)


def find_data_parameters(spec: JsonMapping, name: str) -> JsonObject:
    """Return the parameters of a compiled pipeline's stage `data_prep`.

    Args:
        spec: the compiled pipeline, a message ``PipelineSpec``.
        name: what messages call it.

    Raises:
        UserError: it has no such stage.
    """
    task = _find_data_task(spec)
    if task is None:
        remedy = "has no stage data_prep, whose prompts show whether there is new data"
        raise UserError("pipeline", name, remedy)
    parameters: JsonObject = {}
    for key, source in task["inputs"]["parameters"].items():
        # The first task of a run gives the URL of the output, and what is set for the run: here
        # that is nothing, since the run is started with the compiled settings.
        if key != "url" and "runtimeValue" in source:
            parameters[key] = source["runtimeValue"]["constant"]
    return parameters


def _find_data_task(spec: JsonMapping) -> JsonObject | None:
    """Find the task of `data_prep` in the graphs of a compiled pipeline."""
    executors = spec["deploymentSpec"]["executors"]
    graphs: list[JsonObject] = [spec["root"]]
    graphs += spec["components"].values()
    for graph in graphs:
        for task in graph.get("dag", {}).get("tasks", {}).values():
            # A component without an executor is a graph.
            component = spec["components"][task["componentRef"]["name"]]
            executor = executors.get(component.get("executorLabel"), {})
            if DATA_PREP in executor.get("container", {}).get("command", ()):
                data_task: JsonObject = task
                return data_task
    return None


def _upload(client: Any, package: str, name: str) -> dict[str, str]:
    """Upload a version of the pipeline `name`, unless it has been; return its ids."""
    # Equal settings compile to equal bytes.
    version = f"{name}-{xxhash.xxh3_64_hexdigest(Path(package).read_bytes())}"
    # kfp prints links to its UI.
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        pipeline_id = client.get_pipeline_id(name)
        if not pipeline_id:
            pipeline_id = client.upload_pipeline(package, name).pipeline_id
        page = client.list_pipeline_versions(pipeline_id, filter=match_name(version))
        versions = page.pipeline_versions or []
        if not versions:
            versions = [client.upload_pipeline_version(package, version, pipeline_id)]
    return {"pipeline_id": pipeline_id, "pipeline_version_id": versions[0].pipeline_version_id}
