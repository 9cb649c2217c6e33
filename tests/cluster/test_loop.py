"""The demo's pipeline on a real Argo: stopped in the middle, resumed, and still the digests of this machine.

On the cluster one pod runs both iterations; here every stage is a process of its own.
"""

import re
from pathlib import Path

import pytest

from tests.cluster.conftest import STORE
from tests.cluster.making import digests, submit_workflow
from tests.cluster.test_queue import until
from tests.waiting import LIMIT_S
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_logs, read_nodes, read_status
from tuneloop.config.loading import find_pipeline
from tuneloop.kube.connection import Connection
from tuneloop.local.executor import execute_parts

pytestmark = pytest.mark.cluster

SMALL = [
    *("engine.kind=transformers", "engine.args={}", "loop.iterations=2", "evaluate.limit=8"),
    *("data.source_args={digits: 2}", "data.train=40", "data.eval=8", "data.sft=40"),
    *("rollout.prompts_per_iteration=4", "rollout.n=4"),
    *("sft.max_steps=100", "sft.save_steps=10", "trainer.per_device_train_batch_size=16"),
]


def test_stopped_and_resumed_equals_this_machine(
    cluster: Connection, run: str, tmp_path: Path
) -> None:
    pipeline = find_pipeline("sft_then_grpo")
    workflow = pipeline.build(pipeline.configure(sets=[*SMALL, "loop.iterations_per_pod=2"]))
    submit_workflow(cluster, workflow, run=run, store=STORE)
    until(lambda: _trained(cluster, run), 3 * LIMIT_S)
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1
    stopped = read_nodes(run_workflows.find_workflows(cluster, run)[0]).values()
    assert {node.phase for node in stopped if node.display_name.startswith("sft")} == {"Failed"}

    assert submit_workflow(cluster, workflow, run=run, store=STORE) == f"{run}-2"
    assert argo.wait_for_run(cluster, run) == 0
    assert ("data-prep", "data_prep: committed already, nothing to do") in list(
        read_logs(cluster, run)
    )
    assert read_status(cluster, run).workflows == [run, f"{run}-2"]
    fine = pipeline.build(pipeline.configure(sets=[*SMALL, "loop.iterations_per_pod=0"]))
    here = execute_parts(
        fine, workdir=tmp_path / "state", arguments={"run": run, "store": str(tmp_path)}
    )
    assert here.phase == "Succeeded", here.message
    there, ours = (
        digests(read_status(cluster, run).nodes.values(), run),
        digests(here.nodes.values(), run),
    )
    assert len(ours) == 12 and "iterations/2/policy-update" in there
    assert (
        there == {key: digest for key, digest in ours.items() if key in there} and len(there) == 7
    )


def _trained(cluster: Connection, run: str) -> bool:
    """Whether sft is past its first resume point."""
    assert read_status(cluster, run).phase in ("Pending", "Running"), list(read_logs(cluster, run))[
        -5:
    ]
    lines = [line for stage, line in read_logs(cluster, run) if stage == "sft"]
    return any(int(match[1]) > 10 for line in lines if (match := re.match(r"sft: (\d+)/", line)))
