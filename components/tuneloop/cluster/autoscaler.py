"""Keep a Deployment of rollout servers at as many replicas as `tuneloop.cluster.autoscaling_rule` decides. Their load
is read from ``/metrics``, under vLLM's names, at the pods' addresses, which only the cluster and its nodes reach. The
Deployment is changed by its subresource `scale`."""

import re
import time

from tuneloop.cluster.autoscaling_rule import AutoscalingRule, Iteration
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.inference.fleet.service import Service
from tuneloop.kube.connection import connect_to_cluster
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import CLIENT_LABEL, RUN_LABEL

CLIENTS = f"{RUN_LABEL},{CLIENT_LABEL}"
"""Selects the pods of runs that sample with the engine `endpoint`."""
REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


def scale_fleet(fleet: Service, rule: AutoscalingRule, run: Run | None = None) -> str:
    """Scale the Deployment that has the name of a Service once, as `rule` decides, with the iterations of `run` if
    given; return the change. Raises UserError without such a Deployment or Service, metrics of requests, or permission;
    Unavailable or Unreachable if the API server, or a ready pod, does not answer."""
    cluster = connect_to_cluster(fleet.namespace, fleet.context)
    place = ("apps", "v1", fleet.namespace, "deployments", fleet.name)
    replicas = cluster.custom.get_namespaced_custom_object_scale(*place)["spec"].get("replicas", 0)
    counts = [count_requests(worker.url) for worker in fleet.discover()]
    clients = [
        pod for pod in cluster.list_pods(CLIENTS) if pod.status.phase in ("Pending", "Running")
    ]
    last = read_iteration(run) if run else None
    wanted = rule.decide(time.time(), replicas, len(counts), sum(counts), len(clients), last)
    if wanted == replicas:
        return ""
    cluster.custom.patch_namespaced_custom_object_scale(*place, {"spec": {"replicas": wanted}})
    idle = (
        f", samplers idle {last.idle:.0f} s of {last.idle + last.sampling:.0f} s an iteration"
        if last
        else ""
    )
    seen = f"{len(counts)} ready, {sum(counts):g} requests, {len(clients)} clients{idle}"
    return f"{fleet.name}: {replicas} → {wanted} replicas ({seen})"


def count_requests(url: str) -> float:
    """Count the completions that run and wait at a server; raise as `scale_fleet`."""
    try:
        counts = REQUESTS.findall(
            send_request("GET", f"{url}/metrics", timeout_s=5)[1].decode(errors="replace")
        )
    except Unanswered as error:
        raise Unavailable(f"{url}/metrics cannot be reached from here: {error}") from error
    if not counts:
        raise UserError(
            "fleet", url, "has no vllm:num_requests_running at /metrics; scale a server that has it"
        )
    return sum(map(float, counts))


def read_iteration(run: Run) -> Iteration | None:
    """Read the newest iteration of `run`; None before there are two."""
    run.refresh()
    ends = {
        entry.iteration: entry.finished for entry in run.with_role("trainer") if entry.iteration
    }
    newest = max(ends, default=0)
    if newest - 1 not in ends:
        return None
    sampling = sum(entry.seconds for entry in run.with_role("sampler") if entry.iteration == newest)
    return Iteration(
        ends[newest - 1], sampling, max(0.0, ends[newest] - ends[newest - 1] - sampling)
    )
