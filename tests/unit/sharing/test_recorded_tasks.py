from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.sharing.recorded_tasks import find_device, read_recorded_tasks
from tuneloop.config.loading import dump_workflow, find_pipeline
from tuneloop.core.artifacts import Draft, Role
from tuneloop.core.component import find_component
from tuneloop.core.errors import UserError
from tuneloop.local.journal import Journal, Node, Workflow
from tuneloop.runs import run_record
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run

STAGES = (("rollout", 3.0), ("reward", 1.0), ("policy-update", 2.0))
ROLES: dict[str, Role] = {"rollout": "sampler", "reward": "scorer", "policy-update": "trainer"}


def made(store: Path, name: str, iterations: int = 3, gap: float = 0.5, pause: float = 0.0) -> Run:
    """A run by its manifests: iterations of 3, 1 and 2 s, `gap` before each stage, a `pause` before the last one."""
    clock = 1000.0
    for iteration in range(1, iterations + 1):
        for stage, seconds in STAGES:
            clock += gap + (pause if (iteration, stage) == (iterations, "rollout") else 0)
            draft = Draft(f"{store}/{name}/iterations/{iteration}/{stage}", attempt="data-test")
            timings = {"total": seconds} | (
                {"load": 0.25 * iteration} if stage == "rollout" else {}
            )
            about = {"timings": timings, "provenance": {"started": clock}}
            draft.commit(stage=stage.replace("-", "_"), role=ROLES[stage], **about)  # type: ignore[arg-type]
            clock += seconds
    return Run.open(name, str(store))


def pods(run: Run, before: float, after: float) -> Iterator[Node]:
    """The pods of a run, which are there for so long before and after their stages work."""
    for number, entry in enumerate(run.entries):
        span = {"started": entry.started - before, "finished": entry.finished + after}
        yield Node(f"n{number}", entry.key, entry.stage, entry.stage, "Pod", "Succeeded", **span)  # type: ignore[arg-type]


def test_a_run_is_read_from_its_manifests_alone(tmp_path: Path) -> None:
    tasks = read_recorded_tasks(
        made(tmp_path, "far", 4, pause=3600)
    )  # it was resumed: an hour in which nobody waited
    assert [(t.stage, t.iteration, t.seconds, t.device, t.lead) for t in tasks[3:6]] == [
        ("rollout", 2, 3.0, "sampler", 0.5),
        ("reward", 2, 1.0, "", 0.5),
        ("policy-update", 2, 2.0, "trainer", 0.5),
    ]


def test_a_pod_holds_its_device_from_start_to_end(tmp_path: Path) -> None:
    run = made(tmp_path, "here")
    journal = Journal(run.directory)
    journal.write(Workflow("here"))
    for node in pods(run, before=0.25, after=0.125):
        journal.write(node)
    journal.close()
    tasks = read_recorded_tasks(run)
    assert [(task.seconds, task.lead) for task in tasks[:3]] == [
        (3.375, 0.125),
        (1.375, 0.125),
        (2.375, 0.125),
    ]


def test_a_run_that_overlapped_is_read_as_it_ran(tmp_path: Path) -> None:
    at = {
        "rollout": (0.0, 5.0),
        "reward": (5.5, 1.0),
        "policy-update": (7.0, 4.0),
    }  # each batch 7 s after the last one
    for iteration in range(1, 4):
        for stage, (start, seconds) in at.items():
            draft = Draft(f"{tmp_path}/ahead/iterations/{iteration}/{stage}", attempt="data-test")
            begun = 1000 + 7 * iteration + start
            about = {"timings": {"total": seconds}, "provenance": {"started": begun}}
            draft.commit(stage=stage.replace("-", "_"), role=ROLES[stage], **about)  # type: ignore[arg-type]
    leads = {
        task.stage: task.lead for task in read_recorded_tasks(Run.open("ahead", str(tmp_path)))
    }
    assert leads == {"rollout": 0.5, "reward": 0.5, "policy-update": 0.5}


def test_what_can_not_be_planned_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has 1 whole iterations"):
        read_recorded_tasks(made(tmp_path, "short", 1))
    grpo = find_pipeline("grpo")
    pods, stages = (
        dump_workflow(grpo.build(grpo.configure(sets=[f"loop.iterations_per_pod={n}"])))
        for n in ("auto", 0)
    )
    for name, config, workflow, says in (
        ("grain", {}, pods, "ran its stages in one pod"),
        ("shared", {"cluster": {"share": {"group": "g"}}}, stages, "waited for turns itself"),
    ):
        made(tmp_path, name)
        run_record.Run.create(
            Record(run=name, pipeline="grpo", path="", config=config, store=str(tmp_path)), workflow
        )
        with pytest.raises(UserError, match=says):
            read_recorded_tasks(Run.open(name, str(tmp_path)))


def test_devices_are_those_of_the_stages() -> None:
    stages = ("rollout", "evaluate", "policy_update", "reward", "argo", "somebody_elses")
    found = [find_device(find_component(f"tuneloop.stages.{stage}")) for stage in stages]
    assert found == ["sampler", "sampler", "trainer", "", "", ""]
