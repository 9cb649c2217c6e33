"""Reserve ResourceClaims (``resource.k8s.io/v1``) for runs that share devices.

    python -m tuneloop.cluster.reservations take-claim --workflow demo --namespace tuneloop \
        --share '{…}' --claims claim

The first step of a workflow makes its reservations, its exit handler releases them. If each pod has
its own claim, the runs reserve the ResourceClaimTemplate from which the claims are made. All state
is in the claims: the annotation `RESERVATIONS` lists the runs, the owner references their active
workflows. When all of these are deleted, Kubernetes deletes the claim. Every change is a
compare-and-swap by ``resourceVersion``, and a claim's name can be created once, so that any number
of steps may run concurrently.

A run holds a reservation, not a workflow: the next workflow of a long run has it as soon as it
exists. Each step also releases reservations of terminated or deleted workflows, and deletes claims
without any. The exit handler ``end-graph`` always ends the Dynamo graph of a run.

The flags of `main` are rendered by `extensions/sharing/claim_steps.py` and `cluster/graph_end.py`,
with the accounts ``tuneloop-claims`` and ``tuneloop-graphs``: a further right that is needed here
goes into ``manifests/namespaced/accounts.yaml`` or ``manifests/admin/namespace/rights.yaml``.
`planning/counts.py` finds the steps by this module's name.
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tuneloop.cluster import run_workflows
from tuneloop.core.errors import Retryable, UserError, report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import write_outputs
from tuneloop.inference.fleet.graph import delete_graph, list_graphs, own_graph
from tuneloop.kube.connection import (
    OWNER,
    WORKFLOWS,
    Connection,
    connect_to_cluster,
    ignore_refusals,
)
from tuneloop.sharing.claim_request import DEVICES, GIVE, TAKE, ClaimRequest
from tuneloop.workflow.settings import GROUP_LABEL, LOCAL, ROLE_LABEL, RUN_LABEL

END = "end-graph"
"""The template of the exit handler that deletes a run's Dynamo graph."""

API = ("resource.k8s.io", "v1")
KINDS = {"ResourceClaim": "resourceclaims", "ResourceClaimTemplate": "resourceclaimtemplates"}
RESERVATIONS = "tuneloop.dev/reservations"
"""Annotation of a claim: the runs that reserve it, a JSON list."""

Owner = tuple[str, str]
"""A workflow's name and uid."""
ActiveWorkflows = Mapping[str, Sequence[Owner]]
"""Run → its workflows that are under way."""


def reserve_claim(
    cluster: Connection,
    workflow: str,
    share: ClaimRequest,
    role: str = "",
) -> str:
    """Reserve a claim of the group for the run of `workflow`, and return its name.

    One is made if none has room. With `role` only claims of this role are considered.

    Raises:
        UserError: claims of the group are for other devices, or may not be changed.
        Retryable: the API server fails, or the run has ended.
    """
    role_selector = f"{ROLE_LABEL}={role}" if role else f"!{ROLE_LABEL}"
    selector = f"{GROUP_LABEL}={share.group},{role_selector}"
    release_ended_runs(cluster)
    labels = cluster.get(*WORKFLOWS, workflow)["metadata"].get("labels", {})
    run = labels.get(RUN_LABEL)
    if run is None:
        remedy = f"has no label {RUN_LABEL}: submit it by `tuneloop submit`"
        raise UserError("workflow", workflow, remedy)
    limit = sys.maxsize if share.alone else share.runs_per_claim
    while True:
        # Claims before workflows: see `_write_reservations`.
        claims = list_claims(cluster, selector)
        active = _list_active_workflows(cluster)
        if run not in active:
            raise Retryable(f"run: {run}: no longer has an active workflow")
        usable = {_get_name(claim): claim for claim in claims if not is_claim_terminating(claim)}
        runs_by_claim: dict[str, list[str]] = {}
        for name, claim in usable.items():
            _check_devices(claim, share)
            runs_by_claim[name], _ = filter_active_runs(list_claim_runs(claim), active)
        chosen = choose_claim(runs_by_claim, run, limit)
        if chosen:
            claim = usable[chosen]
        else:
            stem = f"{share.group}-{role}" if role else share.group
            # Not that of a claim that terminates: the name is taken until it is gone.
            name = find_free_name(stem, map(_get_name, claims))
            claim = _build_claim(name, share, role)
        runs = list_claim_runs(claim)
        if run not in runs:
            runs.append(run)
        if _write_reservations(cluster, claim, runs, active):
            return _get_name(claim)
        # After a concurrent change the claims are read again.
        time.sleep(random.uniform(0.05, 0.5))


def _check_devices(claim: JsonMapping, share: ClaimRequest) -> None:
    """Raise UserError if a claim of the group is not for the devices of `share`.

    What the API server adds to a claim has to be taken off before they are compared: a field that
    is added to `_describe_devices` may bring another default with it.
    """
    expected = _build_claim("", share, "")
    # A template has the spec of its claims in its own.
    spec = claim["spec"].get("spec", claim["spec"])
    request = dict(spec["devices"]["requests"][0]["exactly"])
    # The API server adds it.
    request.pop("allocationMode", None)
    devices = _describe_devices(share)
    if claim["kind"] != expected["kind"] or request != devices:
        raise UserError(
            "cluster.share",
            json.dumps(devices),
            f"{claim['kind']} {_get_name(claim)} of the group has {json.dumps(request)}:"
            " ask for it, or choose a group",
        )


def release_ended_runs(cluster: Connection, without: str = "") -> None:
    """Release the reservations of runs without an active workflow, and delete unreserved claims.

    The workflow `without` counts as ended. Raises as `reserve_claim`.
    """
    while True:
        claims = [claim for claim in list_claims(cluster) if not is_claim_terminating(claim)]
        active = _list_active_workflows(cluster, without) if claims else {}
        for claim in claims:
            if not _write_reservations(
                cluster,
                claim,
                list_claim_runs(claim),
                active,
            ):
                # A concurrent change ends the pass: all claims are read again.
                break
        else:
            return


def end_graphs(cluster: Connection, run: str, without: str = "") -> None:
    """Delete a run's Dynamo graphs, or make another active workflow than `without` their owner.

    Raises as `reserve_claim`.
    """
    workflows = _list_active_workflows(cluster, without).get(run)
    for graph in list_graphs(cluster, run):
        if workflows:
            name, _ = workflows[-1]
            own_graph(cluster, graph, name, print)
        else:
            delete_graph(cluster, graph["metadata"]["name"])


def list_claims(cluster: Connection, selector: str = GROUP_LABEL) -> list[JsonObject]:
    """List the claims and claim templates that tuneloop made, oldest first."""
    claims: list[JsonObject] = []
    for kind, plural in KINDS.items():
        for item in cluster.list(*API, plural, selector=selector):
            # The items of a list have neither.
            typed = {
                "apiVersion": "/".join(API),
                "kind": kind,
            }
            claims.append(item | typed)
    return claims


def is_claim_terminating(claim: JsonMapping) -> bool:
    """Return whether a claim is deleted and waits for the last pod that uses it."""
    return "deletionTimestamp" in claim["metadata"]


def list_claim_runs(claim: JsonMapping) -> list[str]:
    """List the runs that reserve a claim, in the order in which they came."""
    annotations = claim["metadata"].get("annotations", {})
    runs: list[str] = json.loads(annotations.get(RESERVATIONS, "[]"))
    return runs


def _write_reservations(
    cluster: Connection,
    claim: JsonObject,
    runs: Sequence[str],
    active: ActiveWorkflows,
) -> bool:
    """Write the `active` runs among `runs` as the reservations of `claim`.

    A claim without any is deleted. Claims have to be read before workflows: a run that came in
    between has changed the claim's version.

    Returns:
        False after a concurrent change, or if a claim that does not exist is not needed.
    """
    metadata = claim["metadata"]
    exists = "uid" in metadata
    remaining, owners = filter_active_runs(runs, active)
    if not remaining and not exists:
        return False
    owner_uids = {uid for _, uid in owners}
    present_uids = {owner["uid"] for owner in metadata.get("ownerReferences", ())}
    if remaining and remaining == list_claim_runs(claim) and present_uids == owner_uids:
        return True

    resource = (*API, cluster.namespace, KINDS[claim["kind"]])
    # A conflict: the claim was changed or deleted meanwhile.
    with ignore_refusals(404, 409):
        if not remaining:
            # Only in the state that was read: another run may have come since.
            preconditions = {key: metadata[key] for key in ("uid", "resourceVersion")}
            cluster.custom.delete_namespaced_custom_object(
                *resource,
                _get_name(claim),
                body={"preconditions": preconditions},
            )
            return True
        annotations = dict(metadata.get("annotations", {}))
        annotations[RESERVATIONS] = json.dumps(remaining)
        references = [OWNER | {"name": name, "uid": uid} for name, uid in owners]
        changes = {
            "annotations": annotations,
            "ownerReferences": references,
        }
        body = claim | {"metadata": metadata | changes}
        if exists:
            cluster.custom.replace_namespaced_custom_object(
                *resource,
                _get_name(claim),
                body,
            )
        else:
            cluster.custom.create_namespaced_custom_object(*resource, body)
        return True
    return False


def _build_claim(name: str, share: ClaimRequest, role: str) -> JsonObject:
    """Build a claim for the devices of `share`, without reservations."""
    labels = {
        "app.kubernetes.io/part-of": "tuneloop",
        GROUP_LABEL: share.group,
    }
    if role:
        labels[ROLE_LABEL] = role
    request = {"name": DEVICES, "exactly": _describe_devices(share)}
    spec: JsonObject = {"devices": {"requests": [request]}}
    return {
        "apiVersion": "/".join(API),
        "kind": "ResourceClaimTemplate" if share.alone else "ResourceClaim",
        "metadata": {"name": name, "labels": labels},
        "spec": {"spec": spec} if share.alone else spec,
    }


def _describe_devices(share: ClaimRequest) -> JsonObject:
    """Return the devices that a claim asks for."""
    devices: JsonObject = {
        "deviceClassName": share.device_class,
        "count": share.count,
    }
    if share.selector:
        devices["selectors"] = [{"cel": {"expression": share.selector}}]
    return devices


def _list_active_workflows(cluster: Connection, without: str = "") -> ActiveWorkflows:
    """Return run → its workflows that are under way, but for the workflow `without`."""
    active: dict[str, list[Owner]] = defaultdict(list)
    for workflow in cluster.list(*WORKFLOWS, selector=run_workflows.ACTIVE):
        metadata = workflow["metadata"]
        phase = run_workflows.get_workflow_phase(workflow)
        if metadata["name"] != without and phase not in run_workflows.DONE:
            owner = (metadata["name"], metadata["uid"])
            active[metadata["labels"][RUN_LABEL]].append(owner)
    return active


def _get_name(claim: JsonMapping) -> str:
    return str(claim["metadata"]["name"])


def choose_claim(claims: Mapping[str, Sequence[str]], run: str, limit: int) -> str | None:
    """Choose the claim that `run` reserves.

    It is the one that the run has already, else the fullest with room, the first by name among
    equals.

    Args:
        claims: name → the runs that reserve the claim.
        run: the run.
        limit: the number of runs that a claim has room for.

    Returns:
        The name of the claim; None if a new one is needed.
    """
    reserved = [name for name, runs in claims.items() if run in runs]
    if reserved:
        return min(reserved)
    room = [name for name, runs in claims.items() if len(runs) < limit]
    # The fullest, so that others empty and are deleted.
    return min(room, key=lambda name: (-len(claims[name]), name), default=None)


def find_free_name(stem: str, names: Iterable[str]) -> str:
    """Return the first of ``<stem>-1``, ``<stem>-2``, … that is not among `names`."""
    used = set(names)
    for number in itertools.count(1):
        name = f"{stem}-{number}"
        if name not in used:
            break
    return name


def filter_active_runs(
    runs: Iterable[str],
    active: ActiveWorkflows,
) -> tuple[list[str], list[Owner]]:
    """Return the runs that keep their reservations, and the active workflows of these runs."""
    remaining = [run for run in runs if active.get(run)]
    owners: list[Owner] = []
    for run in remaining:
        owners.extend(active[run])
    return remaining, owners


@report_errors
def main(argv: Sequence[str]) -> int:
    """Reserve a workflow's claims and output their names, release them, or end a run's graph."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.reservations")
    parser.add_argument("step", choices=[TAKE, GIVE, END])
    parser.add_argument("--workflow", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--run", help="whose graph ends")
    parser.add_argument("--share", type=ClaimRequest.model_validate_json)
    parser.add_argument(
        "--claims",
        nargs="*",
        default=[],
        help="claim, claim-trainer, claim-sampler: outputs to write",
    )
    options = parser.parse_args(argv)
    if options.step == END:
        cluster = connect_to_cluster(options.namespace)
        end_graphs(cluster, options.run, without=options.workflow)
        return 0
    names: dict[str, str] = {}
    if LOCAL in os.environ:
        # One machine has no claims: the group's name is output instead.
        group = options.share.group if options.share else ""
        names = dict.fromkeys(options.claims, group)
    else:
        cluster = connect_to_cluster(options.namespace)
        if options.step == GIVE:
            release_ended_runs(cluster, without=options.workflow)
        for output in options.claims:
            role = output.removeprefix("claim").lstrip("-")
            names[output] = reserve_claim(
                cluster,
                options.workflow,
                options.share,
                role,
            )
    for output, name in names.items():
        print(f"{output}: {name}", flush=True)
    write_outputs(names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
