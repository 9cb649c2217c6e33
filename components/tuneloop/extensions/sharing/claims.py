"""Devices that runs share: which pods of a Workflow use a claim, and where they are placed.

Argo 3.7 has no field for a pod's claims, so ``podSpecPatch`` writes them. The first step reserves a
claim (`tuneloop.cluster.reservations`), and outputs its name as a global parameter, which every
template reads. This works whether a submission, a schedule, a template or the previous workflow
started the workflow.

It runs where a workflow is rendered, after all templates are there (`pod.py`). The name of the
parameter is a contract with `cluster/reservations.py`.
"""

import json
from collections.abc import Iterator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.extensions.sharing.settings import Share
from tuneloop.sharing.claim_request import DEVICES
from tuneloop.workflow.manifest import labels_of
from tuneloop.workflow.settings import GROUP_LABEL, ROLE_LABEL

ANNOTATION = "tuneloop.dev/share"
"""Annotation of a Workflow: its `Share`, as JSON."""

ROLE_BY_IMAGE = {"rollout": "sampler"}
"""Logical image → role; an image that is not listed is a trainer's. Unless ``share.roles`` is
``together``, each role has claims and nodes of its own."""
TRAINER = "trainer"
"""The role of every image that `ROLE_BY_IMAGE` lacks."""
PLACING = ("affinity", "nodeName", "nodeSelector", "resourceClaims")
"""Fields of a pod that decide on which node it runs: lint refuses other values of them than those
of `pod_patch` and `build_affinity`, so that a field that these write is listed here."""


def role_of(image: str) -> str:
    """Return the role of a stage with this logical image: ``trainer`` or ``sampler``."""
    return ROLE_BY_IMAGE.get(image, TRAINER)


def claim_output(share: Share, role: str) -> str:
    """Return the output parameter with the name of the claim that `role` uses."""
    return "claim" if share.roles == "together" else f"claim-{role}"


def claim_tag(share: Share, role: str) -> str:
    """Return Argo's tag for the claim's name, which the templates of a role's stages have. With
    `share.alone` the name is that of a ResourceClaimTemplate.
    """
    return "{{workflow.outputs.parameters.%s}}" % claim_output(share, role)


def build_sharing_labels(share: Share, role: str) -> dict[str, str]:
    """Build the labels of a pod that shares devices. `colocation.py` and lint find such pods by the
    first, in the rendered workflow."""
    return {GROUP_LABEL: share.group, ROLE_LABEL: role}


def pod_patch(share: Share, role: str) -> JsonObject:
    """Return the pod patch that gives the container ``main`` the claim's devices; empty if none are
    claimed.
    """
    if not share.device_class:
        return {}
    # A pod that has its devices to itself gets a claim made for it, which ends with the pod.
    source = "resourceClaimTemplateName" if share.alone else "resourceClaimName"
    return {
        "resourceClaims": [{"name": DEVICES, source: claim_tag(share, role)}],
        "containers": [{"name": "main", "resources": {"claims": [{"name": DEVICES}]}}],
    }


def build_affinity(share: Share, role: str) -> JsonObject:
    """Build the affinity that keeps trainers and samplers apart; empty if pods may run on any
    node.

    Of `Share.roles` this is the one place that tells ``strict`` from ``apart``: any other value
    but ``together`` counts as ``apart``.
    """
    if share.roles == "together":
        return {}
    nodes_of_role = {
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": [role]}],
    }
    if share.roles == "strict":
        terms = {"nodeSelectorTerms": [nodes_of_role]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    # A node without the label is taken as well, then rather one without pods of the other role.
    pods_of_others = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchExpressions": [
                {"key": GROUP_LABEL, "operator": "In", "values": [share.group]},
                {"key": ROLE_LABEL, "operator": "NotIn", "values": [role]},
            ],
        },
    }
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    return {
        "nodeAffinity": {preferred: [{"weight": 100, "preference": nodes_of_role}]},
        "podAntiAffinity": {preferred: [{"weight": 50, "podAffinityTerm": pods_of_others}]},
    }


def share_of(workflow: JsonMapping) -> Share | None:
    """Return how a rendered workflow shares devices."""
    annotations = workflow.get("metadata", {}).get("annotations") or {}
    text = annotations.get(ANNOTATION)
    return Share.model_validate_json(text) if text else None


def find_placement_errors(workflow: JsonMapping) -> Iterator[UserError]:
    """Yield an error for each placement field of a pod that conflicts with the devices its runs
    share.
    """
    spec = workflow.get("spec") or {}
    share = share_of(workflow)
    sharing = [item for item in spec.get("templates", ()) if GROUP_LABEL in labels_of(item)]
    if not sharing:
        return
    if share is None:
        group = labels_of(sharing[0])[GROUP_LABEL]
        remedy = (
            "is shared, but no step reserves its claim: "
            "give define_workflow() the cluster of stage_template()"
        )
        yield UserError(f"templates.{sharing[0]['name']}", group, remedy)
        return
    # What the workflow says of all pods places those that share, too.
    yield from _find_foreign_fields("spec", spec, {})
    for template in sharing:
        role = labels_of(template).get(ROLE_LABEL)
        expected: JsonObject = {}
        if role:
            expected = pod_patch(share, role)
            expected["affinity"] = build_affinity(share, role)
        yield from _find_foreign_fields(f"templates.{template['name']}", template, expected)


def _find_foreign_fields(path: str, pod: JsonMapping, expected: JsonMapping) -> Iterator[UserError]:
    """Yield an error for each field that places a pod and has not the expected value.

    Args:
        path: of the workflow's spec or of a template.
        pod: the fields of either; its patch counts as well.
        expected: field → the value that follows from the devices.
    """
    fields = dict(pod) | json.loads(pod.get("podSpecPatch") or "{}")
    for field, value in fields.items():
        if field in PLACING and value != expected.get(field):
            remedy = "is decided by the devices that runs share: leave it out"
            yield UserError(f"{path}.{field}", value, remedy)
