"""A rollout server's pod that requests less while the server sleeps (`engine.asleep`, `tuneloop.kube.resize`).

Its container alone has the token, of an account that may resize pods: `manifests/components/resize`, whose policy lets
a pod change its own requests, and nothing else. Kueue deletes a pod whose requests are no longer those it admitted,
unless the pod is in a group, which it compares by an earlier hash; so a queued server is a group of one pod."""

import json
from collections.abc import Mapping
from typing import Any

from tuneloop.argo.pod_fields import TOKEN_SOURCES
from tuneloop.core.program import encode_value
from tuneloop.kube.resize import ACCOUNT_FILES, CONTAINER
from tuneloop.workflow.settings import QUEUE_LABEL

ACCOUNT = "tuneloop-resize"
FLAG = "--asleep"
GROUP = "kueue.x-k8s.io/pod-group-name"
OF_ONE = {"kueue.x-k8s.io/pod-group-total-count": "1", "kueue.x-k8s.io/retriable-in-group": "false"}
"""Annotations of a pod that is a group by itself: its quota is released when it ends, even if it failed."""
IN_PLACE = [{"resourceName": name, "restartPolicy": "NotRequired"} for name in ("cpu", "memory")]


def resize_while_asleep(made: Any, asleep: Mapping[str, str]) -> None:
    """Make the server `made` request only `asleep` while it sleeps."""
    from hera.workflows import ProjectedVolume, models

    patch = json.loads(made.pod_spec_patch or "{}")
    patch.setdefault("containers", []).append({"name": CONTAINER, "resizePolicy": IN_PLACE})
    made.pod_spec_patch = json.dumps(patch, separators=(",", ":"))
    made.args += [FLAG, encode_value(dict(asleep))]
    made.service_account_name = ACCOUNT
    sources = [models.VolumeProjection.model_validate(each) for each in TOKEN_SOURCES]
    made.volumes = [
        *made.volumes,
        ProjectedVolume(name="account", mount_path=ACCOUNT_FILES, sources=sources),
    ]
    if QUEUE_LABEL in made.labels:
        made.labels = {**made.labels, GROUP: "serve-{{workflow.uid}}-{{retries}}"}
        made.annotations = OF_ONE
