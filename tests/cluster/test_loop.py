"""The demo's pipeline on a real Argo: stopped in the middle, resumed, and still the digests of this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import STORE
from tests.cluster.test_queue import until
from tuneloop.argo import cluster as argo
from tuneloop.argo.watch import logs, nodes, status
from tuneloop.config import find

pytestmark = pytest.mark.cluster

SMALL = [
    *("engine.name=transformers", "engine.args={}", "loop.iterations=2", "evaluate.limit=16"),
    *("data.source_args={digits: 2}", "data.train=40", "data.eval=16", "data.sft=40"),
    *("sft.max_steps=100", "sft.save_steps=20", "sft.per_device_train_batch_size=16"),
]


def test_stopped_and_resumed_equals_this_machine(cluster: argo.Cluster, run: str, tmp_path: Path) -> None:
    pipeline = find("sft_then_grpo")
    workflow = pipeline.build(pipeline.configure(sets=SMALL))
    argo.submit(cluster, workflow, run=run, store=STORE)
    until(lambda: _trained(cluster, run), 200)
    assert argo.stop(cluster, run) == 1
    stopped = nodes(argo.workflows(cluster, run)[0]).values()
    assert {node.phase for node in stopped if node.display_name.startswith("sft")} == {"Failed"}

    assert argo.submit(cluster, workflow, run=run, store=STORE) == f"{run}-2"
    assert argo.wait(cluster, run) == 0
    assert ("data-prep", "data_prep: committed already, nothing to do") in list(logs(cluster, run))
    assert status(cluster, run).workflows == [run, f"{run}-2"]
    _compare(argo.workflows(cluster, run)[-1], tmp_path)


def _trained(cluster: argo.Cluster, run: str) -> bool:
    """Whether sft is past its first resume point."""
    assert status(cluster, run).phase in ("Pending", "Running"), list(logs(cluster, run))[-5:]
    lines = [line for stage, line in logs(cluster, run) if stage == "sft"]
    return any(int(match[1]) > 20 for line in lines if (match := re.match(r"sft: (\d+)/", line)))


def _compare(workflow: dict, root: Path) -> None:
    """Run each stage here with the arguments its pod had. An input with other bytes would be refused by its digest."""
    templates = {t["name"]: t["container"] for t in workflow["spec"]["templates"] if "container" in t}
    committed, rewards = 0, set()
    for node in nodes(workflow).values():
        if node.type != "Pod":
            continue
        container = templates[node.template]
        given = [_filled(word, node.inputs) for word in container["args"]]
        words = [word.replace(STORE, f"file://{root}") for word in given]
        command = [sys.executable, *container["command"][1:], *words]
        subprocess.run(command, env={**os.environ, "TUNELOOP_OUTPUTS": str(root / "outputs")}, check=True)
        for name, value in node.outputs.items():
            here = (root / "outputs" / name).read_text()
            assert here.rpartition("@")[2] == value.rpartition("@")[2], (node.name, name)
            committed += "@" in value
            rewards.add(node.outputs.get("mean-reward"))
    assert committed == 12
    assert len(rewards) > 2  # the policy moved


def _filled(word: str, inputs: dict[str, str]) -> str:
    return re.sub(r"\{\{inputs\.parameters\.([\w-]+)\}\}", lambda match: inputs[match[1]], word)
