"""A Workflow whose pods ask for the memory that `memory_estimate` finds, where their role's memory is ``auto``.

Such a pod is rendered with a request and no limit (`tuneloop.workflow.settings`). Once the whole workflow is there to
be read, request and limit are set to what its stage needs; where only a part of that is known, the request alone, and
where nothing is, it stays as it was: a guess must not be what a pod dies of.
"""

from typing import Any

import hera.workflows

from tuneloop.argo import memory_estimate
from tuneloop.argo.claim_steps import connect_seats
from tuneloop.argo.claims import share_of
from tuneloop.argo.colocation import parse_memory_quantity
from tuneloop.argo.jobset import dump_manifest
from tuneloop.workflow.manifest import labels_of, parse_applied_object
from tuneloop.workflow.pod_loop import expand_pod, find_pod
from tuneloop.workflow.rendered_stages import container_of, read_loop, read_stage
from tuneloop.workflow.settings import GROUP_LABEL, UNKNOWN


class Workflow(hera.workflows.Workflow):
    """Hera's, fitted when it is rendered."""

    def to_dict(self) -> Any:
        """Return the Workflow as a mapping; also what its YAML is made of."""
        made = super().to_dict()
        connect_seats(made)
        set_pod_memory(made)
        return made


def set_pod_memory(workflow: dict[str, Any]) -> None:
    """Set the memory of the pods of `workflow` that are rendered without a limit, as far as it can be estimated. Raises
    UserError where the configuration of the model cannot be read."""
    found = ((template, parse_applied_object(template)) for template in workflow["spec"].get("templates", []))
    resources = ((template, job, container_of(template, job).get("resources", {})) for template, job in found)
    unlimited = [(t, j) for t, j, of in resources if "memory" in {*of.get("requests", {})} - {*of.get("limits", {})}]
    if not unlimited:
        return
    pod, (within, _) = find_pod(workflow), expand_pod(workflow)
    stages = {t["name"]: read_stage(t) for t in within["spec"]["templates"]}
    every = list(stages.values())
    model, context = memory_estimate.model_of(every), memory_estimate.context_of(every)
    if not isinstance(model, memory_estimate.Model):
        return
    inner = [stages[name] for name in read_loop(within)]
    share = share_of(workflow)
    for template, job in unlimited:
        run = inner if template is pod else [stages[template["name"]]]
        parts = [part for stage in run for part in memory_estimate.estimate_memory_parts(stage, model, context)]
        if parts:
            small = share.request if share and GROUP_LABEL in labels_of(job or template) else ""
            limited = all(memory_estimate.is_memory_estimate_complete(stage, model, context) for stage in run)
            _ask(container_of(template, job), memory_estimate.compute_memory_request(run, parts), limited, small)
        if job:
            template["resource"]["manifest"] = dump_manifest(job)


def _ask(container: dict[str, Any], amount: int, limited: bool, small: str) -> None:
    """Write `amount` bytes into `container`: as request and limit, or as a request that is at least the default's.

    Args:
        small: a request that stays, as far as it is below the limit.
    """
    resources = container["resources"]
    text = f"{amount >> 20}Mi"
    if limited:
        resources["limits"] = {**resources.get("limits", {}), "memory": text}
    if small and amount >= parse_memory_quantity(small):
        return
    if limited or amount > parse_memory_quantity(UNKNOWN):
        resources["requests"]["memory"] = text
