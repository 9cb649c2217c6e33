"""A loop of several workflows with a vLLM server: each workflow has its own, which boots with what it goes on from."""

import os

import pytest

from tests.cluster.conftest import STORE
from tests.cluster.making import digests, submit_workflow
from tests.waiting import until
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_status
from tuneloop.config.loading import find_pipeline
from tuneloop.kube.connection import Connection
from tuneloop.workflow.settings import ROLES, RUN_LABEL

pytestmark = pytest.mark.cluster

IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
SETTINGS = [
    *("loop.iterations=2", "loop.per_workflow=1", "loop.target_reward=2", "evaluate.limit=4"),
    "loop.iterations_per_pod=0",
    *("data.source_args={digits: 2}", "data.train=16", "data.eval=4", "data.sft=0"),
    *(
        "data.rewards={length_penalty: 1}",
        "data.reward_args={length_penalty: {max_length: 24, buffer: 20}}",
    ),
    *("rollout.prompts_per_iteration=4", "rollout.n=4", f"cluster.images={IMAGES}"),
    *(
        f"cluster.{role}.cpu=250m" for role in ROLES
    ),  # beside controllers that ask for half a core each, on two cores
]


def test_every_workflow_has_a_server_of_its_own(cluster: Connection, run: str) -> None:
    """The stages themselves refuse rollouts of another version. The memory is what the plan estimates."""
    pipeline = find_pipeline("grpo")
    submit_workflow(
        cluster, pipeline.build(pipeline.configure(sets=SETTINGS)), run=run, store=STORE
    )
    assert argo.wait_for_run(cluster, run) == 0
    seen = read_status(cluster, run)
    assert seen.workflows == [run, f"{run}-2"]
    servers = [
        node for node in seen.nodes.values() if node.template == "serve" and node.type == "Pod"
    ]
    made = digests(seen.nodes.values(), run)
    booted = [node.inputs["policy"].rpartition("@")[2] for node in servers]
    assert [*dict.fromkeys(booted)] == [made["base-model"], made["iterations/1/policy-update"]], (
        "tried again or not"
    )
    assert "iterations/2/policy-update" in made and "export" in made

    def gone() -> bool:
        left = cluster.core.list_namespaced_pod(
            cluster.namespace, label_selector=f"{RUN_LABEL}={run}"
        ).items
        return "Running" not in [pod.status.phase for pod in left]

    until(gone)


@pytest.mark.slow
def test_several_servers_of_one_workflow(cluster: Connection, run: str) -> None:
    """Each is a pod of its own, from which a rollout takes its part; a rollout refuses who serves another version."""
    pipeline, sets = find_pipeline("grpo"), [*SETTINGS, "loop.per_workflow=2", "engine.replicas=2"]
    submit_workflow(cluster, pipeline.build(pipeline.configure(sets=sets)), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0
    nodes = read_status(cluster, run).nodes.values()
    servers = {
        node.inputs["replica"] for node in nodes if node.template == "serve" and node.type == "Pod"
    }
    sampled = [node for node in nodes if node.template == "rollout" and node.type == "Pod"]
    assert servers == {"1", "2"} and len(sampled) >= 2
    assert all(len({*node.inputs["endpoint"].split(",")}) == 2 for node in sampled)
    assert "iterations/2/policy-update" in digests(nodes, run)
