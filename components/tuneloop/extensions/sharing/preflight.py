"""What runs that share devices need on a cluster: its claims and DeviceClass, room on the node, and
a group that takes the run.

`cluster/preflight.py` calls it by the hook (`pod.py: SharingHook.find_cluster_problems`), before
anything is created on the cluster. Policy and patience are compared with those of the group here;
its devices are compared only when a claim is reserved (`cluster/reservations.py: _check_devices`).
Its tests are in `tests/extensions/sharing/test_lease.py`.
"""

from argparse import Namespace
from collections.abc import Iterator

from tuneloop.cluster.preflight import is_kind_absent
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object, is_absent
from tuneloop.cluster.reservations import API, KINDS, list_claims
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.extensions.sharing.claims import share_of
from tuneloop.extensions.sharing.colocation import check_colocation
from tuneloop.extensions.sharing.lease_sidecar import find_lease_sidecar
from tuneloop.kube.connection import Connection
from tuneloop.sharing.lease_storage import LEASES, KubernetesLease, parse_lease
from tuneloop.sharing.leases import LeaseGroup
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.workflow.settings import GROUP_LABEL

CLAIMS = KINDS["ResourceClaim"]


def find_device_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check the devices of a claim: the cluster accepts a claim for an unknown class, but its pods
    wait for ever.
    """
    try:
        check_colocation(workflow)
    except UserError as error:
        yield error
    share = share_of(workflow)
    if not share or not share.device_class:
        return
    group, version = API
    read_class = cluster.custom.get_cluster_custom_object
    remedy = ""
    if is_kind_absent(cluster, group, version, CLAIMS):
        remedy = (
            f"cluster {cluster.context} has no {CLAIMS}.{group}/{version}: it needs Kubernetes 1.34"
            " or newer"
        )
    elif is_absent(read_class, group, version, "deviceclasses", share.device_class):
        remedy = (
            f"is not a DeviceClass of {cluster.context}; see `kubectl get deviceclasses`; a DRA"
            " driver brings them"
        )
    if remedy:
        yield UserError("cluster.share.device_class", share.device_class, remedy)


def find_lease_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check policy and patience against the group's: otherwise a run fails at its first stage that
    shares devices.
    """
    options_by_group: dict[str, Namespace] = {}
    for template in workflow["spec"].get("templates", ()):
        sidecar = find_lease_sidecar(template)
        if sidecar:
            options = parse_arguments(sidecar["args"])
            for group_name in _list_lease_groups(cluster, workflow, options.group):
                # All stages of a run that use a group have the same settings.
                options_by_group[group_name] = options
    for group_name, options in options_by_group.items():
        storage = KubernetesLease(cluster, group_name)
        lease = find_object(cluster.get, *LEASES, storage.name)
        if lease in (ABSENT, UNSEEN):
            continue
        group = LeaseGroup(
            storage,
            group_name,
            who=options.run,
            policy=options.policy,
            patience=options.patience,
        )
        try:
            group.apply_settings(parse_lease(lease))
        except UserError as error:
            yield error


def _list_lease_groups(cluster: Connection, workflow: JsonMapping, group: str) -> list[str]:
    """List the groups of leases that a run may use.

    If each claim has a group, these are all, as the run's claim is not known before it runs.
    """
    if "{{" not in group:
        return [group]
    share = share_of(workflow)
    assert share, "only stages that share devices have a claim's name"
    claims = find_object(list_claims, cluster, f"{GROUP_LABEL}={share.group}")
    if claims in (ABSENT, UNSEEN):
        return []
    return [claim["metadata"]["name"] for claim in claims]
