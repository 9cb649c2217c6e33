"""Run a pipeline again when its data has changed: checked at scheduled times, by the digest of its prompts.

`schedule` creates a WorkflowTemplate (the pipeline) and a CronWorkflow, which only checks the data: it makes the
prompts again, compares their digest by this module as its last step, and keeps nothing. A run is named ``<name>-<first
8 digits of the prompts' digest>``, so that new data starts a new run, data of a finished run is skipped, and a failed
run is resumed. Nothing starts while a run is active, however many workflows it consists of."""

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from zoneinfo import ZoneInfo

from tuneloop.argo.jobset import check_names
from tuneloop.argo.pod_fields import OUTPUTS, SCRATCH
from tuneloop.cluster import submit as argo
from tuneloop.cluster.preflight import check_cluster
from tuneloop.cluster.run_workflows import DONE, as_template, get_workflow_phase, prepare_workflow
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
KEPT = 10
"""Output of a check's last step, which says what it did; how many successful and failed checks are kept."""


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
    """Create or change the schedule `name`; active runs keep the settings with which they were started. `workflow` is
    a pipeline with a stage `data_prep`; `timezone` is that of `cron`, such as Europe/Prague, by default the
    controller's, mostly UTC. Raises UserError without such a stage, time or zone, if the name is too long or is used by
    another object, or if `preflight.check_cluster` refuses the workflow."""
    check_schedule_name(name)
    check_cron(cron)
    if timezone:
        check_timezone(timezone)
    made = prepare_workflow(
        workflow, run=name, store=store, namespace=cluster.namespace, priority=priority
    )
    check_names(made, f"{name}-{'0' * DIGITS}")
    look = build_data_check_spec(made, name)
    check_cluster(cluster, made)
    when = {"schedules": [cron], **({"timezone": timezone} if timezone else {})}
    limits = {
        "concurrencyPolicy": "Forbid",
        "successfulJobsHistoryLimit": KEPT,
        "failedJobsHistoryLimit": KEPT,
    }
    spec = {**when, **limits, "startingDeadlineSeconds": 300, "workflowSpec": look}
    spec["workflowMetadata"] = {"labels": {LABEL: name}}
    specs = {"WorkflowTemplate": template_spec(made, name), "CronWorkflow": spec}
    for kind in specs:
        _standing(cluster, kind, name)
    for kind, wanted in specs.items():
        _apply(cluster, kind, name, wanted)


def template_spec(workflow: JsonMapping, name: str) -> JsonObject:
    """Build the spec of the WorkflowTemplate of schedule `name`."""
    spec: JsonObject = as_template(workflow, name)["spec"]
    # The newest run that succeeded records that its data is finished.
    spec.get("ttlStrategy", {}).pop("secondsAfterSuccess", None)
    return spec


def delete_schedule(cluster: Connection, name: str) -> None:
    """Delete the schedule `name`, but not its runs. Raises UserError if there is no such schedule."""
    standing = {
        kind: _standing(cluster, kind, name) for kind in ("CronWorkflow", "WorkflowTemplate")
    }
    if not any(standing.values()):
        raise UserError("schedule", name, f"does not exist in namespace {cluster.namespace}")
    for kind in standing:
        cluster.delete(*KINDS[kind], name)


def list_schedules(cluster: Connection) -> list[JsonObject]:
    """List the schedules of the namespace: their `name`, `cron`, `last` scheduled time, and `looks` (checks), newest
    first; `message` says why the controller starts none. It does not record a time that it skips during a check."""
    looks = cluster.list(*WORKFLOWS, selector=f"{LABEL},!{RUN_LABEL}")[::-1]
    found = []
    for each in cluster.list(*CRON, selector=LABEL):
        name = each["metadata"]["name"]
        spec = each["spec"]
        status = each.get("status", {})
        when = " ".join(filter(None, [*spec["schedules"], spec.get("timezone")]))
        wrong = [
            condition.get("message", condition["type"])
            for condition in status.get("conditions") or ()
        ]
        told = {"message": "; ".join(["suspended"] * spec.get("suspend", False) + wrong)}
        mine = [_read_look(look) for look in looks if labels_of(look)[LABEL] == name]
        found.append(
            {
                "name": name,
                "cron": when,
                "last": status.get("lastScheduledTime"),
                **told,
                "looks": mine,
            }
        )
    return found


def _read_look(workflow: JsonMapping) -> dict[str, str]:
    """Read when a workflow checked for new data, its phase, and what it did or why it failed."""
    pods = [node for node in read_nodes(workflow).values() if node.type == "Pod"]
    said = [
        node.outputs.get(SAID) or node.message
        for node in pods
        if node.template == "start" or node.phase in BROKEN
    ]
    phase = get_workflow_phase(workflow)
    return {
        "time": workflow["metadata"]["creationTimestamp"],
        "phase": phase,
        "said": said[-1] if said else "",
    }


def _standing(cluster: Connection, kind: str, name: str) -> JsonObject | None:
    """Return the object of a schedule, or None. Raises UserError for an object that no schedule created."""
    found = cluster.find(*KINDS[kind], name)
    if found is not None and labels_of(found).get(LABEL) != name:
        remedy = f"is a {kind} of namespace {cluster.namespace} that no schedule made; choose another name"
        raise UserError("schedule", name, remedy)
    return found


def build_data_check_spec(workflow: JsonMapping, name: str) -> JsonObject:
    """Build the spec of the workflow that checks for new data, with the settings of `workflow`."""
    spec = copy.deepcopy(workflow["spec"])
    data = next(
        (
            t
            for t in spec["templates"]
            if "tuneloop.stages.data_prep" in t.get("container", {}).get("command", ())
        ),
        None,
    )
    if data is None:
        raise UserError(
            "pipeline", name, "has no stage data_prep, whose prompts show whether there is new data"
        )
    tasks = (task for t in spec["templates"] for task in t.get("dag", {}).get("tasks", ()))
    task = dict(next(task for task in tasks if task["template"] == data["name"]))
    given = [p for p in task["arguments"]["parameters"] if p["name"] != "prompts"]
    task["arguments"] = {
        "parameters": [*given, {"name": "prompts", "value": f"file://{SCRATCH}/prompts"}]
    }
    task.pop("depends", None)
    ref = "{{tasks.%s.outputs.parameters.prompts}}" % task["name"]
    start = {"name": "start", "template": "start", "depends": task["name"]}
    start["arguments"] = {"parameters": [{"name": "prompts", "value": ref}]}
    main = {"name": "main", "dag": {"tasks": [task, start]}}
    spec["podMetadata"]["labels"].pop(RUN_LABEL)
    spec.pop("onExit", None)  # it reserves no claim
    spec.pop("ttlStrategy", None)  # the newest are kept
    return {**spec, "entrypoint": "main", "templates": [data, _start(data), main]}


def _start(data: JsonMapping) -> JsonObject:
    """Build the step that starts a run: a pod like that of `data`, with the right to create workflows."""
    own = ["--name", "{{workflow.labels.%s}}" % LABEL, "--namespace", "{{workflow.namespace}}"]
    store = [
        "--store",
        "{{workflow.parameters.store}}",
        "--prompts",
        "{{inputs.parameters.prompts}}",
    ]
    command = {"command": ["python", "-m", "tuneloop.cluster.schedule"], "args": [*own, *store]}
    return {
        **data,
        "name": "start",
        "inputs": {"parameters": [{"name": "prompts"}]},
        "outputs": {
            "parameters": [
                {"name": SAID, "valueFrom": {"path": f"{OUTPUTS}/{SAID}", "default": ""}}
            ]
        },
        "serviceAccountName": "tuneloop-continue",
        "automountServiceAccountToken": True,
        "container": {**data["container"], **command},
    }


def _apply(cluster: Connection, kind: str, name: str, spec: JsonMapping) -> None:
    """Create the object, or replace the spec of the existing one."""
    group, version, plural = KINDS[kind]
    body: JsonObject = {"apiVersion": f"{group}/{version}", "kind": kind}
    body |= {"metadata": {"name": name, "labels": {LABEL: name}}, "spec": spec}
    while standing := _standing(cluster, kind, name):
        body["metadata"]["resourceVersion"] = standing["metadata"]["resourceVersion"]
        with ignore_refusals(409):  # the controller has just written its status
            cluster.custom.replace_namespaced_custom_object(
                group, version, cluster.namespace, plural, name, body
            )
            return
    cluster.create(group, version, plural, body)


def start_scheduled_run(cluster: Connection, name: str, store: str, prompts: str) -> str:
    """Start the run of these prompts unless it has succeeded or one is under way; return a line that says which."""
    digest = split_ref(prompts)[1]
    assert digest, prompts
    run = f"{name}-{digest.partition(':')[2][:DIGITS]}"
    mine = [
        w
        for w in cluster.list(*WORKFLOWS, selector=LABEL + "=" + name)
        if RUN_LABEL in labels_of(w)
    ]
    if active := [labels_of(w)[RUN_LABEL] for w in mine if get_workflow_phase(w) not in DONE]:
        return f"skipped: {active[-1]} is under way"
    same = [w for w in mine if labels_of(w)[RUN_LABEL] == run]
    if same and get_workflow_phase(same[-1]) == "Succeeded":
        return f"skipped: no new data since {run}"
    parameters = [{"name": "run", "value": run}, {"name": "store", "value": store}]
    spec = {
        "workflowTemplateRef": {"name": name},
        "entrypoint": "main",
        "arguments": {"parameters": parameters},
    }
    metadata = {"labels": {RUN_LABEL: run, LABEL: name}}
    body = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": metadata,
        "spec": spec,
    }
    return f"started {argo.create_workflow(cluster, body, run)}"


_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_NAMES = {7: "sun mon tue wed thu fri sat", 12: "jan feb mar apr may jun jul aug sep oct nov dec"}
_ITEM = re.compile(r"(\*|\w+(?:-\w+)?)(?:/(\d+))?")


def check_cron(text: str) -> None:
    """Check the time of a CronWorkflow, as the controller reports a bad one only in a status. Raises UserError."""
    if re.fullmatch(
        r"@(yearly|annually|monthly|weekly|daily|midnight|hourly)|@every \d+[smh]", text
    ):
        return
    fields = text.split()
    if len(fields) != 5:
        raise UserError(
            "--cron", text, "write five fields (minute hour day month weekday), as in '0 3 * * *'"
        )
    for field, (low, high) in zip(fields, _RANGES):
        for item in field.split(","):
            match = _ITEM.fullmatch(item)
            ends = match[1].split("-") if match and match[1] != "*" else []
            if match is None or not all(_within(end, low, high) for end in ends):
                told = f"{field!r} is not a list of numbers from {low} to {high}, ranges or steps"
                raise UserError("--cron", text, told)


def check_timezone(name: str) -> None:
    """Check a time zone, as `check_cron` a time. Raises UserError where this machine does not know its name."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # OSError: a directory of zones, as Europe is
        raise UserError(
            "--timezone", name, "is not a time zone; write it as in Europe/Prague or UTC"
        ) from None


def _within(end: str, low: int, high: int) -> bool:
    return low <= int(end) <= high if end.isdigit() else end.lower() in _NAMES.get(high, "").split()


@report_errors
def main(argv: Sequence[str]) -> int:
    """Start a run for the data that the checking workflow has found."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.schedule")
    for flag in ("--name", "--namespace", "--store", "--prompts"):
        parser.add_argument(flag, required=True)
    given = parser.parse_args(argv)
    said = start_scheduled_run(
        connect_to_cluster(given.namespace), given.name, given.store, given.prompts
    )
    print(said)
    write_outputs({SAID: said})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
