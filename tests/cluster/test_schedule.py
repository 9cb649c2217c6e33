"""A schedule starts a run for new data, and skips what is done with."""

import subprocess
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import digits
from tests.cluster.test_queue import until
from tuneloop.argo import cluster as argo
from tuneloop.argo.schedule import CRON, LABEL, schedule, unschedule
from tuneloop.argo.watch import status
from tuneloop.errors import UserError

pytestmark = pytest.mark.cluster


@pytest.fixture
def name(cluster: argo.Cluster) -> Iterator[str]:
    name = f"s{uuid.uuid4().hex[:8]}"
    yield name
    kinds = "cronworkflows,workflowtemplates,workflows,pods"
    kubectl("-n", cluster.namespace, "delete", kinds, "-l", f"{LABEL}={name}", "--wait=false")


def look(cluster: argo.Cluster, name: str) -> str:
    """What the controller does at its time, now; gives what the last step said."""
    cron = cluster.get(*CRON, name)
    made: dict[str, Any] = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow"}
    made |= {"metadata": {"generateName": f"{name}-", **cron["spec"]["workflowMetadata"]}}
    made |= {"spec": cron["spec"]["workflowSpec"]}
    command = ["kubectl", "-n", cluster.namespace, "create", "-o", "name", "-f", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(made), text=True, capture_output=True, check=True)
    created = done.stdout.strip()
    kubectl("-n", cluster.namespace, "wait", "--for=condition=Completed", created, "--timeout=90s")
    pods = f"workflows.argoproj.io/workflow={created.rpartition('/')[2]},app.kubernetes.io/component=base"
    said = kubectl("-n", cluster.namespace, "logs", "-l", pods, "-c", "main", "--tail=-1").splitlines()
    return next(line for line in said if line.startswith(("started", "skipped", "error")))


def runs(cluster: argo.Cluster, name: str) -> list[str]:
    found = cluster.list(*argo.WORKFLOWS, selector=f"{LABEL}={name},{argo.RUN_LABEL}")
    return [w["metadata"]["labels"][argo.RUN_LABEL] for w in found]


def test_new_data_is_a_new_run_and_old_data_is_skipped(cluster: argo.Cluster, name: str) -> None:
    schedule(cluster, digits(), name=name, store=STORE, cron="* * * * *")
    until(lambda: bool(runs(cluster, name)), 120)  # the controller's own clock
    (first,) = runs(cluster, name)
    schedule(cluster, digits(), name=name, store=STORE, cron="0 0 1 1 *")  # changed: no further look of its own
    assert first.startswith(f"{name}-")
    assert argo.wait(cluster, first) == 0
    assert [node.template for node in status(cluster, first).nodes.values() if node.type == "Pod"] == ["data-prep"]
    assert look(cluster, name) == f"skipped: no new data since {first}"

    schedule(cluster, digits(seed=1), name=name, store=STORE, cron="0 0 1 1 *")
    said = look(cluster, name)
    assert said.startswith(f"started {name}-") and said != f"started {first}"
    second = said.split()[1]
    assert runs(cluster, name) == [first, second]
    assert argo.stop(cluster, second) <= 1
    unschedule(cluster, name)
    with pytest.raises(UserError, match="is none of namespace"):
        unschedule(cluster, name)
