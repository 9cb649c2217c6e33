"""Seats on claims, without a cluster; and a run's own graph, which ends with it on success, failure and `stop`, and not
with one workflow of several."""

from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Container
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cluster.api import Api, kubeconfig, serving
from tuneloop.argo.lint import lint_workflow
from tuneloop.argo.template import define_workflow
from tuneloop.cluster.graph_end import add_graph_end
from tuneloop.cluster.reservations import (
    choose_claim,
    end_graphs,
    filter_active_runs,
    find_free_name,
)
from tuneloop.cluster.submit import stop_run
from tuneloop.config.loading import find_pipeline
from tuneloop.inference.fleet.graph import PLURAL
from tuneloop.local.executor import execute_workflow
from tuneloop.workflow.settings import RUN_LABEL, Cluster


@given(st.lists(st.sampled_from("abcdefg"), max_size=30), st.integers(1, 3))
def test_runs_that_come_fill_claims_in_order(comers: list[str], limit: int) -> None:
    """Each run has one seat, whoever comes twice the same; there is no claim more than needed, none over its limit."""
    claims: dict[str, list[str]] = {}
    for run in comers:
        name = choose_claim(claims, run, limit) or find_free_name("g", claims)
        if run not in claims.setdefault(name, []):
            claims[name].append(run)
    assert sorted(run for runs in claims.values() for run in runs) == sorted(set(comers))
    assert all(len(runs) <= limit for runs in claims.values())
    assert len(claims) == -(-len(set(comers)) // limit)


def test_a_seat_is_taken_on_the_fullest_claim_so_that_others_empty() -> None:
    claims = {"g-1": ["a"], "g-2": ["b", "c"], "g-3": ["d", "e", "f"]}
    assert choose_claim(claims, "x", 3) == "g-2"
    assert choose_claim(claims, "a", 1) == "g-1", "a run that sits stays, whatever the limit is now"
    assert choose_claim(claims, "x", 1) is None
    assert find_free_name("g", ["g-1", "g-3", "h-2"]) == "g-2"


def test_a_run_keeps_its_seat_as_long_as_one_of_its_workflows_is_active() -> None:
    active = {"a": [("a-2", "u2")], "b": [], "other": [("other", "u3")]}
    assert filter_active_runs(["b", "a", "gone"], active) == (["a"], [("a-2", "u2")])


def keep(api: Api, plural: str, name: str, run: str | None, **more: Any) -> None:
    metadata = {
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    api.objects[plural, name] = {
        "metadata": {**metadata, "labels": {RUN_LABEL: run} if run else {}},
        **more,
    }


def fill(api: Api) -> None:
    """A run under way with a graph of its own, beside another's graph and a user's own."""
    keep(api, "workflows", "demo", "demo", status={"phase": "Running"})
    for name, run in (("mine", "demo"), ("theirs", "another"), ("users", None)):
        keep(api, PLURAL, name, run)


def graphs(api: Api) -> list[str]:
    return [name for plural, name in api.objects if plural == PLURAL]


@pytest.mark.parametrize(("code", "phase"), [(0, "Succeeded"), (2, "Failed")])
def test_the_exit_handler_ends_the_graph_however_the_run_ended(
    code: int, phase: str, tmp_path: Path
) -> None:
    """The rendered handler itself, as the local executor runs it, against an API server."""
    with define_workflow("demo") as built:
        work = Container(name="work", command=["bash", "-c", f"exit {code}"])
        with DAG(name="main"):
            work(name="work")
    made = built.to_dict()
    made["metadata"] = {"name": "demo"}
    add_graph_end(made, Cluster())
    with serving() as (api, cluster):
        fill(api)
        env = {"KUBECONFIG": kubeconfig(cluster.host, tmp_path)}
        options = {"arguments": {"run": "demo"}, "env": env, "warm": False}
        outcome = execute_workflow(made, workdir=tmp_path / "work", **options)
        assert outcome.phase == phase, outcome.message
        handler = next(node for node in outcome.nodes.values() if node.template == "end-graph")
        assert handler.phase == "Succeeded" and graphs(api) == ["theirs", "users"], (
            handler,
            handler.message,
        )


def test_stop_ends_the_graph_of_a_run_that_was_terminated() -> None:
    with serving() as (api, cluster):
        fill(api)
        assert stop_run(cluster, "demo") == 1
        assert graphs(api) == ["theirs", "users"]


def test_a_graph_goes_on_with_the_next_workflow_of_its_run() -> None:
    with serving() as (api, cluster):
        fill(api)
        keep(api, "workflows", "demo-2", "demo", status={"phase": "Running"})
        keep(api, "workflows", "other", "another")
        end_graphs(cluster, "demo", without="demo")
        assert graphs(api) == ["mine", "theirs", "users"]
        (owner,) = api.objects[PLURAL, "mine"]["metadata"]["ownerReferences"]
        assert (owner["name"], owner["uid"]) == ("demo-2", "uid-demo-2")
        api.objects["workflows", "demo"]["status"] = {"phase": "Succeeded"}
        end_graphs(cluster, "demo", without="demo-2")
        assert graphs(api) == ["theirs", "users"]


def test_the_handler_stands_beside_that_of_shared_devices() -> None:
    shared = ["cluster.share.group=g", "cluster.share.device_class=gpu.example.com"]
    settings = (pipeline := find_pipeline("grpo")).configure(sets=shared)
    made = pipeline.build(settings)
    add_graph_end(made, settings.cluster)
    templates = {each["name"]: each for each in made["spec"]["templates"]}
    assert [task["template"] for task in templates[made["spec"]["onExit"]]["dag"]["tasks"]] == [
        "give-claim",
        "end-graph",
    ]
    assert (
        templates["end-graph"]["serviceAccountName"] == "tuneloop-graphs"
        and lint_workflow(made) == []
    )
