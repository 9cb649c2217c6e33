"""A stage of two pods: the same bytes as two processes in one pod, also when one of the pods is killed."""

import os
import re
import time
from typing import Any

import pytest

from tests.cluster.conftest import STORE, kubectl
from tuneloop.argo import cluster as argo
from tuneloop.argo.lint import lint
from tuneloop.argo.settings import Cluster
from tuneloop.argo.template import stage_template, workflow
from tuneloop.argo.watch import logs, nodes
from tuneloop.base_model import base_model
from tuneloop.data_prep import data_prep
from tuneloop.sft import sft

pytestmark = pytest.mark.cluster

RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
PODS = "jobset.sigs.k8s.io/jobset-name"
SMALL = Cluster(cpu="100m", memory="1500Mi", images=os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev"))


def twice(cluster: Cluster = SMALL, max_steps: int = 300) -> dict[str, Any]:
    """data-prep → base-model → sft in one pod of two processes → sft in two pods of one."""
    from hera.workflows import DAG

    settings = {"max_steps": max_steps, "save_steps": 10, "per_device_train_batch_size": 8, "device": "cpu"}
    with workflow("twice") as built:
        prepare = stage_template(data_prep, {"train": 64, "sft": 64, "eval": 8}, cluster=cluster)
        bring = stage_template(base_model, {"model": "tiny-qwen3"}, cluster=cluster)
        pair = stage_template(sft, settings, nodes=2, cluster=cluster)
        one = stage_template(sft, settings, processes=2, cluster=cluster)
        one.name = "sft-one-pod"
        with DAG(name="main"):
            prompts, policy = (
                "{{tasks.data-prep.outputs.parameters.prompts}}",
                "{{tasks.base-model.outputs.parameters.checkpoint}}",
            )
            data = prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            model = bring(name="base-model", arguments={"prompts": prompts, "checkpoint": f"{RUN}/base-model"})
            given = {"policy": policy, "prompts": prompts}
            first = one(name="one", arguments={**given, "checkpoint": f"{RUN}/one"})
            second = pair(name="pair", arguments={**given, "checkpoint": f"{RUN}/pair"})
            data >> model >> first >> second
    made: dict[str, Any] = built.to_dict()
    assert not lint(made)
    return made


def trained(cluster: argo.Cluster, run: str) -> bool:
    """Whether the first pod is past its first resume point."""
    first = f"{PODS}={run}-sft,batch.kubernetes.io/job-completion-index=0"
    said = kubectl("-n", cluster.namespace, "logs", "-l", first, "--tail=-1", check=False)
    return any(int(step) > 20 for step in re.findall(r"^sft: (\d+)/", said, re.M))


def test_one_of_two_pods_is_killed_and_the_bytes_are_those_of_one_pod(cluster: argo.Cluster, run: str) -> None:
    argo.submit(cluster, twice(), run=run, store=STORE)
    deadline = time.monotonic() + 420
    while not trained(cluster, run):
        assert time.monotonic() < deadline
        assert argo.phase(argo.workflows(cluster, run)[-1]) in ("Pending", "Running")
        time.sleep(1)
    victim = f"{PODS}={run}-sft,batch.kubernetes.io/job-completion-index=1"
    kubectl("-n", cluster.namespace, "delete", "pod", "-l", victim, "--grace-period=0", "--force")
    assert argo.wait(cluster, run) == 0
    found = argo.workflows(cluster, run)[-1]
    references = {n.display_name: n.outputs.get("checkpoint", "") for n in nodes(found).values()}
    assert references["one"].partition("@")[2] == references["pair"].partition("@")[2] != ""
    jobset = cluster.get("jobset.x-k8s.io", "v1alpha2", "jobsets", f"{run}-sft")
    assert jobset["status"]["restarts"] == 1
    assert jobset["metadata"]["ownerReferences"][0]["kind"] == "Workflow"
    said = [line for stage, line in logs(cluster, run, stage="sft")]
    assert any("resumed after step" in line for line in said), said
