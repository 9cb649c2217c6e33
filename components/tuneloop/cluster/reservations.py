"""Reservations of ResourceClaims (``resource.k8s.io/v1``) by runs: the first step of a workflow that shares devices
makes them, its exit handler releases them.

    python -m tuneloop.cluster.reservations take-claim --workflow demo --namespace tuneloop --share '{…}' --seats claim

If each pod has its own claim, the runs reserve the ResourceClaimTemplate from which the claims are made. All state is
in the claims: the annotation `SEATS` lists the runs, the owner references their active workflows; when all of these are
deleted, Kubernetes deletes the claim. Every change is a compare-and-swap by ``resourceVersion``, and a claim's name can
be created once, so that any number of steps may run concurrently. A run holds a reservation, not a workflow: the next
workflow of a long run has it as soon as it exists. Each step also releases reservations of terminated or deleted
workflows, and deletes claims without any. The exit handler ``end-graph`` always ends the Dynamo graph of a run."""

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tuneloop.argo.claims import DEVICES, END, GIVE, TAKE
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
from tuneloop.workflow.settings import GROUP_LABEL, LOCAL, ROLE_LABEL, RUN_LABEL, Share

API = ("resource.k8s.io", "v1")
KINDS = {"ResourceClaim": "resourceclaims", "ResourceClaimTemplate": "resourceclaimtemplates"}
SEATS = "tuneloop.dev/seats"
"""Annotation of a claim: the runs that reserve it, a JSON list."""

Object = JsonObject
Owner = tuple[str, str]
"""A workflow's name and uid."""
Active = Mapping[str, Sequence[Owner]]


def reserve_claim(cluster: Connection, workflow: str, share: Share, role: str = "") -> str:
    """Reserve a claim of the group, or of its `role`, for the run of `workflow`; make one if none has room. Raises
    UserError where claims are for other devices or may not be changed, Retryable if the API server is in trouble."""
    selector = f"{GROUP_LABEL}={share.group},{f'{ROLE_LABEL}={role}' if role else f'!{ROLE_LABEL}'}"
    release_ended_runs(cluster)
    run = cluster.get(*WORKFLOWS, workflow)["metadata"].get("labels", {}).get(RUN_LABEL)
    if run is None:
        raise UserError(
            "workflow", workflow, f"has no label {RUN_LABEL}: submit it by `tuneloop submit`"
        )
    while True:
        there = list_claims(cluster, selector)
        active = _active(cluster)
        if run not in active:
            raise Retryable(f"run: {run}: no longer has an active workflow")
        standing = {_name(claim): claim for claim in there if not is_claim_terminating(claim)}
        kind = _new("", share, "")["kind"]
        wanted = _wanted(share)
        for known, claim in standing.items():
            spec = claim["spec"].get("spec", claim["spec"])
            asked = {
                k: v
                for k, v in spec["devices"]["requests"][0]["exactly"].items()
                if k != "allocationMode"
            }
            if (claim["kind"], asked) != (kind, wanted):
                remedy = f"{claim['kind']} {known} of the group has {json.dumps(asked)}: ask for it, or choose a group"
                raise UserError("cluster.share", json.dumps(wanted), remedy)
        seats = {
            name: filter_active_runs(list_claim_runs(claim), active)[0]
            for name, claim in standing.items()
        }
        name = choose_claim(seats, run, sys.maxsize if share.alone else share.runs_per_claim)
        stem = f"{share.group}-{role}" if role else share.group
        claim = (
            standing[name] if name else _new(find_free_name(stem, map(_name, there)), share, role)
        )
        if _seat(cluster, claim, list(dict.fromkeys([*list_claim_runs(claim), run])), active):
            return _name(claim)
        time.sleep(random.uniform(0.05, 0.5))  # a concurrent change: read the claims again


def release_ended_runs(cluster: Connection, without: str = "") -> None:
    """Release the reservations of runs without an active workflow, and delete claims without reservations. The workflow
    `without` counts as ended. Raises as `reserve_claim`."""
    while True:
        there = [claim for claim in list_claims(cluster) if not is_claim_terminating(claim)]
        active = _active(cluster, without) if there else {}
        if all(_seat(cluster, claim, list_claim_runs(claim), active) for claim in there):
            return


def end_graphs(cluster: Connection, run: str, without: str = "") -> None:
    """Delete a run's Dynamo graphs, or make another active workflow than `without` their owner. Raises as above."""
    active = _active(cluster, without).get(run)
    for graph in list_graphs(cluster, run):
        if active:
            own_graph(cluster, graph, active[-1][0], print)
        else:
            delete_graph(cluster, graph["metadata"]["name"])


def list_claims(cluster: Connection, selector: str = GROUP_LABEL) -> list[Object]:
    """List the claims and claim templates that tuneloop made, oldest first."""
    found = [
        (kind, each)
        for kind, plural in KINDS.items()
        for each in cluster.list(*API, plural, selector=selector)
    ]
    return [{**each, "apiVersion": "/".join(API), "kind": kind} for kind, each in found]


def is_claim_terminating(claim: JsonMapping) -> bool:
    """Return whether a claim is deleted and waits for the last pod that uses it."""
    return "deletionTimestamp" in claim["metadata"]


def list_claim_runs(claim: JsonMapping) -> list[str]:
    """List the runs that reserve a claim, in the order in which they came."""
    return json.loads(claim["metadata"].get("annotations", {}).get(SEATS, "[]"))


def _seat(cluster: Connection, claim: Object, wanted: Sequence[str], active: Active) -> bool:
    """Write the `active` runs of `wanted` as the reservations of `claim`; return False after a concurrent change.
    Claims are read before workflows: a run that came in between has changed the claim's version."""
    place = (*API, cluster.namespace, KINDS[claim["kind"]])
    about = claim["metadata"]
    stay, owners = filter_active_runs(wanted, active)
    references = [{**OWNER, "name": name, "uid": uid} for name, uid in owners]
    owned = {each["uid"] for each in about.get("ownerReferences", ())}
    if not stay and "uid" not in about:
        return False
    if stay and stay == list_claim_runs(claim) and owned == {uid for _, uid in owners}:
        return True
    annotations = {**about.get("annotations", {}), SEATS: json.dumps(stay)}
    body = {
        **claim,
        "metadata": {**about, "annotations": annotations, "ownerReferences": references},
    }
    with ignore_refusals(404, 409):  # the claim was changed or deleted meanwhile
        if not stay:
            same = {"preconditions": {name: about[name] for name in ("uid", "resourceVersion")}}
            cluster.custom.delete_namespaced_custom_object(*place, _name(claim), body=same)
        elif "uid" in about:
            cluster.custom.replace_namespaced_custom_object(*place, _name(claim), body)
        else:
            cluster.custom.create_namespaced_custom_object(*place, body)
        return True
    return False


def _new(name: str, share: Share, role: str) -> Object:
    """Build a claim for the devices of `share`, without reservations."""
    labels = {
        "app.kubernetes.io/part-of": "tuneloop",
        GROUP_LABEL: share.group,
        **({ROLE_LABEL: role} if role else {}),
    }
    asked: Object = {"devices": {"requests": [{"name": DEVICES, "exactly": _wanted(share)}]}}
    return {
        "apiVersion": "/".join(API),
        "kind": "ResourceClaimTemplate" if share.alone else "ResourceClaim",
        "metadata": {"name": name, "labels": labels},
        "spec": {"spec": asked} if share.alone else asked,
    }


def _wanted(share: Share) -> JsonObject:
    selectors = {"selectors": [{"cel": {"expression": share.selector}}]} if share.selector else {}
    return {"deviceClassName": share.device_class, "count": share.count, **selectors}


def _active(cluster: Connection, without: str = "") -> Active:
    """Return run → its workflows that are under way."""
    found: dict[str, list[Owner]] = defaultdict(list)
    for workflow in cluster.list(*WORKFLOWS, selector=run_workflows.ACTIVE):
        about = workflow["metadata"]
        if (
            about["name"] != without
            and run_workflows.get_workflow_phase(workflow) not in run_workflows.DONE
        ):
            found[about["labels"][RUN_LABEL]].append((about["name"], about["uid"]))
    return found


def _name(claim: JsonMapping) -> str:
    return str(claim["metadata"]["name"])


def choose_claim(claims: Mapping[str, Sequence[str]], run: str, limit: int) -> str | None:
    """Choose the claim that `run` reserves: the one that it has already, else the fullest with room, the first by name
    among equals; None if a new claim is needed. `claims`: name → the runs that reserve the claim."""
    if seated := [name for name, runs in claims.items() if run in runs]:
        return min(seated)
    room = [name for name, runs in claims.items() if len(runs) < limit]
    return min(room, key=lambda name: (-len(claims[name]), name), default=None)


def find_free_name(stem: str, taken: Iterable[str]) -> str:
    """Return the first of ``<stem>-1``, ``<stem>-2``, … that is not `taken`."""
    there = set(taken)
    return next(name for n in itertools.count(1) if (name := f"{stem}-{n}") not in there)


def filter_active_runs(
    runs: Iterable[str], active: Mapping[str, Sequence[Owner]]
) -> tuple[list[str], list[Owner]]:
    """Return the runs that keep their reservations, and the active workflows of these runs."""
    stay = [run for run in runs if active.get(run)]
    return stay, [owner for run in stay for owner in active[run]]


@report_errors
def main(argv: Sequence[str]) -> int:
    """Reserve a workflow's claims and output their names; or release them; or end the Dynamo graph of its run."""
    parser = argparse.ArgumentParser(prog="tuneloop.cluster.reservations")
    parser.add_argument("step", choices=[TAKE, GIVE, END])
    parser.add_argument("--workflow", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--run", help="whose graph ends")
    parser.add_argument("--share", type=Share.model_validate_json)
    parser.add_argument(
        "--seats",
        nargs="*",
        default=[],
        help="claim, claim-trainer, claim-sampler: outputs to write",
    )
    given = parser.parse_args(argv)
    if given.step == END:
        end_graphs(connect_to_cluster(given.namespace), given.run, without=given.workflow)
        return 0
    if LOCAL in os.environ:  # one machine has no claims: output the group's name instead
        names = dict.fromkeys(given.seats, given.share.group if given.share else "")
    else:
        cluster = connect_to_cluster(given.namespace)
        if given.step == GIVE:
            release_ended_runs(cluster, without=given.workflow)
        roles = {seat: seat.removeprefix("claim").lstrip("-") for seat in given.seats}
        names = {
            seat: reserve_claim(cluster, given.workflow, given.share, role)
            for seat, role in roles.items()
        }
    for seat, name in names.items():
        print(f"{seat}: {name}", flush=True)
    write_outputs(names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
