"""Run a pipeline again when its data has changed: checked at scheduled times, by the digest of its
prompts.

`schedule` creates a WorkflowTemplate (the pipeline) and a CronWorkflow, which only checks the data:
it makes the prompts again, compares their digest by this module as its last step, and keeps
nothing. A run is named ``<name>-<first 8 digits of the prompts' digest>``, so that new data starts
a new run, data of a finished run is skipped, and a failed run is resumed. Nothing starts while a
run is active, however many workflows it consists of.
"""

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from zoneinfo import ZoneInfo

from tuneloop.argo.jobset import check_names
from tuneloop.argo.pod_fields import OUTPUTS, SCRATCH
from tuneloop.cluster.preflight import check_cluster
from tuneloop.cluster.run_workflows import DONE, as_template, get_workflow_phase, prepare_workflow
from tuneloop.cluster.submit import create_workflow
from tuneloop.cluster.watch import read_nodes
from tuneloop.core.artifacts import split_ref
from tuneloop.core.errors import UserError, report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import write_outputs
from tuneloop.kube.connection import WORKFLOWS, Connection, connect_to_cluster, ignore_refusals
from tuneloop.local.journal import BROKEN
from tuneloop.runs.records import DIGITS, check_schedule_name
from tuneloop.workflow.manifest import labels_of
from tuneloop.workflow.settings import RUN_LABEL

LABEL = "tuneloop.dev/schedule"
CRON = ("argoproj.io", "v1alpha1", "cronworkflows")
TEMPLATES = ("argoproj.io", "v1alpha1", "workflowtemplates")
KINDS = {"WorkflowTemplate": TEMPLATES, "CronWorkflow": CRON}
SAID = "said"
"""Output of a check's last step, which says what it did."""
KEPT = 10
"""How many successful and failed checks are kept."""


def apply_schedule(
    cluster: Connection,
    workflow: JsonMapping,
    *,
    name: str,
    store: str,
    cron: str,
    timezone: str | None = None,
    priority: str | None = None,
) -> None:
    """Create or change the schedule `name`; active runs keep the settings with which they started.

    Args:
        cluster: with the namespace of the runs.
        workflow: a rendered pipeline with a stage `data_prep`.
        name: of the schedule, with which the names of its runs begin.
        store: where the runs commit artifacts.
        cron: when the data is checked, in five fields.
        timezone: that of `cron`, such as Europe/Prague; None: the controller's, mostly UTC.
        priority: the priority class of the runs' queued stages.

    Raises:
        UserError: the pipeline has no such stage, the time or the zone is wrong, the name is too
            long or is used by another object, or `preflight.check_cluster` refuses the workflow.
    """
    check_schedule_name(name)
    check_cron(cron)
    prepared = prepare_workflow(
        workflow, run=name, store=store, namespace=cluster.namespace, priority=priority
    )
    check_names(prepared, f"{name}-{'0' * DIGITS}")
    check_spec = build_data_check_spec(prepared, name)
    spec: JsonObject = {
        "schedules": [cron],
        "concurrencyPolicy": "Forbid",
        "successfulJobsHistoryLimit": KEPT,
        "failedJobsHistoryLimit": KEPT,
        "startingDeadlineSeconds": 300,
        "workflowSpec": check_spec,
        "workflowMetadata": {"labels": {LABEL: name}},
    }
    if timezone:
        check_timezone(timezone)
        spec["timezone"] = timezone
    check_cluster(cluster, prepared)
    specs = {"WorkflowTemplate": template_spec(prepared, name), "CronWorkflow": spec}
    # Neither is changed if one of the two names is taken.
    for kind in specs:
        _find_object(cluster, kind, name)
    for kind, new_spec in specs.items():
        _apply(cluster, kind, name, new_spec)


def template_spec(workflow: JsonMapping, name: str) -> JsonObject:
    """Build the spec of the WorkflowTemplate of schedule `name`."""
    spec: JsonObject = as_template(workflow, name)["spec"]
    # The newest run that succeeded records that its data is finished.
    spec.get("ttlStrategy", {}).pop("secondsAfterSuccess", None)
    return spec


def delete_schedule(cluster: Connection, name: str) -> None:
    """Delete the schedule `name`, but not its runs.

    Raises:
        UserError: there is no such schedule.
    """
    objects = [_find_object(cluster, kind, name) for kind in KINDS]
    if not any(objects):
        raise UserError("schedule", name, f"does not exist in namespace {cluster.namespace}")
    # The CronWorkflow first: it would start checks without a template.
    for api in (CRON, TEMPLATES):
        cluster.delete(*api, name)


def list_schedules(cluster: Connection) -> list[JsonObject]:
    """List the schedules of the namespace.

    Returns:
        Their `name`, `cron`, `last` scheduled time, and `looks` (checks), newest first; `message`
        says why the controller starts none. It does not record a time that it skips during a check.
    """
    # Checks have the label of their schedule, and unlike runs, none of a run.
    checks = cluster.list(*WORKFLOWS, selector=f"{LABEL},!{RUN_LABEL}")
    checks.reverse()
    schedules: list[JsonObject] = []
    for item in cluster.list(*CRON, selector=LABEL):
        name = item["metadata"]["name"]
        spec = item["spec"]
        status = item.get("status", {})
        cron = " ".join(spec["schedules"])
        if spec.get("timezone"):
            cron += f" {spec['timezone']}"
        problems = ["suspended"] if spec.get("suspend") else []
        for condition in status.get("conditions") or ():
            problems.append(condition.get("message", condition["type"]))
        schedule = {
            "name": name,
            "cron": cron,
            "last": status.get("lastScheduledTime"),
            "message": "; ".join(problems),
            "looks": [_read_check(check) for check in checks if labels_of(check)[LABEL] == name],
        }
        schedules.append(schedule)
    return schedules


def _read_check(workflow: JsonMapping) -> dict[str, str]:
    """Read when a workflow checked for new data, its phase, and what it did or why it failed."""
    result = ""
    for node in read_nodes(workflow).values():
        if node.type == "Pod" and (node.template == "start" or node.phase in BROKEN):
            result = node.outputs.get(SAID) or node.message
    return {
        "time": workflow["metadata"]["creationTimestamp"],
        "phase": get_workflow_phase(workflow),
        "said": result,
    }


def _find_object(cluster: Connection, kind: str, name: str) -> JsonObject | None:
    """Return the object of a schedule, or None.

    Raises:
        UserError: the name is used by an object that no schedule created.
    """
    item = cluster.find(*KINDS[kind], name)
    if item is not None and labels_of(item).get(LABEL) != name:
        raise UserError(
            "schedule",
            name,
            f"is a {kind} of namespace {cluster.namespace} that no schedule made; choose another"
            " name",
        )
    return item


def build_data_check_spec(workflow: JsonMapping, name: str) -> JsonObject:
    """Build the spec of the workflow that checks for new data, with the settings of `workflow`.

    Raises:
        UserError: the pipeline has no stage `data_prep`.
    """
    spec = copy.deepcopy(workflow["spec"])
    data = _find_data_template(spec, name)
    tasks = [task for item in spec["templates"] for task in item.get("dag", {}).get("tasks", ())]
    task = dict(next(task for task in tasks if task["template"] == data["name"]))
    parameters = [item for item in task["arguments"]["parameters"] if item["name"] != "prompts"]
    # The prompts go to the pod's own disk: only their digest is of interest.
    parameters.append({"name": "prompts", "value": f"file://{SCRATCH}/prompts"})
    task["arguments"] = {"parameters": parameters}
    task.pop("depends", None)
    reference = "{{tasks.%s.outputs.parameters.prompts}}" % task["name"]
    start = {
        "name": "start",
        "template": "start",
        "depends": task["name"],
        "arguments": {"parameters": [{"name": "prompts", "value": reference}]},
    }
    main = {"name": "main", "dag": {"tasks": [task, start]}}
    # A check is no run, so it has neither the label, nor a reservation that an exit handler
    # releases; the newest checks are kept, whatever their age.
    spec["podMetadata"]["labels"].pop(RUN_LABEL)
    spec.pop("onExit", None)
    spec.pop("ttlStrategy", None)
    spec["entrypoint"] = "main"
    spec["templates"] = [data, _build_start(data), main]
    checked: JsonObject = spec
    return checked


def _find_data_template(spec: JsonMapping, name: str) -> JsonObject:
    """Return the template of the stage `data_prep`. Raises UserError if there is none."""
    for template in spec["templates"]:
        if "tuneloop.stages.data_prep" in template.get("container", {}).get("command", ()):
            return dict(template)
    raise UserError(
        "pipeline", name, "has no stage data_prep, whose prompts show whether there is new data"
    )


def _build_start(data: JsonMapping) -> JsonObject:
    """Build the step that starts a run: a pod like that of `data`, with the right to create
    workflows.
    """
    container = dict(data["container"])
    container["command"] = ["python", "-m", "tuneloop.cluster.schedule"]
    container["args"] = [
        "--name",
        "{{workflow.labels.%s}}" % LABEL,
        "--namespace",
        "{{workflow.namespace}}",
        "--store",
        "{{workflow.parameters.store}}",
        "--prompts",
        "{{inputs.parameters.prompts}}",
    ]
    # The default is for a step that failed before it had something to say.
    result = {"name": SAID, "valueFrom": {"path": f"{OUTPUTS}/{SAID}", "default": ""}}
    return {
        **data,
        "name": "start",
        "inputs": {"parameters": [{"name": "prompts"}]},
        "outputs": {"parameters": [result]},
        "serviceAccountName": "tuneloop-continue",
        "automountServiceAccountToken": True,
        "container": container,
    }


def _apply(cluster: Connection, kind: str, name: str, spec: JsonMapping) -> None:
    """Create the object, or replace the spec of the existing one."""
    group, version, plural = KINDS[kind]
    metadata: JsonObject = {"name": name, "labels": {LABEL: name}}
    body: JsonObject = {
        "apiVersion": f"{group}/{version}",
        "kind": kind,
        "metadata": metadata,
        "spec": spec,
    }
    while True:
        existing = _find_object(cluster, kind, name)
        if existing is None:
            break
        metadata["resourceVersion"] = existing["metadata"]["resourceVersion"]
        # A conflict: the controller has just written its status.
        with ignore_refusals(409):
            cluster.custom.replace_namespaced_custom_object(
                group, version, cluster.namespace, plural, name, body
            )
            return
    cluster.create(group, version, plural, body)


def start_scheduled_run(cluster: Connection, name: str, store: str, prompts: str) -> str:
    """Start the run of these prompts unless it has succeeded or one is under way.

    Args:
        cluster: with the namespace of the schedule.
        name: of the schedule.
        store: where its runs commit artifacts.
        prompts: the reference of the artifact, ``URL@digest``.

    Returns:
        A line that says what was done.
    """
    _, digest = split_ref(prompts)
    assert digest, prompts
    run = f"{name}-{digest.removeprefix('sha256:')[:DIGITS]}"
    newest_phase = ""
    for workflow in cluster.list(*WORKFLOWS, selector=f"{LABEL}={name}"):
        workflow_run = labels_of(workflow).get(RUN_LABEL)
        if workflow_run is None:
            # This check, or an earlier one.
            continue
        phase = get_workflow_phase(workflow)
        if phase not in DONE:
            return f"skipped: {workflow_run} is under way"
        if workflow_run == run:
            newest_phase = phase
    if newest_phase == "Succeeded":
        return f"skipped: no new data since {run}"
    parameters = [{"name": "run", "value": run}, {"name": "store", "value": store}]
    body = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"labels": {RUN_LABEL: run, LABEL: name}},
        "spec": {
            "workflowTemplateRef": {"name": name},
            "entrypoint": "main",
            "arguments": {"parameters": parameters},
        },
    }
    return f"started {create_workflow(cluster, body, run)}"


_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
"""The limits of minute, hour, day, month and weekday; 0 and 7 are Sunday."""
_NAMES = {7: "sun mon tue wed thu fri sat", 12: "jan feb mar apr may jun jul aug sep oct nov dec"}
_ITEM = re.compile(r"(\*|\w+(?:-\w+)?)(?:/(\d+))?")


def check_cron(text: str) -> None:
    """Check the time of a CronWorkflow, as the controller reports a bad one only in a status.

    Raises:
        UserError: it is neither a name such as ``@daily``, nor five fields.
    """
    names = "yearly|annually|monthly|weekly|daily|midnight|hourly"
    if re.fullmatch(rf"@({names})|@every \d+[smh]", text):
        return
    fields = text.split()
    if len(fields) != len(_RANGES):
        raise UserError(
            "--cron", text, "write five fields (minute hour day month weekday), as in '0 3 * * *'"
        )
    for field, (low, high) in zip(fields, _RANGES):
        if not all(_is_item(item, low, high) for item in field.split(",")):
            remedy = f"{field!r} is not a list of numbers from {low} to {high}, ranges or steps"
            raise UserError("--cron", text, remedy)


def _is_item(item: str, low: int, high: int) -> bool:
    """Return whether an item of a field is a star, number, name or range, perhaps with a step."""
    match = _ITEM.fullmatch(item)
    if match is None:
        return False
    if match[1] == "*":
        return True
    return all(_is_within(end, low, high) for end in match[1].split("-"))


def _is_within(end: str, low: int, high: int) -> bool:
    """Return whether a number, or the name of a month or weekday, is within the limits."""
    if end.isdigit():
        return low <= int(end) <= high
    return end.lower() in _NAMES.get(high, "").split()


def check_timezone(name: str) -> None:
    """Check a time zone, as `check_cron` a time.

    Raises:
        UserError: this machine does not know its name.
    """
    try:
        ZoneInfo(name)
    # OSError: a directory of zones, as Europe is.
    except (KeyError, ValueError, OSError):
        raise UserError(
            "--timezone", name, "is not a time zone; write it as in Europe/Prague or UTC"
        ) from None


@report_errors
def main(argv: Sequence[str]) -> int:
    """Start a run for the data that the checking workflow has found."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.schedule")
    for flag in ("--name", "--namespace", "--store", "--prompts"):
        parser.add_argument(flag, required=True)
    options = parser.parse_args(argv)
    cluster = connect_to_cluster(options.namespace)
    result = start_scheduled_run(cluster, options.name, options.store, options.prompts)
    print(result)
    write_outputs({SAID: result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
