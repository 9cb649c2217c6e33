"""Host memory of runs that share a node's devices, by their rendered workflow.

Pods have low requests and high limits. The scheduler adds the requests of all runs, while only the
holders of a device lease use memory up to their limits. So two sums must fit the node: the
requests, or the last run's pods are never scheduled; and the memory used at a time, or the kernel
kills a pod. Trainers that stay in memory between leases (the gateway's sessions) also need pinned
host memory for weights and Adam's two moments.

`preflight.py` asks it before a run is submitted, and `tuneloop plan` prints it. What a pod uses is
estimated elsewhere (`argo/memory_estimate.py`): only requests and limits of the rendered pods are
read here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuneloop.argo.training_memory import compute_trainer_memory
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.wording import format_count
from tuneloop.extensions.sharing.claims import share_of
from tuneloop.extensions.sharing.settings import Share
from tuneloop.workflow.manifest import labels_of, list_calls
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import GROUP_LABEL, ROLE_LABEL


@dataclass(frozen=True)
class Colocation:
    """Memory of runs on one node, in bytes; None: unknown.

    Attributes:
        runs: how many there are.
        request: of the stage pods that a run has at a time.
        limit: of a run's largest stage, as one stage holds the lease at a time.
        server_request: of a run's servers.
        server_limit: of a run's servers.
        overhead: of everything else on the node.
        node: the whole memory of the node.
    """

    runs: int
    request: int
    limit: int | None
    server_request: int
    server_limit: int | None
    overhead: int
    node: int | None

    @property
    def requested(self) -> int:
        """Bytes that the pods of all runs request together."""
        return self.runs * (self.request + self.server_request) + self.overhead

    @property
    def used(self) -> int | None:
        """Bytes used at a time, at most; None where a limit is not known."""
        if self.limit is None or self.server_limit is None:
            return None
        return self.limit + self.runs * self.server_limit + self.overhead

    def excess(self) -> Iterator[tuple[str, int]]:
        """Yield each sum that does not fit on the node, as ``request`` or ``use``, and its
        bytes.
        """
        for name, amount in (("request", self.requested), ("use", self.used)):
            if self.node is not None and amount is not None and amount > self.node:
                yield name, amount

    def describe_request(self) -> str:
        """Describe the terms of `requested`."""
        run = format_gib(self.request)
        if self.server_request:
            run += f" + {format_gib(self.server_request)} server"
        overhead = format_gib(self.overhead)
        return f"{self.runs} × ({run}) + {overhead} overhead"

    def describe_use(self) -> str:
        """Describe the terms of `used`."""
        terms = format_gib(self.limit or 0)
        if self.server_limit:
            terms += f" + {self.runs} × {format_gib(self.server_limit)} server"
        overhead = format_gib(self.overhead)
        return f"{terms} + {overhead} overhead"


@dataclass(frozen=True)
class PodMemory:
    """What a pod requests, and its limit; bytes."""

    request: int
    limit: int | None


def compute_colocations(workflow: JsonMapping) -> dict[str, Colocation]:
    """Compute role → its runs on one node; empty where runs share nothing.

    The only role is ``""`` where trainers and samplers share a node.
    """
    share = share_of(workflow)
    if not share or share.alone:
        return {}
    stages_at_once = 1
    pods_by_role: dict[str, list[JsonMapping]] = {}
    for template in workflow["spec"]["templates"]:
        # An asynchronous loop has the pods of two stages at a time: one waits for the lease. Such a
        # loop is known by the name of a task that `argo/loop.py: build_turn` draws.
        if any(call["name"] == "ahead" for call in list_calls(template)):
            stages_at_once = 2
        labels = labels_of(template)
        if GROUP_LABEL in labels:
            role = "" if share.roles == "together" else labels[ROLE_LABEL]
            pods_by_role.setdefault(role, []).append(template)
    return {role: _add_memory(pods, stages_at_once, share) for role, pods in pods_by_role.items()}


def _add_memory(pods: Sequence[JsonMapping], stages_at_once: int, share: Share) -> Colocation:
    """Add up the memory of the pods of a role.

    Args:
        pods: their templates: stages, and servers, which are daemons.
        stages_at_once: how many stages of a run have a pod at a time.
        share: has the number of runs and the node's memory.
    """
    stages: list[PodMemory] = []
    servers: list[PodMemory] = []
    for pod in pods:
        processes = servers if pod.get("daemon") else stages
        processes.append(_read_memory(pod))
    requests = sorted([stage.request for stage in stages], reverse=True)
    limits = _list_limits(stages)
    server_limits = _list_limits(servers)
    return Colocation(
        runs=share.runs_per_claim,
        # Which stages meet in an asynchronous loop is not known: the largest may.
        request=sum(requests[:stages_at_once]),
        limit=None if limits is None else max(limits, default=0),
        server_request=sum(server.request for server in servers),
        server_limit=None if server_limits is None else sum(server_limits),
        overhead=int(parse_resource_quantity(share.overhead)),
        node=int(parse_resource_quantity(share.node_memory)) if share.node_memory else None,
    )


def check_colocation(workflow: JsonMapping) -> None:
    """Refuse runs that do not fit on one node. Raises UserError with the sum of their memory."""
    for role, runs in compute_colocations(workflow).items():
        for name, amount in runs.excess():
            group = (
                f"{format_count(runs.runs, 'run')}, {role}s,"
                if role
                else format_count(runs.runs, "run")
            )
            terms = runs.describe_use()
            setting = "memory (batch, length)"
            if name == "request":
                # Requests are a setting; what a stage uses follows from its work.
                terms = runs.describe_request()
                setting = "cluster.share.request"
            total = format_gib(amount)
            remedy = f"{group} {name} {terms} = {total}; lower {setting} or runs_per_claim"
            raise UserError("cluster.share.node_memory", format_gib(runs.node or 0), remedy)


def describe_colocation(workflow: JsonMapping, parameters: int | None) -> Iterator[str]:
    """Yield the lines that describe the memory plan of runs that share a node.

    Args:
        workflow: as it is rendered.
        parameters: of the model; None: unknown.
    """
    for role, runs in compute_colocations(workflow).items():
        pods = f"{role}s" if role else "stages"
        title = f"memory of {format_count(runs.runs, 'run')} whose {pods} share a node"
        if runs.node:
            title += f" of {format_gib(runs.node)}"
        yield title
        requested = format_gib(runs.requested)
        yield f"  requested: {runs.describe_request()} = {requested}"
        use = "not known: a stage has no limit"
        if runs.used is not None:
            use = f"{runs.describe_use()} = {format_gib(runs.used)}"
        yield f"  used at a time, at most: {use}"
        # A sampler has no optimizer to keep in memory.
        if parameters and role != "sampler":
            weights, adam = compute_trainer_memory(parameters)
            parts = f"{runs.runs} × ({format_gib(weights)} weights + {format_gib(adam)} Adam)"
            total = format_gib(runs.runs * (weights + adam))
            yield f"  if trainers stayed in host memory between leases: {parts} = {total}"


def format_gib(count: float) -> str:
    """Format bytes as ``22.5 GiB``, the unit of Kubernetes."""
    return f"{count / (1 << 30):.3g} GiB"


def _read_memory(template: JsonMapping) -> PodMemory:
    resources = template["container"]["resources"]
    limit = resources.get("limits", {}).get("memory")
    return PodMemory(
        request=int(parse_resource_quantity(resources["requests"]["memory"])),
        limit=int(parse_resource_quantity(limit)) if limit else None,
    )


def _list_limits(pods: Sequence[PodMemory]) -> list[int] | None:
    """List the limits of all pods; None if one has no limit."""
    limits = [pod.limit for pod in pods if pod.limit is not None]
    return limits if len(limits) == len(pods) else None
