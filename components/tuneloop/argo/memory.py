"""A Workflow whose pods ask for the memory that `memory_estimate` finds, where `cluster.memory` is ``auto``.

Such a pod is rendered with a request and no limit (`tuneloop.workflow.settings`). Once the whole workflow is there to
be read, request and limit are set to what its stage needs; where only a part of that is known, the request alone, and
where nothing is, it stays as it was: a guess must not be what a pod dies of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hera.workflows

from tuneloop.argo.claim_steps import connect_seats
from tuneloop.argo.claims import share_of
from tuneloop.argo.colocation import number
from tuneloop.argo.jobset import written
from tuneloop.argo.memory_estimate import Model, asked, context_of, memory, model_of, whole
from tuneloop.workflow.manifest import applied, labels_of
from tuneloop.workflow.pod_loop import find_pod, unfold
from tuneloop.workflow.rendered_stages import container_of, read_loop, read_stage
from tuneloop.workflow.settings import GROUP_LABEL, UNKNOWN

LEAST = int(UNKNOWN.removesuffix("Gi")) << 30


class Workflow(hera.workflows.Workflow):
    """Hera's, fitted when it is rendered."""

    def to_dict(self) -> Any:
        """The Workflow as a mapping; also what its YAML is made of."""
        made = super().to_dict()
        connect_seats(made)
        fit(made)
        return made


def fit(workflow: dict[str, Any]) -> None:
    """Set the memory of the pods of `workflow` that are rendered without a limit, as far as it can be estimated.

    Raises:
        UserError: the configuration of the model cannot be read.
    """
    templates = workflow["spec"].get("templates", [])
    found = ((template, applied(template)) for template in templates)
    unlimited = [(template, job) for template, job in found if _unlimited(container_of(template, job))]
    if not unlimited:
        return
    pod, (within, _) = find_pod(workflow), unfold(workflow)
    stages = {t["name"]: read_stage(t) for t in within["spec"]["templates"]}
    model, context = model_of(list(stages.values())), context_of(list(stages.values()))
    if not isinstance(model, Model):
        return
    inner = [stages[name] for name in read_loop(within)]
    share = share_of(workflow)
    for template, job in unlimited:
        run = inner if template is pod else [stages[template["name"]]]
        parts = [part for stage in run for part in memory(stage, model, context)]
        if parts:
            container = container_of(template, job)
            small = share.request if share and GROUP_LABEL in labels_of(job or template) else ""
            _ask(container, asked(run, parts), all(whole(stage, model, context) for stage in run), small)
        if job:
            template["resource"]["manifest"] = written(job)


def _unlimited(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources", {})
    return "memory" in resources.get("requests", {}) and "memory" not in resources.get("limits", {})


def _ask(container: dict[str, Any], amount: int, limited: bool, small: str) -> None:
    """Write `amount` bytes into `container`: as request and limit, or as a request that is at least the default's.

    Args:
        small: a request that stays, as far as it is below the limit.
    """
    resources = container["resources"]
    text = f"{amount >> 20}Mi"
    if limited:
        resources["limits"] = {**resources.get("limits", {}), "memory": text}
    if small and amount >= number(small):
        return
    if limited or amount > LEAST:
        resources["requests"]["memory"] = text
