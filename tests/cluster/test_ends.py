"""A real controller, kubelet and kernel: every end of a pod has the class that `tuneloop.core.ends` gives it."""

from typing import Any

import pytest

from tests.cluster.conftest import STORE
from tests.cluster.making import submit_workflow
from tests.cluster.test_queue import find_pods, running, until
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_logs, read_status
from tuneloop.core.ends import AWAY, EVICTED, KILL, MEMORY, SUCCEEDED, classify_end
from tuneloop.kube.connection import Connection, ignore_refusals
from tuneloop.runs.stages import list_cluster_stages
from tuneloop.workflow.settings import RUN_LABEL, Cluster, Resources

pytestmark = pytest.mark.cluster

OLD_LIMIT_S = 15
PROGRAM = """
import os, pathlib, signal, sys, time
attempt = int(os.environ["TUNELOOP_ATTEMPT"])
places = map(pathlib.Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"))
limit = next(place.read_text().strip() for place in places if place.exists())
print(f"attempt {attempt}, limit {limit}, after: {os.environ['TUNELOOP_LAST_END']}", flush=True)
if attempt == 0:
    time.sleep(600)
elif attempt == 1:
    pathlib.Path("/dev/termination-log").write_text('unavailable: store: "s3://b" is away')
    sys.exit(75)
elif attempt == 2:
    os.kill(os.getpid(), signal.SIGILL)
elif attempt == 3:
    hog = bytearray(b"x" * (400 << 20))
"""


def workflow(deadline: str = "") -> dict[str, Any]:
    """A stage that ends in many ways before it succeeds; or one that may not be tried again after a `deadline`."""
    from hera.workflows import DAG, Container

    from tuneloop.argo.pod_fields import retried_pod_fields
    from tuneloop.argo.template import define_workflow as new_workflow

    sizes = Cluster(cpu=Resources(cpu="50m", memory="64Mi", memory_on_retry="96Mi"))
    with new_workflow("ends") as built:
        stage = Container(
            name="end",
            command=["python", "-c"],
            args=[PROGRAM],
            **retried_pod_fields("base", "cpu", sizes),
        )
        if deadline:
            stage.retry_strategy.backoff.max_duration = deadline
        with DAG(name="main"):
            stage(name="end")
    made: dict[str, Any] = built.to_dict()
    return made


def test_what_ends_is_started_again_however_long_it_ran(cluster: Connection, run: str) -> None:
    """Beside it the same stage with the deadline that was rendered once: it is not even tried again."""
    new, old = f"{run}-a", f"{run}-b"
    submit_workflow(cluster, workflow(), run=new, store=STORE)
    submit_workflow(cluster, workflow(f"{OLD_LIMIT_S}s"), run=old, store=STORE)
    until(lambda: running(cluster, new) and running(cluster, old))
    until(
        lambda: _ran_for(cluster, new, OLD_LIMIT_S + 5) and _ran_for(cluster, old, OLD_LIMIT_S + 5)
    )
    for name in (new, old):
        _end_first_attempt(cluster, name)
    assert argo.wait_for_run(cluster, new) == 0
    assert argo.wait_for_run(cluster, old) != 0

    seen = read_status(cluster, new)
    attempts = [node for node in seen.nodes.values() if node.type == "Pod"]
    ends = [
        classify_end(n.phase, -1 if n.exit_code is None else n.exit_code, n.message)
        for n in attempts
    ]
    assert ends == [EVICTED, AWAY, KILL, MEMORY, SUCCEEDED], seen.nodes
    (stage,) = list_cluster_stages(seen.nodes, seen.waiting)
    assert (stage.phase, stage.done, stage.retries) == ("Succeeded", 1, 4)
    assert (
        stage.cause.startswith("attempt 4 ended after ")
        and ": out of memory: main: OOMKilled" in stage.cause
    )
    assert (
        stage.lost_seconds > OLD_LIMIT_S
        and stage.seconds == attempts[-1].finished - attempts[-1].started
    )
    said = {
        int(line.split()[1].strip(",")): line
        for _, line in read_logs(cluster, new)
        if line.startswith("attempt ")
    }
    assert (
        'after: Failed 75 main: Error (exit code 75): unavailable: store: "s3://b" is away'
        in said[2]
    )
    assert "after: Failed 132" in said[3]
    assert "limit 100663296, after: Failed 137 main: OOMKilled" in said[4]
    abandoned = [node for node in read_status(cluster, old).nodes.values() if node.type == "Pod"]
    assert len(abandoned) == 1


def _end_first_attempt(cluster: Connection, run: str) -> None:
    """Delete the first attempt's pod, and again if the controller, behind on a busy machine, makes it anew.

    Only a pod that runs, by the controller's own account, is deleted: one that is deleted while its node is Pending
    is made anew each time, without end.
    """
    (first,) = find_pods(cluster, run)
    (pod,) = cluster.core.list_namespaced_pod(
        cluster.namespace, label_selector=f"{RUN_LABEL}={run}"
    ).items

    def ended() -> bool:
        (node,) = [node for node in find_pods(cluster, run) if node.id == first.id]
        if node.phase == "Running" and _ran_for(cluster, run, 0):
            with ignore_refusals(404):
                cluster.core.delete_namespaced_pod(
                    pod.metadata.name, cluster.namespace, grace_period_seconds=0
                )
        return bool(node.finished)

    until(ended)


def _ran_for(cluster: Connection, run: str, seconds: float) -> bool:
    """Whether the kubelet started the pod's container so long ago."""
    import datetime

    for pod in cluster.core.list_namespaced_pod(
        cluster.namespace, label_selector=f"{RUN_LABEL}={run}"
    ).items:
        for container in pod.status.container_statuses or ():
            if container.name == "main" and container.state.running:
                begun = container.state.running.started_at
                return (datetime.datetime.now(datetime.UTC) - begun).total_seconds() > seconds
    return False
