"""A schedule starts a run for new data, and skips what is done with."""

import subprocess
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import digits
from tests.cluster.test_queue import until
from tests.waiting import LIMIT_S
from tuneloop.cluster import submit as argo
from tuneloop.cluster.schedule import CRON, LABEL, apply_schedule, delete_schedule, list_schedules
from tuneloop.cluster.watch import read_status
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = pytest.mark.cluster


@pytest.fixture
def name(cluster: Connection) -> Iterator[str]:
    name = f"s{uuid.uuid4().hex[:8]}"
    yield name
    kinds = "cronworkflows,workflowtemplates,workflows,pods"
    kubectl("-n", cluster.namespace, "delete", kinds, "-l", f"{LABEL}={name}", "--wait=false")


def look(cluster: Connection, name: str) -> str:
    """What the controller does at its time, now; gives what the last step said."""
    cron = cluster.get(*CRON, name)
    made: dict[str, Any] = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow"}
    made |= {"metadata": {"generateName": f"{name}-", **cron["spec"]["workflowMetadata"]}}
    made |= {"spec": cron["spec"]["workflowSpec"]}
    command = ["kubectl", "-n", cluster.namespace, "create", "-o", "name", "-f", "-"]
    done = subprocess.run(
        command, input=yaml.safe_dump(made), text=True, capture_output=True, check=True
    )
    return said(cluster, done.stdout.strip().rpartition("/")[2])


def said(cluster: Connection, workflow: str) -> str:
    """What the last step of a looking workflow says in the end."""
    kubectl(
        "-n",
        cluster.namespace,
        "wait",
        "--for=condition=Completed",
        f"workflow/{workflow}",
        "--timeout=600s",
    )
    pods = f"workflows.argoproj.io/workflow={workflow},app.kubernetes.io/component=base"
    lines = kubectl(
        "-n", cluster.namespace, "logs", "-l", pods, "-c", "main", "--tail=-1"
    ).splitlines()
    return next(line for line in lines if line.startswith(("started", "skipped", "error")))


def runs(cluster: Connection, name: str) -> list[str]:
    found = cluster.list(*WORKFLOWS, selector=f"{LABEL}={name},{RUN_LABEL}")
    return [w["metadata"]["labels"][RUN_LABEL] for w in found]


def test_new_data_is_a_new_run_and_old_data_is_skipped(cluster: Connection, name: str) -> None:
    apply_schedule(cluster, digits(), name=name, store=STORE, cron="* * * * *")
    until(lambda: bool(runs(cluster, name)))  # the controller's own clock
    (first,) = runs(cluster, name)
    apply_schedule(
        cluster, digits(), name=name, store=STORE, cron="0 0 1 1 *"
    )  # changed: no further look of its own
    assert first.startswith(f"{name}-")
    assert argo.wait_for_run(cluster, first) == 0
    assert [
        node.template for node in read_status(cluster, first).nodes.values() if node.type == "Pod"
    ] == ["data-prep"]
    assert look(cluster, name) == f"skipped: no new data since {first}"

    apply_schedule(cluster, digits(seed=1), name=name, store=STORE, cron="0 0 1 1 *")
    told = look(cluster, name)
    assert told.startswith(f"started {name}-") and told != f"started {first}"
    second = told.split()[1]
    assert runs(cluster, name) == [first, second]
    assert argo.stop_run(cluster, second, timeout=LIMIT_S) <= 1
    (schedule,) = [each for each in list_schedules(cluster) if each["name"] == name]
    assert schedule["cron"] == "0 0 1 1 *"
    said = [look["said"] for look in schedule["looks"]]
    # One more look of the clock's may have begun before the schedule was changed.
    assert {told, f"skipped: no new data since {first}"} <= {*said[:-1]} and said[
        -1
    ] == f"started {first}"
    delete_schedule(cluster, name)
    with pytest.raises(UserError, match="does not exist in namespace"):
        delete_schedule(cluster, name)


@pytest.mark.slow
def test_ticks_that_overlap_are_skipped_and_so_is_a_look_while_a_run_is_under_way(
    cluster: Connection, name: str
) -> None:
    """The clock ticks every 3 s. A look takes longer: it is let end; what it has started is let end, too."""
    apply_schedule(cluster, digits(seconds=3600), name=name, store=STORE, cron="@every 3s")
    seen: dict[str, tuple[str, str]] = {}

    def second() -> str | None:
        """The second look, once it has begun."""
        for workflow in cluster.list(*WORKFLOWS, selector=f"{LABEL}={name},!{RUN_LABEL}"):
            ended = workflow.get("status", {}).get("finishedAt") or "under way"
            seen[workflow["metadata"]["name"]] = (workflow["metadata"]["creationTimestamp"], ended)
        return sorted(seen, key=seen.__getitem__)[1] if len(seen) > 1 else None

    until(lambda: second() is not None)
    (begun, first_ended), (second_begun, _), *_ = sorted(seen.values())
    assert first_ended <= second_begun
    skipped = (
        datetime.fromisoformat(first_ended) - datetime.fromisoformat(begun)
    ).total_seconds() / 3
    assert skipped > 2, seen
    told = said(cluster, str(second()))
    delete_schedule(cluster, name)
    (run,) = runs(cluster, name)
    assert told == f"skipped: {run} is under way"
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1
