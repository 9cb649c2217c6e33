"""Run a pipeline at scheduled times: each time, or when its data has changed, by the digest of its
prompts.

`schedule` creates a WorkflowTemplate (the pipeline) and a CronWorkflow, which only starts runs.
Where the data decides, it first makes the prompts again, compares their digest by this module as
its last step, and keeps nothing. A run is named ``<name>-<first 8 digits of the prompts' digest>``,
so that new data starts a new run, data of a finished run is skipped, and a failed run is resumed.
Where the time decides, a run is named ``<name>-<date>-<time>``. Nothing starts while a run is
active, however many workflows it consists of.

A schedule may be a line, whose runs go on from one another: before a run starts, the result of the
last one is promoted under the schedule's name if it is good enough (`tuneloop.runs.promotions`),
and the new run begins with what was promoted last.

`_build_start` renders the last step of a check: its flags are parsed by `main`, and its account
``tuneloop-continue`` has the rights of ``manifests/namespaced/accounts.yaml``. Schedules of
Kubeflow Pipelines have a program of their own, which repeats the rule of `start_scheduled_run`
(`kfp/schedule.py`, `kfp/check_data.py`). What is created is in `tests/golden/schedules`.
"""

import argparse
import copy
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
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
from tuneloop.core.store import Store
from tuneloop.formats.promotions import find_newest, read_history
from tuneloop.kube.connection import WORKFLOWS, Connection, connect_to_cluster, ignore_refusals
from tuneloop.local.journal import BROKEN
from tuneloop.runs.promotions import parse_minima, promote_result
from tuneloop.runs.records import DIGITS, check_schedule_name
from tuneloop.runs.run_record import Run
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
BASE = "base-model"
"""The parameter of the workflows of a line: the base model of the run."""
TIME = "%Y%m%d-%H%M"
"""The form of the time in the name of a run. It must not have `DIGITS` characters (`is_digest`)."""
LONGEST_TIMED = 26
"""The maximum length of the name of a schedule whose runs have the time in theirs: the 40
characters of a run's name (`runs/records.py: NAME`), without the 13 of `TIME` and a dash."""


@dataclass(frozen=True)
class Trigger:
    """What a schedule does at its times.

    Attributes:
        is_timed: it starts a run each time; else only where the data is new.
        minima: metric → value that a result has to reach before the next run begins with it; None:
            each run begins with the model of the settings.
    """

    is_timed: bool = False
    minima: Mapping[str, float] | None = None


def apply_schedule(
    cluster: Connection,
    workflow: JsonMapping,
    *,
    name: str,
    store: str,
    cron: str,
    timezone: str | None = None,
    priority: str | None = None,
    trigger: Trigger = Trigger(),
) -> None:
    """Create or change the schedule `name`; active runs keep the settings with which they started.

    Args:
        cluster: with the namespace of the runs.
        workflow: a rendered pipeline; with a stage `data_prep` if the data decides, and with a stage
            `base_model` if its runs go on from one another.
        name: of the schedule, with which the names of its runs begin.
        store: where the runs commit artifacts.
        cron: when the data is checked, in five fields.
        timezone: that of `cron`, such as Europe/Prague; None: the controller's, mostly UTC.
        priority: the priority class of the runs' queued stages.
        trigger: what is done at these times.

    Raises:
        UserError: the pipeline has no such stage, the time or the zone is wrong, the name is too
            long or is used by another object, or `preflight.check_cluster` refuses the workflow.
    """
    check_schedule_name(name)
    check_cron(cron)
    prepared = prepare_workflow(
        workflow, run=name, store=store, namespace=cluster.namespace, priority=priority
    )
    suffix = "0" * DIGITS
    if trigger.is_timed:
        suffix = datetime.min.strftime(TIME)
        if len(name) > LONGEST_TIMED:
            remedy = f"is too long for a schedule by the time: at most {LONGEST_TIMED} characters"
            raise UserError("--name", name, remedy)
    check_names(prepared, f"{name}-{suffix}")
    check_spec = build_check_spec(prepared, name, trigger)
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
    new_template = template_spec(prepared, name)
    if trigger.minima is not None:
        take_base_model(new_template, name)
    specs = {"WorkflowTemplate": new_template, "CronWorkflow": spec}
    # Neither is changed if one of the two names is taken.
    for kind in specs:
        _find_object(cluster, kind, name)
    for kind, new_spec in specs.items():
        _apply(cluster, kind, name, new_spec)


def template_spec(workflow: JsonMapping, name: str) -> JsonObject:
    """Build the spec of the WorkflowTemplate of schedule `name`."""
    # `cluster/drift.py: template_drift` builds the same spec to compare it with the live one.
    spec: JsonObject = as_template(workflow, name)["spec"]
    # The newest run that succeeded records that its data is finished.
    spec.get("ttlStrategy", {}).pop("secondsAfterSuccess", None)
    return spec


def take_base_model(spec: JsonObject, name: str) -> None:
    """Let the stage `base_model` of a WorkflowTemplate's spec take its model from a parameter, whose
    default is the one that was rendered. The stage is found by its module in the command, and the
    model by the flag ``--model``.

    Raises:
        UserError: the pipeline has no such stage.
    """
    for template in spec["templates"]:
        container = template.get("container", {})
        if "tuneloop.stages.base_model" not in container.get("command", ()):
            continue
        arguments = container["args"]
        position = arguments.index("--model") + 1
        parameter = {"name": BASE, "value": arguments[position]}
        spec["arguments"]["parameters"].append(parameter)
        arguments[position] = "{{workflow.parameters.%s}}" % BASE
        return
    remedy = "has no stage base_model: its runs cannot go on from one another"
    raise UserError("pipeline", name, remedy)


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
        These are the keys of ``cluster schedules --json`` (docs/commands.md), and so are those of a
        check (`_read_check`).
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


def build_check_spec(workflow: JsonMapping, name: str, trigger: Trigger = Trigger()) -> JsonObject:
    """Build the spec of the workflow that starts runs of `workflow`, after a check for new data if
    the data decides.

    It is the spec of `workflow` with other templates: whatever else a run has, such as locks and
    volumes, a check has, too, unless it is taken out here.

    Raises:
        UserError: the pipeline has no stage `data_prep`.
    """
    spec: JsonObject = copy.deepcopy(workflow["spec"])
    data = _find_data_template(spec, name)
    templates: list[JsonObject] = []
    tasks: list[JsonObject] = []
    if not trigger.is_timed:
        templates.append(data)
        tasks.append(_build_data_task(spec, data))
    start_template = _build_start(data, trigger)
    start_task: JsonObject = {"name": "start", "template": "start"}
    if not trigger.is_timed:
        data_task = tasks[0]["name"]
        reference = "{{tasks.%s.outputs.parameters.prompts}}" % data_task
        start_task["depends"] = data_task
        start_task["arguments"] = {"parameters": [{"name": "prompts", "value": reference}]}
    tasks.append(start_task)
    main = {"name": "main", "dag": {"tasks": tasks}}
    # A check is no run, so it has neither the label, nor a reservation that an exit handler
    # releases; the newest checks are kept, whatever their age.
    spec["podMetadata"]["labels"].pop(RUN_LABEL)
    spec.pop("onExit", None)
    spec.pop("ttlStrategy", None)
    spec["entrypoint"] = "main"
    spec["templates"] = [*templates, start_template, main]
    return spec


def _build_data_task(spec: JsonMapping, data: JsonMapping) -> JsonObject:
    """Build the task that makes the prompts again, on the pod's own disk."""
    tasks = [task for item in spec["templates"] for task in item.get("dag", {}).get("tasks", ())]
    task = dict(next(task for task in tasks if task["template"] == data["name"]))
    parameters = [item for item in task["arguments"]["parameters"] if item["name"] != "prompts"]
    # The prompts go to the pod's own disk: only their digest is of interest.
    parameters.append({"name": "prompts", "value": f"file://{SCRATCH}/prompts"})
    task["arguments"] = {"parameters": parameters}
    task.pop("depends", None)
    return task


def _find_data_template(spec: JsonMapping, name: str) -> JsonObject:
    """Return the template of the stage `data_prep`. Raises UserError if there is none."""
    for template in spec["templates"]:
        if "tuneloop.stages.data_prep" in template.get("container", {}).get("command", ()):
            return dict(template)
    remedy = (
        "has no stage data_prep, whose prompts show whether there is new data, and whose pod is the "
        "model of a schedule's own"
    )
    raise UserError("pipeline", name, remedy)


def _build_start(data: JsonMapping, trigger: Trigger) -> JsonObject:
    """Build the step that starts a run: a pod like that of `data`, with the right to create
    workflows.
    """
    inputs: JsonObject = {}
    arguments = [
        "--name",
        "{{workflow.labels.%s}}" % LABEL,
        "--namespace",
        "{{workflow.namespace}}",
        "--store",
        "{{workflow.parameters.store}}",
    ]
    if trigger.is_timed:
        arguments += ["--time", "{{workflow.creationTimestamp.RFC3339}}"]
    else:
        inputs = {"parameters": [{"name": "prompts"}]}
        arguments += ["--prompts", "{{inputs.parameters.prompts}}"]
    if trigger.minima is not None:
        arguments.append("--promote")
        for metric, minimum in trigger.minima.items():
            arguments += ["--min", f"{metric}={minimum!r}"]
    container = dict(data["container"])
    container["command"] = ["python", "-m", "tuneloop.cluster.schedule"]
    container["args"] = arguments
    # The default is for a step that failed before it had something to say.
    result = {"name": SAID, "valueFrom": {"path": f"{OUTPUTS}/{SAID}", "default": ""}}
    return {
        **data,
        "name": "start",
        "inputs": inputs,
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


def start_scheduled_run(
    cluster: Connection,
    name: str,
    store: str,
    suffix: str,
    minima: Mapping[str, float] | None = None,
) -> str:
    """Start the run ``<name>-<suffix>`` unless it has succeeded or another one is under way.

    Args:
        cluster: with the namespace of the schedule.
        name: of the schedule.
        store: where its runs commit artifacts.
        suffix: of the run: what makes it another run than those before.
        minima: metric → value that the last result has to reach; None: runs do not go on from one
            another.

    Returns:
        A line that says what was done.
    """
    run = f"{name}-{suffix}"
    succeeded = ""
    previous: JsonObject | None = None
    for workflow in cluster.list(*WORKFLOWS, selector=f"{LABEL}={name}"):
        workflow_run = labels_of(workflow).get(RUN_LABEL)
        if workflow_run is None:
            # This check, or an earlier one.
            continue
        phase = get_workflow_phase(workflow)
        if phase not in DONE:
            return f"skipped: {workflow_run} is under way"
        if phase == "Succeeded":
            succeeded = workflow_run
        if workflow_run == run:
            previous = workflow
    results: list[str] = []
    if succeeded and minima is not None:
        # Also where no run follows now: whoever asks for what was promoted gets the last good one.
        results.append(promote_result(Run(succeeded, store), name, minima))
    if previous is not None and get_workflow_phase(previous) == "Succeeded":
        reason = "no new data since" if is_digest(suffix) else "there is"
        results.append(f"skipped: {reason} {run}")
    else:
        parameters = [{"name": "run", "value": run}, {"name": "store", "value": store}]
        if minima is not None:
            parameters += find_base_model(name, store, previous)
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
        results.append(f"started {create_workflow(cluster, body, run)}")
    return "; ".join(filter(None, results))


def find_base_model(name: str, store: str, previous: JsonMapping | None) -> list[dict[str, str]]:
    """Return the parameter with the base model of a run: what was promoted last as `name`.

    A run that is resumed begins with the same as its `previous` workflow. Without a promotion there
    is no parameter, and the model of the settings is taken.
    """
    if previous is not None:
        parameters = previous["spec"].get("arguments", {}).get("parameters", ())
        return [parameter for parameter in parameters if parameter["name"] == BASE]
    history, _ = read_history(Store(store))
    promotion = find_newest(history, name)
    return [{"name": BASE, "value": promotion["ref"]}] if promotion else []


def is_digest(suffix: str) -> bool:
    """Return whether the end of a run's name is the digest of its data, and not a time."""
    return len(suffix) == DIGITS


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
    """Start a run for the time, or for the data that the checking workflow has found."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.schedule")
    for flag in ("--name", "--namespace", "--store"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--prompts")
    parser.add_argument("--time")
    parser.add_argument("--promote", action="store_true")
    parser.add_argument("--min", action="append", default=[])
    options = parser.parse_args(argv)
    cluster = connect_to_cluster(options.namespace)
    if options.time:
        suffix = datetime.fromisoformat(options.time).strftime(TIME)
    else:
        _, digest = split_ref(options.prompts)
        assert digest, options.prompts
        suffix = digest.removeprefix("sha256:")[:DIGITS]
    minima = parse_minima(options.min) if options.promote else None
    result = start_scheduled_run(cluster, options.name, options.store, suffix, minima)
    print(result)
    write_outputs({SAID: result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
