"""A run of several workflows, executed here; `tests/cluster/test_continue.py` has the same on a cluster."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.argo_loop import build
from tuneloop.cluster.continue_run import build_next_workflow
from tuneloop.config.loading import find_pipeline
from tuneloop.local.executor import Outcome, execute_parts, execute_workflow
from tuneloop.local.journal import Node, read_state
from tuneloop.runs.run_record import Run
from tuneloop.workflow.settings import LOCAL


def run(workdir: Path, iterations: int, per_workflow: int, script: str | None = None) -> Outcome:
    workflow = build(iterations, per_workflow)
    if script:
        stage = next(t for t in workflow["spec"]["templates"] if t["name"] == "stage")
        stage["container"]["command"][-1] = script + stage["container"]["command"][-1]
    return execute_parts(workflow, workdir=workdir, arguments={"run": "x", "store": "memory://"})


def stages(nodes: dict[str, Node]) -> list[Node]:
    return [node for node in nodes.values() if node.type == "Pod" and node.template == "stage"]


def test_parts_are_one_run(tmp_path: Path) -> None:
    assert run(tmp_path, 7, 3).phase == "Succeeded"
    found = read_state(tmp_path)
    assert found is not None
    assert [json.loads(part)["arguments"] for part in found.parts] == [
        {"iteration": "4", "told": "3"},
        {"iteration": "7", "told": "6"},
    ]
    assert [node.outputs["told"] for node in stages(found.nodes)] == [
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
    ]
    assert {node.name.partition(".")[0] for node in found.nodes.values()} == {
        "empty",
        "empty-2",
        "empty-3",
    }


def test_a_resumed_run_starts_at_the_part_that_failed(tmp_path: Path) -> None:
    fails_once = (
        f"[ $0 != 5 ] || [ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; exit 1; }}; "
    )
    assert run(tmp_path / "x", 7, 3, fails_once).phase == "Failed"
    assert run(tmp_path / "x", 7, 3, fails_once).phase == "Succeeded"
    found = read_state(tmp_path / "x")
    assert found is not None
    assert [node.outputs["told"] for node in stages(found.nodes)] == [
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
    ]
    text = (tmp_path / "x" / "nodes.jsonl").read_text()
    begun = re.findall(r'"kind": "workflow", "name": "([\w-]+)", "phase": "Running"', text)
    assert begun == ["empty", "empty-2", "empty-2", "empty-3"]


def test_a_run_that_was_killed_between_two_parts_goes_on(tmp_path: Path) -> None:
    given = {"run": "x", "store": "memory://"}
    assert (
        execute_workflow(
            build(4, 2), workdir=tmp_path / "x", arguments=given, env={LOCAL: "1"}
        ).phase
        == "Succeeded"
    )
    assert Run("x", str(tmp_path)).phase == "interrupted"
    assert run(tmp_path / "x", 4, 2).phase == "Succeeded"
    assert Run("x", str(tmp_path)).phase == "succeeded"
    found = read_state(tmp_path / "x")
    assert found is not None
    assert [node.outputs["told"] for node in stages(found.nodes)] == ["1", "2", "3", "4"]


@pytest.mark.local
def test_a_long_loop_is_done_in_parts_of_bounded_size(tmp_path: Path) -> None:
    outcome = run(tmp_path, 96, 12)
    assert outcome.phase == "Succeeded"
    assert len(outcome.nodes) < 100  # of the last part: all have three times as many
    found = read_state(tmp_path)
    assert found is not None and len(found.parts) == 7
    assert [int(node.outputs["told"]) for node in stages(found.nodes)] == list(range(1, 97))


def test_the_following_workflow_is_the_same_but_for_where_it_starts() -> None:
    labels = {"tuneloop.dev/run": "x", "workflows.argoproj.io/phase": "Running"}
    before = {"apiVersion": "argoproj.io/v1alpha1", **build(7, 3)}
    before["metadata"] = {"name": "x-2", "uid": "1", "resourceVersion": "9", "labels": labels}
    after = build_next_workflow(before, "main", {"iteration": "7"})
    assert after["metadata"] == {
        "labels": {"tuneloop.dev/run": "x"},
        "annotations": {"tuneloop.dev/continues": "x-2"},
    }
    assert after["spec"]["templates"] == before["spec"]["templates"]
    given = {p["name"]: p["value"] for p in after["spec"]["arguments"]["parameters"]}
    assert (given["iteration"], given["iterations"]) == ("7", "7")


def test_every_workflow_of_a_loop_starts_a_server_of_its_own() -> None:
    """It boots with the policy that the workflow goes on from, and is what its part of the loop asks."""
    grpo = find_pipeline("grpo")
    templates = {
        t["name"]: t
        for t in grpo.build(grpo.configure(sets=["loop.per_workflow=1"]))["spec"]["templates"]
    }
    for name, policy in (
        ("main", "{{tasks.base-model.outputs.parameters.checkpoint}}"),
        ("continued", "{{inputs.parameters.policy}}"),
    ):
        tasks = {task["name"]: task for task in templates[name]["dag"]["tasks"]}
        given = {p["name"]: p["value"] for p in tasks["part"]["arguments"]["parameters"]}
        assert tasks["serve"]["arguments"]["parameters"] == [{"name": "policy", "value": policy}]
        assert given["endpoint"] == "http://{{tasks.serve.ip}}:8765"
        assert "serve" in tasks["part"]["depends"] or "evaluate-before" in tasks["part"]["depends"]
    passed = {p["name"] for p in templates["continue"]["inputs"]["parameters"]}
    assert "endpoint" not in passed, "the server ends with its workflow"
