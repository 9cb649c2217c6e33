"""What runs that share devices change of their pods.

It is the `PodHook` of this extension (`workflow/pod_hook.py`), called when a workflow is rendered,
planned, submitted and, on this machine, run.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.extensions.sharing.claims import (
    ANNOTATION,
    build_affinity,
    build_sharing_labels,
    find_placement_errors,
    pod_patch,
    role_of,
)
from tuneloop.extensions.sharing.colocation import check_colocation, describe_colocation
from tuneloop.extensions.sharing.lease_sidecar import (
    PROGRAM,
    add_lease_sidecar,
    find_lease_sidecar,
)
from tuneloop.extensions.sharing.preflight import find_device_problems, find_lease_problems
from tuneloop.extensions.sharing.settings import SECTION, find_share
from tuneloop.sharing.claim_request import GIVE
from tuneloop.sharing.lease_storage import STORED_LEASES, open_lease_group
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.workflow.pod_hook import MachinePod, PodChange, PodHook, PodUse, WorkflowChange
from tuneloop.workflow.settings import ROLES, Cluster, ResourceRole

REMEDIES: Mapping[PodUse, str] = {
    "automatic iterations": "a pod of iterations would keep other runs from their lease",
    # The lease is held for one server.
    "several servers": "runs that share devices have one server: unset it",
    "trainjob": "a TrainJob cannot use a claim: render a JobSet",
    "kfp": "Kubeflow Pipelines have no field for claims, and no step that releases them: "
    "leave it out",
}
"""Use that pods which share devices exclude → the remedy.

With the uses that `SharingHook.find_obstacle` decides itself, every `workflow/pod_hook.py: PodUse`
is here: one that is missing ends in KeyError for each run that shares devices.
"""


class SharingHook(PodHook):
    """Pods that share devices ask for a claim in place of GPUs, and hold a lease while they
    compute.

    Each method is described by its base class, `workflow/pod_hook.py: PodHook`, which says who
    calls it.
    """

    def count_devices(self, cluster: JsonMapping) -> int | None:
        share = cluster.get(SECTION)
        # All roles compute on the devices of a claim, and have none of their own.
        if not isinstance(share, Mapping) or not share.get("device_class"):
            return None
        devices = share.get("count", 1)
        # A wrong type is refused later, by its setting's name.
        return devices if isinstance(devices, int) else 1

    def check_cluster(self, cluster: Cluster) -> None:
        share = find_share(cluster)
        # A claim that names no class is none.
        claims_devices = share is not None and share.device_class != ""
        for role in ROLES:
            gpus = cluster.count_gpus(role)
            if claims_devices and gpus:
                # A pod would wait for both.
                remedy = (
                    "gpus belong to this run alone, cluster.share.device_class to a shared claim: "
                    "set one of them"
                )
                raise UserError(f"cluster.{role}.gpus", gpus, remedy)

    def find_obstacle(self, cluster: Cluster, use: PodUse) -> UserError | None:
        share = find_share(cluster)
        if share is None:
            return None
        if use == "iterations":
            if share.roles == "together":
                return None
            remedy = (
                "loop.iterations_per_pod trains and samples in one pod: "
                "set this to together, or it to 0"
            )
            return UserError("cluster.share.roles", share.roles, remedy)
        if use == "job":
            # Each pod of a job would request its lease by itself.
            if share.alone:
                return None
            remedy = "supports only stages of one pod: leave it out, or set runs_per_claim=1"
            return UserError("cluster.share.group", share.group, remedy)
        return UserError("cluster.share.group", share.group, REMEDIES[use])

    def choose_memory_request(self, cluster: Cluster, role: ResourceRole) -> str:
        share = find_share(cluster)
        return share.request if share and role != "cpu" else ""

    def change_pod(self, cluster: Cluster, role: ResourceRole, image: str) -> PodChange | None:
        share = find_share(cluster)
        if share is None or role == "cpu":
            return None
        share_role = role_of(image)
        spec = pod_patch(share, share_role)
        affinity = build_affinity(share, share_role)
        if affinity:
            spec["affinity"] = affinity
        return PodChange(
            labels=build_sharing_labels(share, share_role),
            spec=spec,
            # No queue accounts for a claim that several runs share.
            is_queued=not share.device_class or share.alone,
        )

    def change_computing_stage(self, cluster: Cluster, image: str, template: Any) -> None:
        # A client of the run's own server needs no lease: the server's devices are leased for it.
        add_lease_sidecar(template, cluster, role_of(image))

    def change_workflow(self, cluster: Cluster) -> WorkflowChange | None:
        from tuneloop.extensions.sharing.claim_steps import build_reservation_steps

        share = find_share(cluster)
        if share is None:
            return None
        steps = build_reservation_steps(cluster)
        return WorkflowChange(
            annotations={ANNOTATION: share.model_dump_json()},
            templates=steps,
            exit_template=GIVE if steps else "",
        )

    def adjust_job_workflow(self, cluster: Cluster) -> Cluster:
        # A JobSet's pods have claims of their own: no step reserves one.
        return cluster.model_copy(update={SECTION: None}) if find_share(cluster) else cluster

    def complete_workflow(self, workflow: Any) -> None:
        from tuneloop.extensions.sharing.claim_steps import reserve_claims

        reserve_claims(workflow)

    def find_errors(self, workflow: JsonMapping) -> Iterator[UserError]:
        yield from find_placement_errors(workflow)

    def describe_plan(self, workflow: JsonMapping, parameters: int | None) -> Iterator[str]:
        check_colocation(workflow)
        yield from describe_colocation(workflow, parameters)

    def find_cluster_problems(self, connection: Any, workflow: JsonMapping) -> Iterator[UserError]:
        yield from find_device_problems(connection, workflow)
        yield from find_lease_problems(connection, workflow)

    def replaces_container(self, container: JsonMapping) -> bool:
        return container.get("command") == PROGRAM

    @contextlib.contextmanager
    def hold_pod(self, pod: MachinePod) -> Iterator[None]:
        """Hold a device lease, as the sidecar of the pod does on a cluster.

        Here the document of its group is in the run's store. Without a sidecar nothing is held.
        """
        container = find_lease_sidecar(pod.template)
        if container is None:
            yield
            return
        lease = parse_arguments(container["args"])
        url = f"{pod.store}/{STORED_LEASES}/{lease.group}"
        group = open_lease_group(url, who=lease.run, policy=lease.policy, patience=lease.patience)
        if group.read().holder:
            pod.show_message(f"waits for the lease of group {lease.group}")
        with group.acquire(stop=pod.stopping, file=pod.local_path(lease.file)):
            pod.show_message("")
            yield


HOOK = SharingHook()
