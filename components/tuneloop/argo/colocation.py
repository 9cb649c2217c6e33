"""Host memory of runs that share a node's devices, by their rendered workflow.

Pods have low requests and high limits: the scheduler adds the requests of all runs, while only the holders of a device
lease use memory up to their limits. So two sums must fit the node: the requests, or the last run's pods are never
scheduled; and the memory used at a time, or the kernel kills a pod. Trainers that stay in memory between leases (the
gateway's sessions) also need pinned host memory for weights and Adam's two moments."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tuneloop.argo.claims import share_of
from tuneloop.argo.training_memory import compute_trainer_memory
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.manifest import labels_of, list_calls
from tuneloop.workflow.settings import GROUP_LABEL, ROLE_LABEL

UNITS = {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)}
UNITS |= {
    unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)
}


@dataclass(frozen=True)
class Colocation:
    """Memory of `runs` runs on one node, in bytes (None: unknown): the `request` of the stage pods that a run has at a
    time; the `limit` of its largest stage, as one stage holds the lease at a time; `server_request` and `server_limit`
    of the run's servers; `overhead` of everything else on the node; and the whole memory of the `node`."""

    runs: int
    request: int
    limit: int | None
    server_request: int
    server_limit: int | None
    overhead: int
    node: int | None

    @property
    def requested(self) -> int:
        return self.runs * (self.request + self.server_request) + self.overhead

    @property
    def used(self) -> int | None:
        """Bytes used at a time, at most; None where a limit is not known."""
        if self.limit is None or self.server_limit is None:
            return None
        return self.limit + self.runs * self.server_limit + self.overhead

    def excess(self) -> Iterator[tuple[str, int]]:
        """Yield each sum that does not fit on the node, as ``request`` or ``use``, and its bytes."""
        for what, amount in (("request", self.requested), ("use", self.used)):
            if self.node is not None and amount is not None and amount > self.node:
                yield what, amount


def compute_colocations(workflow: JsonMapping) -> dict[str, Colocation]:
    """Compute role → its runs on one node, ``""`` where roles sit together; empty where runs share nothing."""
    share = share_of(workflow)
    if not share or share.alone:
        return {}
    templates = workflow["spec"]["templates"]
    # An asynchronous loop has the pods of two stages at a time, one of which waits for the lease.
    stages = (
        2
        if any(call["name"] == "ahead" for template in templates for call in list_calls(template))
        else 1
    )
    roles: dict[str, list[JsonMapping]] = {}
    for template in templates:
        given = labels_of(template)
        if GROUP_LABEL in given:
            roles.setdefault("" if share.roles == "together" else given[ROLE_LABEL], []).append(
                template
            )
    found = {}
    for role, pods in roles.items():
        own = [_memory(template) for template in pods if not template.get("daemon")] or [(0, 0)]
        servers = [_memory(template) for template in pods if template.get("daemon")]
        found[role] = Colocation(
            runs=share.runs_per_claim,
            request=sum(sorted((request for request, _ in own), reverse=True)[:stages]),
            limit=_known(own, max),
            server_request=sum(request for request, _ in servers),
            server_limit=_known(servers, sum),
            overhead=int(parse_resource_quantity(share.overhead)),
            node=int(parse_resource_quantity(share.node_memory)) if share.node_memory else None,
        )
    return found


def check_colocation(workflow: JsonMapping) -> None:
    """Refuse runs that do not fit on one node. Raises UserError with the sum of their memory."""
    for role, of in compute_colocations(workflow).items():
        for what, amount in of.excess():
            sums = f"{of.runs} runs{f', {role}s,' if role else ''} {what} {_terms(of)[what]} = {format_gib(amount)}"
            lower = "cluster.share.request" if what == "request" else "memory (batch, length)"
            remedy = f"{sums}; lower {lower} or runs_per_claim"
            raise UserError("cluster.share.node_memory", format_gib(of.node or 0), remedy)


def describe_colocation(workflow: JsonMapping, parameters: int | None) -> Iterator[str]:
    """Yield the lines that describe the memory plan."""
    for role, of in compute_colocations(workflow).items():
        node = f" of {format_gib(of.node)}" if of.node else ""
        yield f"memory of {of.runs} runs whose {f'{role}s' if role else 'stages'} share a node{node}"
        terms = _terms(of)
        yield f"  requested: {terms['request']} = {format_gib(of.requested)}"
        used = (
            f"{terms['use']} = {format_gib(of.used)}"
            if of.used is not None
            else "not known: a stage has no limit"
        )
        yield f"  used at a time, at most: {used}"
        if parameters and role != "sampler":
            weights, adam = compute_trainer_memory(parameters)
            parts = f"{of.runs} × ({format_gib(weights)} weights + {format_gib(adam)} Adam)"
            total = format_gib(of.runs * (weights + adam))
            yield f"  if trainers stayed in host memory between leases: {parts} = {total}"


def format_gib(count: float) -> str:
    """Format bytes as ``22.5 GiB``, the unit of Kubernetes."""
    return f"{count / (1 << 30):.3g} GiB"


def parse_resource_quantity(quantity: object) -> Decimal:
    """Parse a Kubernetes quantity (``500m``, ``2Gi``, ``8``) into a number, without kubernetes' parser, which is slow
    to import. Raises UserError where it is none."""
    match = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(\w*)", str(quantity))
    if not match or match[2] not in UNITS:
        raise UserError("quantity", quantity, "is not a Kubernetes quantity, as in 500m or 2Gi")
    return Decimal(match[1]) * UNITS[match[2]]


def _terms(of: Colocation) -> dict[str, str]:
    """Return the terms of both sums, as text."""
    beside = f" + {format_gib(of.server_request)} server" if of.server_request else ""
    servers = f" + {of.runs} × {format_gib(of.server_limit)} server" if of.server_limit else ""
    return {
        "request": f"{of.runs} × ({format_gib(of.request)}{beside}) + {format_gib(of.overhead)} overhead",
        "use": f"{format_gib(of.limit or 0)}{servers} + {format_gib(of.overhead)} overhead",
    }


def _memory(template: JsonMapping) -> tuple[int, int | None]:
    """Return request and limit of a template's pod."""
    resources = template["container"]["resources"]
    limit = resources.get("limits", {}).get("memory")
    request = int(parse_resource_quantity(resources["requests"]["memory"]))
    return request, int(parse_resource_quantity(limit)) if limit else None


def _known(pods: Sequence[tuple[int, int | None]], combine: Any) -> int | None:
    """Combine the limits of all pods; None if one has no limit."""
    limits = [limit for _, limit in pods if limit is not None]
    return int(combine(limits)) if len(limits) == len(pods) else None
