"""Send a workflow to a cluster and end it, through the Kubernetes API alone: no Argo server is
needed.

A run is all workflows that carry its label: the first one, those that resumed it, and those of a
long loop. What goes wrong is one line (`UserError`, `Retryable`), whatever the client library
raised.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
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
from tuneloop.core.errors import (
    EXIT_RETRY,
    Retryable,
    UserError,
    choose_exit_code,
    print_diagnostic,
)
from tuneloop.core.json_types import JsonMapping, JsonObject
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
from tuneloop.workflow.manifest import effective_spec, mounts_token, read_parameters
from tuneloop.workflow.plan import StagePlan, find_plan
from tuneloop.workflow.settings import DELETE_DELAY, RUN_LABEL, TOKEN_KEY, TOKEN_SECRET

FORGOTTEN_S = 900.0
"""Seconds after which Argo's controller has deleted a successful pod. They are more than the 600 of
`DELETE_DELAY`, with which the workflow was rendered.

It has not if it restarted after the workflow's end: its queue of deletions is only in memory, and
it does not process ended workflows again.
"""
WORKFLOW_LABEL = "workflows.argoproj.io/workflow"


def create_workflow(cluster: Connection, workflow: JsonMapping, run: str) -> str:
    """Create a prepared workflow, and return its name.

    An ended run is resumed: committed stages end at once, and a long loop continues at its newest
    workflow.

    Raises:
        UserError: as `prepare_resumption`, or the name is taken.
    """
    following, number = prepare_resumption(workflow, list_workflows(cluster, run), run)
    if number == 1:
        return _create(cluster, following, run)
    return create_numbered(cluster, following, run, number)


def prepare_resumption(
    workflow: JsonMapping,
    earlier: Sequence[JsonMapping],
    run: str,
) -> tuple[JsonMapping, int]:
    """Return `workflow` as the one that follows the `earlier` ones of its run, and its number.

    Raises:
        UserError: one of these is active, or the run has another pipeline or store, or after the
            first version, other settings.
    """
    for previous in earlier:
        if get_workflow_phase(previous) not in DONE:
            raise UserError(
                "run",
                run,
                f"is under way as workflow {previous['metadata']['name']}; `tuneloop cluster stop`"
                " it, or choose another name",
            )
    if not earlier:
        return workflow, 1
    check_resubmission(workflow, earlier, run)
    newest = max(get_workflow_number(run, previous["metadata"]["name"]) for previous in earlier)
    return run_workflows.copy_entrypoint(workflow, earlier[-1]), newest + 1


def check_resubmission(workflow: JsonMapping, earlier: Sequence[JsonMapping], run: str) -> None:
    """Refuse a workflow that does not fit the run of the `earlier` workflows, oldest first.

    If the run failed before its loop made a version, its settings may be corrected, as with
    `tuneloop run`: stages refuse settings that differ from their committed outputs. The pods'
    requests, and settings that no stage compares with its output (addresses, timeouts), may always
    change. Sweeps call it before they submit (`extensions/sweep/runs.py`). For a run of this
    machine `runs/resumption.py: find_changed_settings` has the same rule: both change together.

    Raises:
        UserError: the run has another pipeline or store, or is past that and has other settings.
    """
    recorded: JsonObject = {}
    for previous in earlier:
        recorded |= _read_settings(previous)
    requested = _read_settings(workflow)
    # A stage that one of the two lacks says nothing: a continued workflow has only those that
    # follow.
    common = recorded.keys() & requested.keys()
    differing = find_differences(
        {key: value for key, value in requested.items() if key in common},
        {key: value for key, value in recorded.items() if key in common},
    )
    is_final = any(
        get_workflow_phase(previous) not in ("Failed", "Error") or _has_version(previous)
        for previous in earlier
    )
    keys: list[str] = [key for key in ("pipeline", "store") if key in differing]
    if not keys and is_final:
        keys = differing[:5]
    if keys:
        raise UserError(
            "--run",
            run,
            f"exists with another {', '.join(keys)}; submit it as it was, or choose another name",
        )


def _read_settings(workflow: JsonMapping) -> JsonObject:
    """Read the settings that affect a run's results: its pipeline, its parameters, and those of
    each stage.

    Parameters of the workflow and stages are keys of one mapping: a stage must not have the name of
    a parameter.
    """
    spec = effective_spec(workflow)
    settings: JsonObject = {}
    pod_labels = spec.get("podMetadata", {}).get("labels", {})
    pipeline = pod_labels.get("app.kubernetes.io/name")
    if pipeline:
        settings["pipeline"] = pipeline
    settings |= read_parameters(spec)
    if "store" in settings:
        settings["store"] = normalize_url(settings["store"])
    # A workflow that is about to be made from a WorkflowTemplate has no templates yet.
    if "templates" in spec:
        # One that was drawn by hand has no plan: its parameters are all that is compared.
        plan = find_plan(workflow)
        stages = plan.stages if plan else {}
        settings |= {name: _collect_tracked(stage) for name, stage in stages.items()}
    return settings


def _collect_tracked(stage: StagePlan) -> JsonObject:
    """Collect the parameters that a stage compares with those of its committed output.

    A parameter that the plan lacks has its default: an earlier build did not have it. Of a stage that
    is not installed here these are the plan's parameters.
    """
    component = stage.component
    if component is None:
        return stage.parameters
    untracked = component.untracked
    parameters = component.list_defaults() | stage.parameters
    tracked = {name: value for name, value in parameters.items() if name not in untracked}
    if component.identity is input_identity and "engine_args" in tracked:
        # Of the options of an engine only some change the completions.
        tracked |= input_identity(SimpleNamespace(engine_args=stage.engine_args))
    return tracked


def _has_version(workflow: JsonMapping) -> bool:
    """Return whether the loop of a workflow has made a version."""
    plan = find_plan(workflow)
    loop = plan.loop if plan else None
    if loop is None:
        return False
    trainers = {loop.trainer}
    if loop.pod:
        # It runs several stages, and succeeds when the last iteration has trained.
        trainers.add(loop.pod.template)
    return any(
        node.template in trainers and node.phase == "Succeeded"
        for node in read_nodes(workflow).values()
    )


def create_numbered(cluster: Connection, workflow: JsonMapping, run: str, number: int) -> str:
    """Create ``<run>-<number>``, or use the next free number, and return the name.

    A workflow that continues the same one is not created again.
    """
    while True:
        name = f"{run}-{number}"
        with ignore_refusals(409):
            return _create(cluster, workflow, name)
        existing = cluster.get(*WORKFLOWS, name)
        previous = _get_previous_name(workflow)
        if previous and previous == _get_previous_name(existing):
            # The step that created it may have been killed before it created the token.
            _create_token(cluster, existing)
            return name
        number += 1


def _get_previous_name(workflow: JsonMapping) -> str | None:
    """Return the name of the workflow that a workflow continues, if it continues one."""
    annotations = workflow["metadata"].get("annotations") or {}
    name: str | None = annotations.get(run_workflows.CONTINUES)
    return name


def _create(cluster: Connection, workflow: JsonMapping, name: str) -> str:
    """Create a workflow under a name, with the token of its servers, and return the name."""
    metadata = {**workflow["metadata"], "name": name}
    created = cluster.create(*WORKFLOWS, {**workflow, "metadata": metadata})
    try:
        _create_token(cluster, created)
    except (UserError, Retryable):
        # Its servers would start without a token, so it must not run.
        with contextlib.suppress(UserError, Retryable):
            cluster.delete(*WORKFLOWS, name)
        raise
    return name


def _create_token(cluster: Connection, workflow: JsonMapping) -> None:
    """Create the token of a workflow's rollout servers, as a Secret that the workflow owns, unless
    it exists.
    """
    if not mounts_token(workflow["spec"]):
        return
    metadata = workflow["metadata"]
    owner = {**OWNER, "name": metadata["name"], "uid": metadata["uid"]}
    secret = {
        "metadata": {
            "name": TOKEN_SECRET.replace("{{workflow.uid}}", metadata["uid"]),
            "ownerReferences": [owner],
        },
        "stringData": {TOKEN_KEY: secrets.token_urlsafe(32)},
    }
    with ignore_refusals(409):
        cluster.core.create_namespaced_secret(cluster.namespace, secret)


def stop_run(cluster: Connection, run: str, *, timeout: float = 120.0) -> int:
    """Stop a run: its stages commit their resume points, and all that it holds is released.

    These are its jobs, pods, graphs, reservations and leases. A stopped workflow runs no exit
    handler (`cluster/graph_end.py`, `cluster/reservations.py`), so whatever else a run comes to hold
    has to be released here, too.

    Args:
        cluster: where the run is.
        run: its name.
        timeout: seconds for its workflows to end, and then for its pods.

    Returns:
        The number of workflows that were active.

    Raises:
        UserError: there is no such run.
        Retryable: it does not end in time.
    """
    stopped: set[str] = set()

    def has_ended() -> bool:
        active: set[str] = set()
        for workflow in find_workflows(cluster, run):
            if get_workflow_phase(workflow) not in DONE:
                active.add(workflow["metadata"]["name"])
        # Each time: one may just be creating the workflow that continues it.
        for name in active - stopped:
            _patch_workflow(cluster, name, {"spec": {"shutdown": "Stop"}})
            stopped.add(name)
        return not active

    wait_until(has_ended, timeout, f"{run}: workflow did not end")
    selector = f"{RUN_LABEL}={run}"
    # Jobs of several pods outlive the step that started them.
    for kind in KINDS.values():
        group, version, plural = kind.api
        # Not installed, or not permitted to this account.
        with ignore_refusals(403, 404):
            cluster.custom.delete_collection_namespaced_custom_object(
                group,
                version,
                cluster.namespace,
                plural,
                label_selector=selector,
                # By default a Job would leave its pods.
                propagation_policy="Background",
            )

    def have_pods_ended() -> bool:
        pods = cluster.list_pods(selector)
        return all(pod.status.phase not in ("Pending", "Running") for pod in pods)

    wait_until(have_pods_ended, timeout, f"{run}: pods did not end")
    # The cluster may have no graphs or claims, or not permit this account to change them.
    with ignore_refusals(403, 404):
        # A terminated workflow runs no exit handler.
        end_graphs(cluster, run)
    with ignore_refusals(403, 404):
        release_ended_runs(cluster)
    release_leases(cluster, run)
    delete_forgotten_pods(cluster)
    return len(stopped)


def _patch_workflow(cluster: Connection, name: str, patch: JsonMapping) -> None:
    """Merge `patch` into a workflow."""
    group, version, plural = WORKFLOWS
    cluster.custom.patch_namespaced_custom_object(
        group,
        version,
        cluster.namespace,
        plural,
        name,
        patch,
    )


def delete_forgotten_pods(cluster: Connection) -> None:
    """Delete successful pods that Argo's controller has forgotten, and with them their Kueue
    Workloads.

    Pods that the account may not delete are kept, and those of a workflow with another delay than
    ours. Failures are printed.
    """
    try:
        for workflow_name, pods in _find_forgotten_pods(cluster).items():
            workflow = cluster.find(*WORKFLOWS, workflow_name) or {}
            delay = workflow.get("spec", {}).get("podGC", {}).get("deleteDelayDuration")
            if delay != DELETE_DELAY or get_workflow_phase(workflow) not in DONE:
                continue
            for pod_name in pods:
                # Not permitted to this account, or deleted meanwhile.
                with ignore_refusals(403, 404):
                    cluster.core.delete_namespaced_pod(pod_name, cluster.namespace)
    except (UserError, Retryable) as error:
        print_diagnostic(f"note: pods that Argo's controller has forgotten may stay: {error}", 0)


def _find_forgotten_pods(cluster: Connection) -> dict[str, list[str]]:
    """Return workflow → its pods that succeeded more than `FORGOTTEN_S` ago."""
    # The pods that the controller keeps on purpose have another label.
    selector = f"{RUN_LABEL},workflows.argoproj.io/completed=false"
    pods = cluster.list_pods(selector, field_selector="status.phase=Succeeded", limit=500)
    forgotten: dict[str, list[str]] = {}
    for pod in pods:
        metadata = pod.metadata
        times = [condition.last_transition_time for condition in pod.status.conditions or ()]
        last_change = max(filter(None, times), default=metadata.creation_timestamp)
        if time.time() - last_change.timestamp() > FORGOTTEN_S:
            forgotten.setdefault(metadata.labels[WORKFLOW_LABEL], []).append(metadata.name)
    return forgotten


def wait_for_run(cluster: Connection, run: str) -> int:
    """Wait until the newest workflow of a run ends, also while the API server is away; return its
    `exit_code`.
    """
    return wait_for_newest(lambda: find_workflows(cluster, run))


def wait_for_newest(list_run: Callable[[], Sequence[JsonMapping]]) -> int:
    """Wait until the newest workflow of a run ends, and return its `exit_code`.

    Args:
        list_run: returns the workflows of the run, oldest first.
    """
    while True:
        # Listed each time: a long run continues in another workflow.
        newest = retry_until_available(list_run)[-1]
        if get_workflow_phase(newest) in DONE:
            return exit_code(newest)
        time.sleep(2.0)


def exit_code(workflow: JsonMapping) -> int:
    """Return the exit code of `submit --wait`: 0 if a workflow succeeded; 2, 3 or 75 if a stage
    ended so; 75 if somebody stopped it; else 1.

    That of `tuneloop run` is `local/journal.py: outcome_code`.
    """
    if get_workflow_phase(workflow) == "Succeeded":
        return 0
    codes: set[int | None] = set()
    for node in read_nodes(workflow).values():
        if node.phase in ("Failed", "Error"):
            codes.add(node.exit_code)
    if is_stopped(workflow):
        # Argo keeps no exit code of a pod that it stops, and a pod that waits for quota has none.
        codes.add(EXIT_RETRY)
    return choose_exit_code(codes)


def is_stopped(workflow: JsonMapping) -> bool:
    """Return whether somebody stopped a workflow: `stop_run`, or ``argo stop`` or ``terminate``."""
    return bool(workflow["spec"].get("shutdown")) and get_workflow_phase(workflow) != "Succeeded"
