"""Devices that runs share: which pods of a Workflow use a claim, and where they are placed.

Argo 3.7 has no field for a pod's claims: ``podSpecPatch`` writes them. The first step reserves a claim
(`tuneloop.cluster.reservations`), and outputs its name as a global parameter, which every template reads; this works
whether a submission, a schedule, a template or the previous workflow started the workflow."""

import json
from collections.abc import Iterator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import labels_of
from tuneloop.workflow.settings import GROUP_LABEL, ROLE_LABEL, SHARE, Share

DEVICES = "devices"
"""The claim's name in a pod, and its only request."""
ROLES = {"rollout": "sampler"}
"""Logical image → role; an image that is not listed is a trainer's."""
TRAINER = "trainer"
TAKE = "take-claim"
GIVE = "give-claim"
END = "end-graph"
"""Templates of the first step, and of the exit handlers that release claims and that end a run's own graph."""
PLACING = ("affinity", "nodeName", "nodeSelector", "resourceClaims")
"""Fields of a pod that decide on which node it runs."""


def role_of(image: str) -> str:
    """Return the role of a stage with this logical image: ``trainer`` or ``sampler``."""
    return ROLES.get(image, TRAINER)


def claim_tag(share: Share, role: str) -> str:
    """Return the tag of the claim's name, for the templates of a role's stages."""
    return "{{workflow.outputs.parameters.%s}}" % claim_output(share, role)


def build_sharing_labels(share: Share, role: str) -> dict[str, str]:
    """Build the labels of a pod that shares devices."""
    return {GROUP_LABEL: share.group, ROLE_LABEL: role}


def pod_patch(share: Share, role: str) -> JsonObject:
    """Return the pod patch that gives the container ``main`` the claim's devices; empty if none are claimed."""
    if not share.device_class:
        return {}
    use = {"name": "main", "resources": {"claims": [{"name": DEVICES}]}}
    field = "resourceClaimTemplateName" if share.alone else "resourceClaimName"
    return {
        "resourceClaims": [{"name": DEVICES, field: claim_tag(share, role)}],
        "containers": [use],
    }


def build_affinity(share: Share, role: str) -> JsonObject:
    """Build the affinity that keeps trainers and samplers apart; empty if pods may run on any node."""
    if share.roles == "together":
        return {}
    at = {"matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": [role]}]}
    if share.roles == "strict":
        return {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [at]}
            }
        }
    other = {"key": ROLE_LABEL, "operator": "NotIn", "values": [role]}
    group = {"key": GROUP_LABEL, "operator": "In", "values": [share.group]}
    away = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchExpressions": [group, other]},
    }
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    return {
        "nodeAffinity": {preferred: [{"weight": 100, "preference": at}]},
        "podAntiAffinity": {preferred: [{"weight": 50, "podAffinityTerm": away}]},
    }


def place_pod_on_claim(container: JsonObject, share: Share, role: str) -> JsonObject:
    """Give `container` the claim's devices, and return the pod spec fields that place its pod."""
    patch = pod_patch(share, role)
    near = build_affinity(share, role)
    for use in patch.pop("containers", ()):
        container["resources"] |= use["resources"]
    return {**patch, **({"affinity": near} if near else {})}


def share_of(workflow: JsonMapping) -> Share | None:
    """Return how a rendered workflow shares devices."""
    text = (workflow.get("metadata", {}).get("annotations") or {}).get(SHARE)
    return Share.model_validate_json(text) if text else None


def find_placement_errors(workflow: JsonMapping) -> Iterator[UserError]:
    """Yield an error for each placement field of a pod that conflicts with the devices its runs share."""
    spec = workflow.get("spec") or {}
    share = share_of(workflow)
    pods = [(f"templates.{t['name']}", t, labels_of(t)) for t in spec.get("templates", ())]
    sharing = [(at, pod, given) for at, pod, given in pods if GROUP_LABEL in given]
    if sharing and not share:
        remedy = "is shared, but no step reserves its claim: give define_workflow() the cluster of stage_template()"
        yield UserError(sharing[0][0], sharing[0][2][GROUP_LABEL], remedy)
    elif share and sharing:
        for at, pod, given in [("spec", spec, {}), *sharing]:
            role = given.get(ROLE_LABEL)
            ours = (
                {**pod_patch(share, role), "affinity": build_affinity(share, role)} if role else {}
            )
            for field, value in {**pod, **json.loads(pod.get("podSpecPatch") or "{}")}.items():
                if field in PLACING and value != ours.get(field):
                    yield UserError(
                        f"{at}.{field}",
                        value,
                        "is decided by the devices that runs share: leave it out",
                    )


def claim_output(share: Share, role: str) -> str:
    """Return the output parameter with the name of the claim that `role` uses."""
    return "claim" if share.roles == "together" else f"claim-{role}"
