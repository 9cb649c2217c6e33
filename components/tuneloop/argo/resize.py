"""Render the pod of a rollout server that requests less while the server sleeps (`engine.asleep`).

The server changes its pod itself, by `tuneloop.kube.resize`, when it falls asleep or wakes up.

Only its container has the token of an account that may resize pods (`manifests/components/resize`).
That manifest's policy lets a pod change its own requests, and nothing else. Kueue deletes a pod
whose requests are no longer those that it admitted. It does not compare them if the pod is in a
group: there it compares a hash that was written when the pod was created. A queued server is
therefore a group of one pod.

`argo/template.py: server_template` calls it. `tests/unit/argo/test_resize.py` tests it with the
manifest, and `tests/cluster/test_resize.py` on a cluster.
"""

from collections.abc import Mapping
from typing import Any

from hera.workflows import ProjectedVolume, models

from tuneloop.argo.pod_fields import TOKEN_SOURCES, patch_container
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import encode_value
from tuneloop.kube.resize import ACCOUNT_FILES, CONTAINER
from tuneloop.workflow.settings import QUEUE_LABEL

ACCOUNT = "tuneloop-resize"
"""The service account of ``manifests/components/resize``."""
FLAG = "--asleep"
"""The flag of `inference/server.py`, which gives its value to `kube/resize.py: PodResizer`."""
GROUP = "kueue.x-k8s.io/pod-group-name"
GROUP_OF_ONE = {
    "kueue.x-k8s.io/pod-group-total-count": "1",
    "kueue.x-k8s.io/retriable-in-group": "false",
}
"""Annotations of a pod that is a group by itself: its quota is released when it ends, even if it
failed.
"""
IN_PLACE = [
    {"resourceName": "cpu", "restartPolicy": "NotRequired"},
    {"resourceName": "memory", "restartPolicy": "NotRequired"},
]
"""The container's `resizePolicy`: the kubelet changes both without a restart of the container."""


def resize_while_asleep(template: Any, asleep: Mapping[str, str]) -> None:
    """Render what a server needs to request less while it sleeps: a flag, an account, a policy. The
    account replaces that of `cluster.pod.service_account`.

    Args:
        template: of the server's pod, a Container of Hera.
        asleep: resource → what the pod requests then, as Kubernetes writes quantities.
    """
    container: JsonObject = {"name": CONTAINER, "resizePolicy": IN_PLACE}
    template.pod_spec_patch = patch_container(template.pod_spec_patch, container)
    # The server itself asks for the change when it falls asleep or wakes up.
    template.args += [FLAG, encode_value(dict(asleep))]
    template.service_account_name = ACCOUNT
    sources = [models.VolumeProjection.model_validate(source) for source in TOKEN_SOURCES]
    account = ProjectedVolume(name="account", mount_path=ACCOUNT_FILES, sources=sources)
    template.volumes += [account]
    # A name for each attempt: Kueue takes no further pod into a group of one.
    if QUEUE_LABEL in template.labels:
        group = "serve-{{workflow.uid}}-{{retries}}"
        template.labels = template.labels | {GROUP: group}
        template.annotations = (template.annotations or {}) | GROUP_OF_ONE
