"""Keep a Deployment of rollout servers at as many replicas as `AutoscalingRule` decides.

The servers' load is read from ``/metrics``, under vLLM's names, at the pods' addresses, which only
the cluster and its nodes reach. The Deployment is changed by its subresource `scale`.

`tuneloop fleet autoscale` (`extensions/fleets/fleet_commands.py: autoscale_fleet`) calls
`scale_fleet` at intervals, always with the same rule. On a cluster it runs as
``manifests/components/rollout-autoscaler``: each further kind of object that is read here needs a
right in its ``rights.yaml``.
"""

import re
import time

from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.extensions.fleets.autoscaling_rule import AutoscalingRule, Iteration
from tuneloop.inference.fleet.service import Service
from tuneloop.kube.connection import connect_to_cluster
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import CLIENT_LABEL, RUN_LABEL

CLIENTS = f"{RUN_LABEL},{CLIENT_LABEL}"
"""Selects the pods of runs that sample with the engine `endpoint`."""
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)
"""The two metrics whose values are added up. Our own servers write them without labels
(`inference/http_api.py`). ``manifests/components/rollout-keda/scaledobject.yaml`` has their names
in its query."""


def scale_fleet(fleet: Service, rule: AutoscalingRule, run: Run | None = None) -> str:
    """Scale the Deployment that has the name of a Service once, as `rule` decides.

    Args:
        fleet: the Service of the rollout servers.
        rule: decides on the replicas, and keeps what it has seen.
        run: the run that they sample for; without it only requests count.

    Returns:
        The change in one line; empty if there was none.

    Raises:
        UserError: there is no such Deployment or Service, no metric of requests, or no permission.
        Unavailable, Unreachable: the API server, or a ready pod, does not answer.
    """
    cluster = connect_to_cluster(fleet.namespace, fleet.context)
    deployment = ("apps", "v1", fleet.namespace, "deployments", fleet.name)
    scale = cluster.custom.get_namespaced_custom_object_scale(*deployment)
    # The API leaves out a number of 0.
    replicas = scale["spec"].get("replicas", 0)
    counts = [count_requests(worker.url) for worker in fleet.discover()]
    # Pods that have ended send no requests.
    clients = [
        pod for pod in cluster.list_pods(CLIENTS) if pod.status.phase in ("Pending", "Running")
    ]
    last = read_iteration(run) if run else None
    decision = rule.decide(
        timestamp=time.time(),
        replicas=replicas,
        ready=len(counts),
        requests=sum(counts),
        clients=len(clients),
        last=last,
    )
    if decision == replicas:
        return ""
    cluster.custom.patch_namespaced_custom_object_scale(
        *deployment,
        {"spec": {"replicas": decision}},
    )
    reason = f"{len(counts)} ready, {sum(counts):g} requests, {len(clients)} clients"
    if last:
        total = last.idle + last.sampling
        reason += f", samplers idle {last.idle:.0f} s of {total:.0f} s an iteration"
    return f"{fleet.name}: {replicas} → {decision} replicas ({reason})"


def count_requests(url: str) -> float:
    """Count the completions that run and wait at a server. Raises as `scale_fleet`."""
    try:
        _, text = send_request("GET", f"{url}/metrics", timeout_s=5)
    except Unanswered as error:
        raise Unavailable(f"{url}/metrics cannot be reached from here: {error}") from error
    # One line for each model and engine of the server.
    counts = REQUESTS.findall(text.decode(errors="replace"))
    if not counts:
        remedy = "has no vllm:num_requests_running at /metrics; scale a server that has it"
        raise UserError("fleet", url, remedy)
    return sum(map(float, counts))


def read_iteration(run: Run) -> Iteration | None:
    """Read the newest iteration of `run`; None before there are two."""
    run.refresh()
    ends = run.iteration_ends()
    newest = max(ends, default=0)
    # An iteration begins when the one before has ended.
    began = ends.get(newest - 1)
    if began is None:
        return None
    samplers = [entry for entry in run.with_role("sampler") if entry.iteration == newest]
    sampling = sum(entry.seconds for entry in samplers)
    return Iteration(
        began=began,
        sampling=sampling,
        idle=max(0.0, ends[newest] - began - sampling),
    )
