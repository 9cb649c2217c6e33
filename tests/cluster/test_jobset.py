"""Stages of two pods: the same bytes as two processes in one pod, also when one of the pods is killed."""

import os
import re
import time
from typing import Any

import pytest

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import RUN, digests, draw_tiny_model, submit_workflow
from tests.waiting import LIMIT_S
from tuneloop.argo.lint import lint_workflow
from tuneloop.argo.pipeline import Tasks, build_templates, read_limits
from tuneloop.argo.run_plan import plan_pipeline_stage, plan_run, plan_stage, plan_stages
from tuneloop.argo.tasks import Output
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_logs, read_nodes, read_status
from tuneloop.config.loading import find_pipeline
from tuneloop.kube.connection import Connection
from tuneloop.runs.stages import list_cluster_stages
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import ROLES, RUN_LABEL, AcceleratorResources, Cluster, Resources

pytestmark = pytest.mark.cluster

PODS = "jobset.sigs.k8s.io/jobset-name"
IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
SIZE: Any = {"cpu": "100m", "memory": "2560Mi"}
"""Two ranks in a pod hold 1.4 GiB; with little more, the kernel drops and reads their code again for ever."""
SMALL = Cluster(trainer=AcceleratorResources(**SIZE), cpu=Resources(**SIZE), images=IMAGES)


def twice(cluster: Cluster = SMALL, max_steps: int = 100) -> dict[str, Any]:
    """data-prep → base-model → sft in one pod of two processes → sft in two pods of one."""
    from hera.workflows import DAG

    settings: dict[str, Any] = {
        "max_steps": max_steps,
        "save_steps": 10,
        "per_device_train_batch_size": 8,
        "device": "cpu",
    }
    specs = [
        StageSpec(data_prep, train=64, sft=64, eval=8),
        StageSpec(base_model, model="tiny-qwen3"),
        StageSpec(sft, nodes=2, **settings),
    ]
    plan = plan_stages("twice", specs, cluster)
    with define_workflow("twice", plan=plan) as built:
        prepare, bring, pair = (
            stage_template(spec.component, plan.stages[spec.component.template], cluster)
            for spec in specs
        )
        alone = plan_stage(StageSpec(sft, processes=2, **settings), cluster)
        one = stage_template(sft, alone, cluster)
        one.name = "sft-one-pod"
        with DAG(name="main"):
            model, prompts, policy = draw_tiny_model(prepare, bring)
            given = {"policy": policy, "prompts": prompts}
            first = one(name="one", arguments={**given, "checkpoint": f"{RUN}/one"})
            second = pair(name="pair", arguments={**given, "checkpoint": f"{RUN}/pair"})
            model >> first >> second
    made: dict[str, Any] = built.to_dict()
    assert not lint_workflow(made)
    return made


def trained(cluster: Connection, run: str) -> bool:
    """Whether the first pod is past its first resume point."""
    first = f"{PODS}={run}-sft,batch.kubernetes.io/job-completion-index=0"
    said = kubectl("-n", cluster.namespace, "logs", "-l", first, "--tail=-1", check=False)
    return any(int(step) > 20 for step in re.findall(r"^sft: (\d+)/", said, re.M))


def test_one_of_two_pods_is_killed_and_the_bytes_are_those_of_one_pod(
    cluster: Connection, run: str
) -> None:
    submit_workflow(cluster, twice(), run=run, store=STORE)
    deadline = (
        time.monotonic() + 3 * LIMIT_S
    )  # its pods are the last whom a busy machine gives a core
    while not trained(cluster, run):
        assert time.monotonic() < deadline, list(read_logs(cluster, run))
        assert run_workflows.get_workflow_phase(run_workflows.find_workflows(cluster, run)[-1]) in (
            "Pending",
            "Running",
        )
        time.sleep(1)
    victim = f"{PODS}={run}-sft,batch.kubernetes.io/job-completion-index=1"  # at once: it trains on
    kubectl("-n", cluster.namespace, "delete", "pod", "-l", victim, "--grace-period=0", "--force")
    seen = read_status(cluster, run)
    shown = {stage.stage: stage.phase for stage in list_cluster_stages(seen.nodes, seen.waiting)}
    assert (
        shown["one"] == "Succeeded"
        and shown["pair"] in ("Pending", "Running")
        and "job" not in shown
    )
    assert argo.wait_for_run(cluster, run) == 0
    found = run_workflows.find_workflows(cluster, run)[-1]
    references = {
        n.display_name: n.outputs.get("checkpoint", "") for n in read_nodes(found).values()
    }
    assert references["one"].partition("@")[2] == references["pair"].partition("@")[2] != ""
    jobset = cluster.get("jobset.x-k8s.io", "v1alpha2", "jobsets", f"{run}-sft")
    assert jobset["status"]["restarts"] >= 1
    assert jobset["metadata"]["ownerReferences"][0]["kind"] == "Workflow"
    said = [line for stage, line in read_logs(cluster, run, stage="sft")]
    assert any("resumed after step" in line for line in said), said


LOOP = [
    *("engine.kind=transformers", "loop.iterations=2", "nodes=2", "trainer.device=cpu"),
    *("data.source_args={digits: 2}", "data.train=16", "data.eval=4", "data.sft=0"),
    *(
        "data.rewards={length_penalty: 1}",
        "data.reward_args={length_penalty: {max_length: 24, buffer: 20}}",
    ),
    *("rollout.prompts_per_iteration=4", "rollout.n=4", "trainer.per_device_train_batch_size=4"),
    *(f"cluster.{role}={{cpu: 100m, memory: 2560Mi}}" for role in ROLES),
    f"cluster.images={IMAGES}",
]
"""Of the pipeline grpo; the reward is one that an untrained model earns now more, now less of."""


def updated(grpo: Any, config: Any) -> dict[str, Any]:
    """data-prep → base-model → the pipeline's loop, then both of its updates anew, each in a pod of two processes."""
    from hera.workflows import DAG

    specs = grpo.stages(config)
    plan = plan_run("updated", config, specs, grpo.LOOP)
    with define_workflow("updated", read_limits(config.loop), plan=plan) as built:
        templates = build_templates(plan, config, specs, grpo.LOOP)
        single = grpo.stages(config.model_copy(update={"nodes": 1, "processes": 2}))
        spec = next(spec for spec in single if spec.component is policy_update)
        alone = plan_pipeline_stage(spec, config, grpo.LOOP)
        again = stage_template(policy_update, alone, config.cluster)
        again.name = "update-one-pod"
        with DAG(name="main"):
            tasks = Tasks(config, templates, grpo.LOOP)
            data = tasks.stage(data_prep)
            base = tasks.stage(base_model, prompts=data.prompts).checkpoint
            given = {"policy": base, "prompts": data.prompts, "reference": base, "endpoint": ""}
            before = templates["loop"](name="loop", arguments={**given, "iteration": "1"})
            base.task >> before
            policy = base
            for i in ("1", "2"):
                about = {
                    "policy": policy,
                    "rewards": f"{RUN}/iterations/{i}/reward",
                    "reference": base,
                }
                about |= {"iteration": i, "checkpoint": f"{RUN}/one/{i}"}
                before = before >> again(name=f"one-{i}", arguments=about)
                policy = Output(before, "checkpoint")
    made: dict[str, Any] = built.to_dict()
    assert not lint_workflow(made)
    return made


@pytest.mark.slow
def test_the_updates_of_a_loop_are_jobsets_with_the_bytes_of_one_pod(
    cluster: Connection, run: str
) -> None:
    grpo = find_pipeline("grpo")
    submit_workflow(cluster, updated(grpo.module, grpo.configure(sets=LOOP)), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    jobs = cluster.list("jobset.x-k8s.io", "v1alpha2", "jobsets", selector=f"{RUN_LABEL}={run}")
    assert [job["metadata"]["name"] for job in jobs] == [f"{run}-policy-update-{i}" for i in (1, 2)]
    found = digests(read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values(), run)
    assert {i: found[f"iterations/{i}/policy-update"] for i in "12"} == {
        i: found[f"one/{i}"] for i in "12"
    }
    said = [line for stage, line in read_logs(cluster, run) if stage == "one-2"]
    assert any(
        re.search(r"policy_update: 1 steps on (8|12|16) of 16 rollouts", line) for line in said
    ), said
