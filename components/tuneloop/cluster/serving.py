"""The rollout servers of a rendered workflow as a Deployment and a Service, which outlive runs.

`tuneloop render --servers` prints them (`cli/author.py`). Of the server's template only what is
copied here reaches the Deployment: the fields in `FIELDS`, the volumes, and the one container
without its sidecars. Tests: `tests/unit/argo/test_pods.py`, `tests/golden/test_golden.py`.
"""

import json
from typing import Any

from tuneloop.argo.pod_fields import TOKENS
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import labels_of
from tuneloop.workflow.pod_hook import collect_pod_changes
from tuneloop.workflow.pod_settings import MAIN, fit_patch
from tuneloop.workflow.settings import GROUP_LABEL, Cluster, ResourceRole
from tuneloop.workflow.strategic_merge import apply_patch

GRACE = "terminationGracePeriodSeconds"
ROLE: ResourceRole = "sampler"
FIELDS = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "securityContext",
    GRACE,
    "nodeSelector",
    "tolerations",
)
"""The fields of a workflow or template that a pod has, too, under the same name. A field that
`argo/pod_fields.py` comes to set is left out of the Deployment unless it is named here, or is part
of the patch of the settings."""


def render_servers(workflow: JsonMapping, name: str, config: Any) -> list[JsonObject]:
    """Render the server of a run's template `serve` as a Deployment, and a Service before it.

    Each replica is one pod, and requires no token.

    Args:
        workflow: as it is rendered.
        name: of the Deployment and the Service.
        config: the settings of the pipeline; its `engine.server.replicas` is the number of pods.

    Raises:
        UserError: the workflow starts no server, or one that depends on its run or on a device
            lease.
    """
    template = _find_server(workflow, name)
    cluster: Cluster = config.cluster
    own_labels = {"app.kubernetes.io/name": name}
    metadata: JsonObject = {
        "name": name,
        "labels": own_labels | {"app.kubernetes.io/part-of": "tuneloop"},
    }
    pod_metadata: JsonObject = {"labels": template["metadata"]["labels"] | own_labels}
    annotations = cluster.pod_settings(ROLE).build_annotations()
    if annotations:
        pod_metadata["annotations"] = annotations
    deployment: JsonObject = {
        "selector": {"matchLabels": own_labels},
        "template": {
            "metadata": pod_metadata,
            "spec": _build_pod(workflow, template, cluster),
        },
    }
    # One is the default of Kubernetes: it is left out, so that applying it keeps an autoscaler's
    # number.
    if config.engine.server.replicas > 1:
        deployment = {"replicas": config.engine.server.replicas} | deployment
    port = template["container"]["ports"][0]["containerPort"]
    service: JsonObject = {
        "selector": own_labels,
        "ports": [{"name": "http", "port": port, "targetPort": port}],
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": deployment,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": service,
        },
    ]


def _find_server(workflow: JsonMapping, name: str) -> JsonObject:
    """Return the template of the server, if it may run without its workflow."""
    for template in workflow["spec"]["templates"]:
        if template["name"] == "serve":
            is_shared = GROUP_LABEL in labels_of(template)
            if "--weights" in _read_constant_flags(template) and not is_shared:
                return dict(template)
    raise UserError(
        "--servers",
        name,
        "need engine=vllm, engine.weights=pull and engine.weights.url=URL, without cluster.share",
    )


def _read_constant_flags(template: JsonMapping) -> dict[str, str]:
    """Read the flags of a container; without those whose value is known only in a run.

    Every flag has one value (`core/program.py: encode_flags`): a flag without one would shift the
    pairs after it.
    """
    words = template["container"]["args"]
    return {flag: value for flag, value in zip(words[::2], words[1::2]) if "{{" not in value}


def _build_pod(workflow: JsonMapping, template: JsonMapping, cluster: Cluster) -> JsonObject:
    """Build the spec of a server's pod from its template, the changes of extensions, and the patch
    of the settings.
    """
    fields = dict(workflow["spec"])
    fields.update(template)
    # The rest of a server's patch is for Argo's attempts, or is merged below.
    patch: JsonObject = json.loads(template.get("podSpecPatch", "{}"))
    if GRACE in patch:
        fields[GRACE] = patch[GRACE]
    pod = {key: fields[key] for key in FIELDS if key in fields}
    pod["volumes"] = _drop_run_fields(template["volumes"])
    container = dict(template["container"])
    container["name"] = MAIN
    container["args"] = [word for flag in _read_constant_flags(template).items() for word in flag]
    # Argo's probe waits for the start of the server; a Deployment's pod is ready or not at any
    # time.
    container["readinessProbe"] = container["readinessProbe"] | {"failureThreshold": 3}
    for key in ("env", "volumeMounts"):
        container[key] = _drop_run_fields(container[key])
    pod["containers"] = [container]
    # With these a Service called vllm sets VLLM_PORT, which vLLM reads as its own.
    pod["enableServiceLinks"] = False
    pod = apply_patch(pod, collect_pod_changes(cluster, ROLE, "rollout").spec)
    pod = apply_patch(pod, fit_patch(cluster.build_spec_patch(ROLE)))
    for patched in pod["containers"]:
        if patched["name"] == MAIN:
            patched["name"] = "serve"
    return pod


def _drop_run_fields(items: list[JsonObject]) -> list[JsonObject]:
    """Return the items that do not depend on a run, nor on its token."""
    return [item for item in items if "{{" not in str(item) and TOKENS not in str(item)]
