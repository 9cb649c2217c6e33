"""Runs of one group take turns by a Lease: in order, also when a holder is killed, and nothing is left of it."""

import itertools
import json
import subprocess
import sys
from typing import Any

import pytest
from hera.workflows import DAG, Container

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import RUN, SMALL, submit_workflow
from tests.cluster.test_queue import until
from tests.waiting import LIMIT_S
from tuneloop.argo.pod_fields import pod_fields, retry_fields
from tuneloop.argo.run_plan import plan_stages
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cli import run_cli
from tuneloop.cluster import submit as argo
from tuneloop.config.extended import extend_cluster
from tuneloop.extensions.sharing.lease_sidecar import add_lease_sidecar
from tuneloop.extensions.sharing.settings import Share
from tuneloop.kube.connection import Connection
from tuneloop.sharing.lease_queue import LeaseQueue
from tuneloop.sharing.lease_storage import open_lease_group
from tuneloop.stages.data_prep import data_prep
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import RUN_LABEL, AcceleratorResources

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PATIENCE = 45.0
"""Seconds without a sign of life, as of a holder that is killed, or of one that a busy machine lets wait."""


def sharing(group: str, stages: int = 0, seconds: int = 0) -> dict[str, Any]:
    """Stages of a second one after the other, or one pod that only holds its turn; each takes the group's turn."""
    scorer = AcceleratorResources(cpu="50m", memory="256Mi")
    share = Share(group=group, patience=PATIENCE)
    shared = extend_cluster().model_validate(dict(SMALL) | {"share": share, "scorer": scorer})
    spec = StageSpec(data_prep, train=8, eval=4, sft=0)
    plan = plan_stages("turns", [spec], shared, wired=["seed"])
    with define_workflow("turns", plan=plan, cluster=shared) as built:
        fields = {**pod_fields("base", "scorer", shared), **retry_fields()}
        hold = Container(name="hold", command=["sleep"], args=[str(seconds)], **fields)
        stage: Any = stage_template(data_prep, plan.stages["data-prep"], shared)
        stage.labels = fields["labels"]  # the least of all stages, made one that uses devices
        for made in (hold, stage):
            add_lease_sidecar(made, shared, "trainer")
        with DAG(name="main"):
            tasks = [
                stage(name=f"s{i}", arguments={"seed": i, "prompts": f"{RUN}/s{i}"})
                for i in range(stages)
            ]
            for before, after in itertools.pairwise(tasks):
                before >> after
            if seconds:
                hold(name="hold")
    made_: dict[str, Any] = built.to_dict()
    return made_


def leases(cluster: Connection, group: str) -> str:
    return kubectl(
        "-n",
        cluster.namespace,
        "get",
        "leases",
        "-l",
        f"tuneloop.dev/lease-group={group}",
        "-o",
        "name",
    )


def document(cluster: Connection, group: str) -> LeaseQueue:
    return open_lease_group(f"lease://{cluster.namespace}/{group}", who="nobody").read()


def worked(cluster: Connection, *runs: str) -> list[tuple[str, str, str]]:
    """(began, ended, run) of the stages' containers, by the node's clock."""
    selector = f"{RUN_LABEL} in ({','.join(runs)})"
    pods = json.loads(
        kubectl("-n", cluster.namespace, "get", "pods", "-l", selector, "-o", "json")
    )["items"]
    found = []
    for pod in pods:
        main = next(c for c in pod["status"]["containerStatuses"] if c["name"] == "main")["state"][
            "terminated"
        ]
        found.append((main["startedAt"], main["finishedAt"], pod["metadata"]["labels"][RUN_LABEL]))
    return sorted(found)


def test_two_runs_take_turns_and_outlive_a_killed_holder(
    cluster: Connection, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = f"{run}-a", f"{run}-b"
    for name in (first, second):
        submit_workflow(cluster, sharing(run, stages=2), run=name, store=STORE)
    assert [argo.wait_for_run(cluster, name) for name in (first, second)] == [0, 0]
    until(lambda: not leases(cluster, run))
    times = worked(cluster, first, second)
    assert len(times) == 4 and all(a[1] <= b[0] for a, b in itertools.pairwise(times)), times

    submit_workflow(cluster, sharing(run, seconds=600), run=run, store=STORE)
    until(lambda: (held := document(cluster, run).holder) is not None and held.who == run)
    submit_workflow(
        cluster, sharing(run, stages=1), run=second, store=STORE
    )  # committed: only its turn takes time
    until(lambda: [seat.who for seat in document(cluster, run).waiting] == [second])
    assert run_cli(["leases", run]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        ["holds", run],
        ["waits", second],
    ]
    killed = document(cluster, run)
    pods = f"{RUN_LABEL}={run}"
    kubectl("-n", cluster.namespace, "delete", "pods", "-l", pods, "--force", "--grace-period=0")
    until(lambda: document(cluster, run).number > killed.number, LIMIT_S)
    assert argo.wait_for_run(cluster, second) == 0
    argo.stop_run(cluster, run)  # its next attempt waits, or has the turn again
    until(lambda: not leases(cluster, run))


RACER = """
import sys, time
from tuneloop.workflow.loop import StageSpec
from tuneloop.sharing.lease_storage import open_lease_group
turns = open_lease_group(sys.argv[1], who=sys.argv[2], patience=120)
for _ in range(4):
    with turns.acquire(timeout=300) as held:
        print(held.number, time.monotonic(), flush=True)
        time.sleep(0.1)
        held.check()
        print(held.number, time.monotonic(), flush=True)
"""


def test_processes_race_for_a_lease(cluster: Connection, run: str) -> None:
    """The API server decides: three processes, every number once, one at a time, and no Lease in the end."""
    url = f"lease://{cluster.namespace}/{run}"
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, url, w], stdout=subprocess.PIPE, text=True)
        for w in "abc"
    ]
    lines = [
        line.split()
        for racer in racers
        for line in racer.communicate(timeout=LIMIT_S)[0].splitlines()
    ]
    assert [racer.returncode for racer in racers] == [0, 0, 0] and len(lines) == 24
    times = sorted((float(at), number) for number, at in lines)
    assert all(begun[1] == ended[1] for begun, ended in zip(times[::2], times[1::2]))
    assert not leases(cluster, run)
