"""A sidecar of a stage's pod that holds the lease on shared devices (`cluster.share`): `tuneloop.sharing.sidecar`.

It is a native sidecar, an init container that is always restarted: Kubernetes starts the stage's container once its
startup probe has passed, and ends it after that container. It alone has a token, of an account that may only change
Leases. A file on a volume that both mount tells the stage's container until when the lease is valid."""

from typing import TYPE_CHECKING, Any

from tuneloop.argo.claims import claim_tag
from tuneloop.argo.pod_fields import RESTRICTED, TOKEN_SOURCES
from tuneloop.core import fencing
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.workflow.settings import Cluster, Share

if TYPE_CHECKING:
    from hera.workflows import Container

NAME = "lease"
ACCOUNT = "tuneloop-lease"
PLACE = "/lease"
FILE = f"{PLACE}/lease.json"
TOKEN = "lease-token"
ACCOUNT_FILES = "/var/run/secrets/kubernetes.io/serviceaccount"
FOREVER = 2**31 - 1
"""Failures allowed to the startup probe, one a second: a stage may wait long for the lease."""


def add_lease_sidecar(made: "Container", cluster: Cluster, role: str) -> None:
    """Add the lease sidecar to `made`, a stage that uses the shared devices of `role`; nothing if none are shared."""
    from hera.workflows import EmptyDirVolume, models

    share = cluster.share
    if share is None or share.alone:
        return
    volumes: Any = made.volumes or []
    env: Any = made.env or []
    # Hera's own UserContainer leaves out the restart policy.
    own = models.UserContainer.model_validate(
        build_lease_sidecar(share, role, cluster.images.format(image="base"))
    )
    made.init_containers = [*(made.init_containers or []), own]
    # The account's token, which only the sidecar mounts.
    token = models.Volume.model_validate({"name": TOKEN, "projected": {"sources": TOKEN_SOURCES}})
    made.volumes = [*volumes, EmptyDirVolume(name=NAME, mount_path=PLACE), token]
    made.env = [*env, models.EnvVar(name=fencing.VARIABLE, value=FILE)]
    made.service_account_name = ACCOUNT


def build_lease_sidecar(share: Share, role: str, image: str) -> JsonObject:
    """Build the sidecar container that holds the device lease, one for each claim."""
    group = claim_tag(share, role) if share.device_class else share.group
    given = {
        "group": group,
        "policy": share.policy,
        "patience": f"{share.patience:g}",
        "file": FILE,
        "run": "{{workflow.parameters.run}}",
        "namespace": "{{workflow.namespace}}",
    }
    owner = {"NAME": "{{workflow.name}}", "UID": "{{workflow.uid}}"}
    look = {
        "exec": {"command": ["test", "-s", FILE]},
        "periodSeconds": 1,
        "failureThreshold": FOREVER,
    }
    return {
        "name": NAME,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "command": ["python", "-m", "tuneloop.sharing.sidecar"],
        "args": encode_flags(given),
        "env": [{"name": f"TUNELOOP_OWNER_{key}", "value": value} for key, value in owner.items()],
        "startupProbe": look,
        "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": RESTRICTED,
        "volumeMounts": [
            {"name": NAME, "mountPath": PLACE},
            {"name": TOKEN, "mountPath": ACCOUNT_FILES, "readOnly": True},
        ],
    }


def find_lease_sidecar(template: JsonMapping) -> JsonMapping | None:
    """Return the lease sidecar of a rendered template, or None."""
    return next(
        (each for each in template.get("initContainers", ()) if each.get("name") == NAME), None
    )
