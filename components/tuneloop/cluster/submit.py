"""Send a workflow to a cluster and end it, through the Kubernetes API alone: no Argo server is needed. A run is all
workflows that carry its label: the first one, those that resumed it, and those of a long loop. What goes wrong is one
line (`UserError`, `Retryable`), whatever the client library raised."""

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from types import SimpleNamespace

from tuneloop.cluster import run_workflows
from tuneloop.cluster.launch import KINDS
from tuneloop.cluster.reservations import end_graphs, release_ended_runs
from tuneloop.cluster.run_workflows import (
    DONE,
    find_workflows,
    get_workflow_number,
    get_workflow_phase,
    list_workflows,
)
from tuneloop.cluster.watch import read_nodes
from tuneloop.core.artifacts import dump_canonical_json
from tuneloop.core.component import find_component
from tuneloop.core.errors import Retryable, UserError, choose_exit_code, print_diagnostic
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import to_kebab_case
from tuneloop.core.store import normalize_url
from tuneloop.inference.generate import input_identity
from tuneloop.kube.connection import (
    OWNER,
    WORKFLOWS,
    Connection,
    ignore_refusals,
    retry_until_available,
    wait_until,
)
from tuneloop.runs.records import find_differences
from tuneloop.sharing.lease_storage import release_leases
from tuneloop.workflow.manifest import effective_spec, mounts_token
from tuneloop.workflow.pod_loop import expand_pod, find_pod
from tuneloop.workflow.rendered_stages import read_loop
from tuneloop.workflow.settings import DELETE_DELAY, RUN_LABEL, TOKEN_KEY, TOKEN_SECRET

FORGOTTEN_S = 900.0
"""Seconds after which Argo's controller has deleted a successful pod (`DELETE_DELAY`), unless the controller restarted
after the workflow's end: its queue of deletions is only in memory, and it does not process ended workflows again."""
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"


def create_workflow(cluster: Connection, made: JsonMapping, run: str) -> str:
    """Create a prepared workflow, and return its name. An ended run is resumed: committed stages end at once, and a
    long loop continues at its newest workflow. Raises UserError as `prepare_resumption`, or if the name is taken."""
    made, at = prepare_resumption(made, list_workflows(cluster, run), run)
    return create_numbered(cluster, made, run, at) if at > 1 else _create(cluster, made, run)


def prepare_resumption(
    made: JsonMapping, earlier: Sequence[JsonMapping], run: str
) -> tuple[JsonMapping, int]:
    """Return `made` as the workflow that follows the `earlier` ones of its run, and its number. Raises UserError if one
    of these is active, or the run has another pipeline or store, or after the first version, other settings."""
    if active := [w["metadata"]["name"] for w in earlier if get_workflow_phase(w) not in DONE]:
        remedy = f"is under way as workflow {active[0]}; `tuneloop cluster stop` it, or choose another name"
        raise UserError("run", run, remedy)
    if not earlier:
        return made, 1
    check_resumable(made, earlier, run)
    numbers = [get_workflow_number(run, workflow["metadata"]["name"]) for workflow in earlier]
    return run_workflows.copy_entrypoint(made, earlier[-1]), max(numbers) + 1


def check_resumable(made: JsonMapping, earlier: Sequence[JsonMapping], run: str) -> None:
    """Refuse a workflow that does not fit the run whose `earlier` workflows, oldest first, are given. Raises UserError
    for another pipeline or store, and for other settings, unless the run failed before its loop made a version. Then
    they may be corrected, as with `tuneloop run`: stages refuse settings that differ from their committed outputs. The
    pods' requests, and settings that no stage compares with its output (addresses, timeouts), may always change."""
    before = {k: v for each in earlier for k, v in _settings(each).items()}
    asked = {k: v for k, v in _settings(made).items() if k in before}
    differing = find_differences(asked, {k: before[k] for k in asked})
    begun = any(
        get_workflow_phase(each) not in ("Failed", "Error") or _has_made_a_version(each)
        for each in earlier
    )
    elsewhere = [name for name in ("pipeline", "store") if name in differing]
    if elsewhere or (differing and begun):
        what = ", ".join(elsewhere or differing[:5])
        raise UserError(
            "--run", run, f"exists with another {what}; submit it as it was, or choose another name"
        )


def _settings(workflow: JsonMapping) -> JsonObject:
    """Collect the settings that affect a run's results: its pipeline, its parameters, and those of each stage."""
    spec = effective_spec(workflow)
    given = {
        p["name"]: p["value"]
        for p in spec.get("arguments", {}).get("parameters", ())
        if "value" in p
    }
    if "store" in given:
        given["store"] = normalize_url(given["store"])
    pipeline = spec.get("podMetadata", {}).get("labels", {}).get("app.kubernetes.io/name")
    templates = expand_pod({"spec": {**spec, "templates": spec.get("templates") or []}})[0]["spec"][
        "templates"
    ]
    stages = {t["name"]: _tracked(t) for t in templates if _is_stage(t)}
    return {**({"pipeline": pipeline} if pipeline else {}), **given, **stages}


def _tracked(template: JsonMapping) -> dict[str, str]:
    """Return the flags that a stage compares with those of its committed output; all if it is not installed here."""
    command = template["container"]["command"]
    words = [str(word) for word in template["container"].get("args", ())]
    flags = {
        name.removeprefix("--"): value
        for name, value in itertools.pairwise(words)
        if name.startswith("--")
    }
    component = find_component(command[-1], template["name"]) if "-m" in command else None
    if component is None:
        return flags
    untracked = {*map(to_kebab_case, component.untracked)}
    flags = {name: value for name, value in flags.items() if name not in untracked}
    if component.identity is input_identity and "engine-args" in flags:
        asked = input_identity(SimpleNamespace(engine_args=json.loads(flags["engine-args"])))
        flags["engine-args"] = dump_canonical_json(asked)
    return flags


def _is_stage(template: JsonMapping) -> bool:
    """Return whether a template runs a stage, not a server or a step that only calls the cluster's API."""
    command = (template.get("container") or {}).get("command", ())
    return (
        bool(command)
        and not template.get("daemon")
        and not any("tuneloop.cluster" in word for word in command)
    )


def _has_made_a_version(workflow: JsonMapping) -> bool:
    spec = effective_spec(workflow)
    made = {name for name, role in read_loop({"spec": spec}).items() if role == "trainer"}
    made |= {pod["name"]} if (pod := find_pod({"spec": spec})) else set()
    return any(
        node.template in made and node.phase == "Succeeded"
        for node in read_nodes(workflow).values()
    )


def create_numbered(cluster: Connection, made: JsonMapping, run: str, at: int) -> str:
    """Create ``<run>-<at>``, or use the next free number; a workflow that follows the same one is not created again."""
    while True:
        name = f"{run}-{at}"
        with ignore_refusals(409):
            return _create(cluster, made, name)
        found = cluster.get(*WORKFLOWS, name)
        own, there = (
            (w["metadata"].get("annotations") or {}).get(run_workflows.CONTINUES)
            for w in (made, found)
        )
        if own and there == own:
            _create_token(cluster, found)
            return name
        at += 1


def _create(cluster: Connection, made: JsonMapping, name: str) -> str:
    created = cluster.create(*WORKFLOWS, {**made, "metadata": {**made["metadata"], "name": name}})
    try:
        _create_token(cluster, created)
    except (UserError, Retryable):  # it would run without
        with contextlib.suppress(UserError, Retryable):
            cluster.delete(*WORKFLOWS, name)
        raise
    return name


def _create_token(cluster: Connection, workflow: JsonMapping) -> None:
    """Create the token of a workflow's rollout servers, as a Secret that the workflow owns, unless it exists."""
    spec = workflow["spec"]
    name = workflow["metadata"]["name"]
    uid = workflow["metadata"]["uid"]
    if not mounts_token(spec):
        return
    metadata: JsonObject = {"name": TOKEN_SECRET.replace("{{workflow.uid}}", uid)}
    metadata["ownerReferences"] = [{**OWNER, "name": name, "uid": uid}]
    with ignore_refusals(409):
        token = {"metadata": metadata, "stringData": {TOKEN_KEY: secrets.token_urlsafe(32)}}
        cluster.core.create_namespaced_secret(cluster.namespace, token)


def stop_run(cluster: Connection, run: str, *, timeout: float = 120.0) -> int:
    """Stop a run: its stages commit their resume points; its jobs, pods, graphs, reservations and leases are released.
    Return the number of active workflows. Raises Retryable if they do not end in `timeout` seconds."""
    stopped: set[str] = set()

    def ended() -> bool:
        active = {
            w["metadata"]["name"]
            for w in find_workflows(cluster, run)
            if get_workflow_phase(w) not in DONE
        }
        for name in active - stopped:  # it may just be creating the workflow that continues it
            cluster.custom.patch_namespaced_custom_object(
                *WORKFLOWS[:2],
                cluster.namespace,
                WORKFLOWS[2],
                name,
                {"spec": {"shutdown": "Stop"}},
            )
            stopped.add(name)
        return not active

    wait_until(ended, timeout, f"{run}: workflow did not end")
    selector = f"{RUN_LABEL}={run}"
    live = ("Pending", "Running")
    how = {
        "label_selector": selector,
        "propagation_policy": "Background",
    }  # a Job would leave its pods
    for kind in KINDS.values():  # jobs of several pods outlive the step that started them
        with ignore_refusals(403, 404):  # not installed, or not permitted to this account
            place = (*kind.api[:2], cluster.namespace, kind.api[2])
            cluster.custom.delete_collection_namespaced_custom_object(*place, **how)
    over = f"{run}: pods did not end"
    wait_until(
        lambda: all(pod.status.phase not in live for pod in cluster.list_pods(selector)),
        timeout,
        over,
    )
    with ignore_refusals(403, 404):  # no graphs or claims, or not permitted to this account
        end_graphs(cluster, run)  # a terminated workflow runs no exit handler
    with ignore_refusals(403, 404):
        release_ended_runs(cluster)
    release_leases(cluster, run)
    delete_forgotten_pods(cluster)
    return len(stopped)


def delete_forgotten_pods(cluster: Connection) -> None:
    """Delete successful pods that Argo's controller has forgotten, and with them their Kueue Workloads. Pods that the
    account may not delete are kept, and those of a workflow with another delay than ours. Failures are printed."""
    selector = f"{RUN_LABEL},workflows.argoproj.io/completed=false"  # the pods that it keeps have another label
    workflows: dict[str, list[str]] = {}
    try:
        for pod in cluster.list_pods(selector, field_selector="status.phase=Succeeded", limit=500):
            changes = [each.last_transition_time for each in pod.status.conditions or ()]
            changed = max(filter(None, changes), default=pod.metadata.creation_timestamp)
            if time.time() - changed.timestamp() > FORGOTTEN_S:
                workflows.setdefault(pod.metadata.labels[WORKFLOW_LABEL], []).append(
                    pod.metadata.name
                )
        for workflow, pods in workflows.items():
            found = cluster.find(*WORKFLOWS, workflow) or {}
            ours = found.get("spec", {}).get("podGC", {}).get("deleteDelayDuration") == DELETE_DELAY
            for name in pods if ours and get_workflow_phase(found) in DONE else ():
                with ignore_refusals(
                    403, 404
                ):  # not permitted to this account, or deleted meanwhile
                    cluster.core.delete_namespaced_pod(name, cluster.namespace)
    except (UserError, Retryable) as error:
        print_diagnostic(f"note: pods that Argo's controller has forgotten may stay: {error}", 0)


def wait_for_run(cluster: Connection, run: str) -> int:
    """Wait until the newest workflow of a run ends, also while the API server is away; return its `exit_code`."""
    newest = find_workflows(cluster, run)[-1]
    while get_workflow_phase(newest) not in DONE:
        time.sleep(2.0)
        newest = retry_until_available(lambda: find_workflows(cluster, run))[-1]
    return exit_code(newest)


def exit_code(workflow: JsonMapping) -> int:
    """Return the exit code of `submit --wait`: 0 if a workflow succeeded; 2, 3 or 75 if a stage ended so; else 1."""
    if get_workflow_phase(workflow) == "Succeeded":
        return 0
    return choose_exit_code(
        {n.exit_code for n in read_nodes(workflow).values() if n.phase in ("Failed", "Error")}
    )
