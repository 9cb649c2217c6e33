"""The sidecar that holds a stage's turn, and what the local executor does in its place."""

import itertools
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Container, Parameter

from tests.waiting import LIMIT_S, until
from tuneloop.argo.pod_fields import pod_fields
from tuneloop.argo.run_plan import plan_stage
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.config.extended import extend_cluster
from tuneloop.core.errors import UserError
from tuneloop.extensions.sharing.lease_sidecar import add_lease_sidecar
from tuneloop.extensions.sharing.settings import Share
from tuneloop.local.executor import execute_workflow
from tuneloop.local.journal import Node
from tuneloop.sharing.lease_storage import open_lease_group
from tuneloop.stages.rollout import rollout
from tuneloop.workflow.loop import StageSpec

SHARED = extend_cluster().model_validate({"share": Share(group="g", patience=10)})


SCRIPT = 'cp "$TUNELOOP_LEASE" $0.turn; date +%s.%N > $0.begin; sleep 0.1; date +%s.%N > $0.end'
RELEASES = """
import json, os, sys
from pathlib import Path
from tests.waiting import until
from tuneloop.workflow.loop import StageSpec
from tuneloop.core import fencing

store, number = Path(sys.argv[1]).parent, fencing.check_lease()["number"]
(store / f"computed-{number}").touch()
fencing.release_lease()
until(lambda: number > 1 or (store / "computed-2").exists())
(store / f"written-{number}").touch()
"""


def build(tasks: int, command: tuple[str, ...] = ("bash", "-c", SCRIPT)) -> dict[str, Any]:
    """Tasks at once, each of which writes when it began, what turn it had, and when it ended."""
    with define_workflow("turns") as built:
        stage = Container(
            name="stage",
            inputs=[Parameter(name="to")],
            command=list(command),
            args=["{{inputs.parameters.to}}"],
            **pod_fields("base", "scorer", SHARED),
        )
        add_lease_sidecar(stage, SHARED, "trainer")
        with DAG(name="main"):
            for i in range(tasks):
                stage(name=f"t{i}", arguments={"to": "{{workflow.parameters.store}}/%s" % i})
    made: dict[str, Any] = built.to_dict()
    return made


def test_stages_of_a_run_take_turns_here(tmp_path: Path) -> None:
    """Without any cluster: all begin at once, none overlap, each knows its number, and nothing is held at the end."""
    outcome = execute_workflow(
        build(4), workdir=tmp_path / "work", arguments={"run": "a", "store": str(tmp_path)}
    )
    assert outcome.phase == "Succeeded", outcome.message
    times = sorted(
        tuple(float((tmp_path / f"{i}.{what}").read_text()) for what in ("begin", "end"))
        for i in range(4)
    )
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
    assert sorted(json.loads((tmp_path / f"{i}.turn").read_text())["number"] for i in range(4)) == [
        1,
        2,
        3,
        4,
    ]
    assert open_lease_group(f"{tmp_path}/.leases/g", who="a").read().is_idle


def test_of_two_runs_the_second_computes_while_the_first_still_writes(tmp_path: Path) -> None:
    """The order of events, and no accident: the first run writes only once the second has had the device."""
    made = build(1, (sys.executable, "-c", RELEASES))

    def run(name: str) -> Any:
        arguments = {"run": name, "store": str(tmp_path)}
        return execute_workflow(made, workdir=tmp_path / "work" / name, arguments=arguments)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, "a")
        until(lambda: (tmp_path / "computed-1").exists() or first.done())
        second = pool.submit(run, "b")
        assert [each.result(LIMIT_S).phase for each in (first, second)] == ["Succeeded"] * 2
    at = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-[12]")}
    assert at["computed-1"] < at["computed-2"] <= at["written-1"] and len(at) == 4
    assert open_lease_group(f"{tmp_path}/.leases/g", who="a").read().is_idle


def stop_where_it_waits(node: Node) -> None:
    """Stop the run, as `tuneloop stop` does, once a stage of it waits for another run."""
    if node.message.startswith("waits for the lease"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stage_waits_for_another_run_and_stops_waiting(tmp_path: Path) -> None:
    with open_lease_group(f"{tmp_path}/.leases/g", who="other", patience=60).acquire() as held:
        arguments = {"run": "a", "store": str(tmp_path)}
        outcome = execute_workflow(
            build(1), workdir=tmp_path / "work", arguments=arguments, on_node=stop_where_it_waits
        )
        assert (outcome.phase, outcome.exit_code) == ("Failed", 75)
        assert not (tmp_path / "0.begin").exists()
        told = (tmp_path / "work" / "nodes.jsonl").read_text()
        assert "waits for the lease of group g" in told
        assert held.renew() and held.group.read().waiting == ()
        held.group.update(lambda document: document.model_copy(update={"patience": 19}))
        outcome = execute_workflow(build(1), workdir=tmp_path / "work", arguments=arguments)
        assert outcome.exit_code == 2 and "the runs of group g say 19.0" in outcome.message


def test_the_sidecar_alone_has_a_token() -> None:
    """It starts first, with rights of its own; the stage's container mounts what it says, and no token."""
    with define_workflow("x") as built:
        stage_template(rollout, plan_stage(StageSpec(rollout), SHARED, ["iteration"]), SHARED)
    [template] = built.to_dict()["spec"]["templates"]
    [turn] = template["initContainers"]
    mounts = {
        name: {m["name"] for m in c["volumeMounts"]}
        for name, c in (("lease", turn), ("main", template["container"]))
    }
    assert turn["restartPolicy"] == "Always" and mounts["lease"] == {"lease", "lease-token"}
    assert (
        mounts["main"] == {"scratch", "shm", "lease"}
        and template["serviceAccountName"] == "tuneloop-lease"
    )
    assert {v["name"] for v in template["volumes"]} == {"scratch", "shm", "lease", "lease-token"}
    assert not built.to_dict()["spec"]["automountServiceAccountToken"]


def test_other_init_containers_are_refused_here(tmp_path: Path) -> None:
    made = build(1)
    made["spec"]["templates"][0]["initContainers"][0]["command"] = ["sh"]
    with pytest.raises(
        UserError, match="initContainers: 'lease': is not supported by the local executor"
    ):
        execute_workflow(made, workdir=tmp_path, arguments={"run": "a", "store": str(tmp_path)})
