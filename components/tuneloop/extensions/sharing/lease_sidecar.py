"""A sidecar of a stage's pod that holds the lease on shared devices (`cluster.share`):
`tuneloop.sharing.sidecar`.

It is a native sidecar, an init container that is always restarted: Kubernetes starts the stage's
container once its startup probe has passed, and ends it after that container. It alone has a token,
of an account that may only change Leases. A file on a volume that both mount tells the stage's
container until when the lease is valid.

The flags that are written here are parsed by `sharing/sidecar.py: parse_arguments`, in the sidecar,
by `pod.py: SharingHook.hold_pod` for the local executor, and by `preflight.py`. A setting of
`settings.py: Share` that the lease follows is an option here and a flag there.
"""

from typing import TYPE_CHECKING, Any

from tuneloop.argo.pod_fields import EXECUTOR_LIMITS, TOKEN_SOURCES
from tuneloop.core import fencing
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.extensions.sharing.claims import claim_tag
from tuneloop.extensions.sharing.settings import Share, find_share
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER
from tuneloop.workflow.settings import Cluster

if TYPE_CHECKING:
    from hera.workflows import Container

NAME = "lease"
"""The sidecar's name, and that of the volume with its file."""
ACCOUNT = "tuneloop-lease"
"""The account of the pod, with its rights in `manifests/namespaced/accounts.yaml`."""
DIRECTORY = "/lease"
FILE = f"{DIRECTORY}/lease.json"
"""The file with the grant, which `core/fencing.py` reads in the stage's container."""
TOKEN = "lease-token"
"""The volume with the account's token."""
ACCOUNT_FILES = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where the sidecar mounts that volume, and Kubernetes' client looks for the token."""
PROGRAM = ["python", "-m", "tuneloop.sharing.sidecar"]
"""The command of the sidecar. By it the local executor knows a container that it need not start
(`pod.py: SharingHook.replaces_container`)."""
FOREVER = 2**31 - 1
"""Failures allowed to the startup probe, one a second: a stage may wait long for the lease."""


def add_lease_sidecar(template: "Container", cluster: Cluster, role: str) -> None:
    """Add the lease sidecar to a stage that uses the shared devices of `role`; nothing if none are
    shared.
    """
    from hera.workflows import EmptyDirVolume, models

    share = find_share(cluster)
    if share is None or share.alone:
        return
    # Hera's own UserContainer leaves out the restart policy.
    sidecar = models.UserContainer.model_validate(build_lease_sidecar(cluster, share, role))
    init_containers: Any = template.init_containers or []
    template.init_containers = [*init_containers, sidecar]
    # The account's token is a volume, as only the sidecar mounts it.
    token = models.Volume.model_validate({"name": TOKEN, "projected": {"sources": TOKEN_SOURCES}})
    volumes: Any = template.volumes or []
    template.volumes = [*volumes, EmptyDirVolume(name=NAME, mount_path=DIRECTORY), token]
    env: Any = template.env or []
    template.env = [*env, models.EnvVar(name=fencing.VARIABLE, value=FILE)]
    template.service_account_name = ACCOUNT


def build_lease_sidecar(cluster: Cluster, share: Share, role: str) -> JsonObject:
    """Build the sidecar container that holds the device lease, one for each claim."""
    limits = {"memory": "256Mi"}
    if cluster.limits:
        limits["cpu"] = EXECUTOR_LIMITS["cpu"]
    options = {
        # Runs that claim no devices lease them by their group.
        "group": claim_tag(share, role) if share.device_class else share.group,
        "policy": share.policy,
        "patience": f"{share.patience:g}",
        "file": FILE,
        "run": "{{workflow.parameters.run}}",
        "namespace": "{{workflow.namespace}}",
    }
    return {
        "name": NAME,
        "image": cluster.images.format(image="base"),
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "command": PROGRAM,
        "args": encode_flags(options),
        # The lease belongs to the workflow: it is deleted with it.
        "env": [
            {"name": "TUNELOOP_OWNER_NAME", "value": "{{workflow.name}}"},
            {"name": "TUNELOOP_OWNER_UID", "value": "{{workflow.uid}}"},
        ],
        "startupProbe": {
            "exec": {"command": ["test", "-s", FILE]},
            "periodSeconds": 1,
            "failureThreshold": FOREVER,
        },
        "resources": {
            "requests": {"cpu": "10m", "memory": "128Mi"},
            "limits": limits,
        },
        "securityContext": RESTRICTED_CONTAINER,
        "volumeMounts": [
            {"name": NAME, "mountPath": DIRECTORY},
            {"name": TOKEN, "mountPath": ACCOUNT_FILES, "readOnly": True},
        ],
    }


def find_lease_sidecar(template: JsonMapping) -> JsonMapping | None:
    """Return the lease sidecar of a rendered template, or None."""
    for container in template.get("initContainers", ()):
        if container.get("name") == NAME:
            sidecar: JsonMapping = container
            return sidecar
    return None
