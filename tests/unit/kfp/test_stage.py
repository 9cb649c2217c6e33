"""A stage as a task of KFP: from the launcher's executor input to the executor output that the launcher reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.frozen import read_answers
from tests.unit import toy
from tuneloop.core.artifacts import Artifact, find_manifest
from tuneloop.core.errors import EXIT_USER, UserError
from tuneloop.kfp import io, stage
from tuneloop.kfp.iterations import find_position, report_iterations
from tuneloop.kfp.ui_outputs import UI_OUTPUTS
from tuneloop.workflow.pod_loop import PodLoop, StageCall
from tuneloop.workflow.settings import Cluster


class Launcher:
    """Runs stages one after another in this process, as KFP's launcher would: by executor input alone."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run = directory, f"file://{directory}/run"

    def start(
        self,
        name: str,
        at: str,
        inputs: dict[str, Any] | None = None,
        further_outputs: tuple[str, ...] = (),
        **parameters: Any,
    ) -> int:
        from tuneloop.kfp.template import choose_output_types

        outputs = [*choose_output_types(getattr(toy, name)), *further_outputs, io.LOGS]
        task = self.directory / "kfp" / at
        task.mkdir(parents=True, exist_ok=True)
        (task / io.LOGS).write_text("of the launcher")
        given = {
            "inputs": {
                "parameterValues": {
                    "url": f"{self.run}/{at}",
                    "pipelinechannel--run": "r",
                    **parameters,
                },
                "artifacts": {
                    k: {"artifacts": [{"uri": "s3://b/k", "metadata": v}]}
                    for k, v in (inputs or {}).items()
                },
            },
            "outputs": {
                "artifacts": {
                    each: {"artifacts": [{"name": each, "uri": str(task / each)}]}
                    for each in outputs
                },
                "parameters": {
                    each: {"outputFile": str(task / "x")} for each in getattr(toy, name).results
                },
                "outputFile": str(task / "executor_output.json"),
            },
        }
        return stage.main([f"tests.unit.toy:{name}", "--executor-input", json.dumps(given)])

    def told(self, at: str) -> dict[str, Any]:
        """The executor output, by the message that the launcher parses."""
        text = (self.directory / "kfp" / at / "executor_output.json").read_text()
        return json_format.MessageToDict(
            json_format.Parse(text, pipeline_spec_pb2.ExecutorOutput())
        )

    def handle(self, at: str, name: str) -> dict[str, Any]:
        """What the next task is given of an output."""
        metadata: dict[str, Any] = self.told(at)["artifacts"][name]["artifacts"][0]["metadata"]
        return metadata

    def iteration(self, i: int, policy: dict[str, Any], target: float) -> dict[str, Any]:
        """rollout → reward → policy_update; the handle of what came of it."""
        at = f"iterations/{i}"
        assert self.start("rollout", f"{at}/rollout", {"policy": policy}, iteration=float(i)) == 0
        assert (
            self.start(
                "reward", f"{at}/reward", {"rollouts": self.handle(f"{at}/rollout", "rollouts")}
            )
            == 0
        )
        given = {"policy": policy, "rewards": self.handle(f"{at}/reward", "rewards")}
        assert (
            self.start(
                "policy_update", f"{at}/policy-update", given, iteration=i, target_reward=target
            )
            == 0
        )
        return self.handle(f"{at}/policy-update", "checkpoint")


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


def test_a_stage_tells_what_it_committed(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.start("sft", "sft", skill=2.0, seed=0) == 0  # KFP has no integers
    committed = Artifact(f"{launcher.run}/sft")
    handle = launcher.handle("sft", "checkpoint")
    assert handle["ref"] == committed.ref
    assert (handle["digest"], handle["version"], handle["loss"]) == (
        committed.manifest.digest,
        1.0,
        1.0,
    )
    assert committed.manifest.params["skill"] == 2
    assert launcher.told("sft")["parameterValues"] == {"loss": 1.0, "version": 1.0}
    shown = tmp_path / "kfp/sft"
    assert json.loads((shown / "checkpoint").read_text())["digest"] == committed.manifest.digest
    assert committed.ref in (shown / "preview").read_text()
    (curve,) = read_answers((shown / "curves").read_text())["/curves"]["curves"]
    assert (curve["name"], curve["y"]) == ("loss", [3.0, 1.5, 1.0])
    assert json.loads((shown / "results").read_text()) == {"loss": 1.0, "version": 1}


def test_the_task_of_a_stage_fails_where_a_declared_output_is_not_written(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a pipeline has it that a newer release has compiled."""
    assert launcher.start("sft", "sft", further_outputs=("samples",)) == EXIT_USER
    assert "output: 'samples': was written by nothing: compile" in capfd.readouterr().err
    assert not (tmp_path / "kfp/sft/executor_output.json").exists()


def test_the_task_of_iterations_writes_every_output_of_the_ui(tmp_path: Path) -> None:
    run = f"file://{tmp_path}/run"
    toy.make(run, iterations=2)
    names = [name.replace("_", "-") for name in ("rollout", "reward", "policy_update")]
    steps = [StageCall(name=name, command=[], flags=[], wires={}, output="x") for name in names]
    carry = {"policy": "policy-update.checkpoint"}
    loop = PodLoop(steps=steps, carry=carry, reward="reward.mean-reward")
    outputs = ["last_policy", *(output.name for output in UI_OUTPUTS)]

    def read_task(*further_outputs: str) -> io.Task:
        names = [*outputs, *further_outputs]
        artifacts = {
            name: {"artifacts": [{"name": name, "uri": f"{tmp_path}/{name}"}]} for name in names
        }
        output_file = str(tmp_path / "executor_output.json")
        return io.Task.read(
            json.dumps(
                {
                    "inputs": {"parameterValues": {"url": run}},
                    "outputs": {"artifacts": artifacts, "outputFile": output_file},
                }
            )
        )

    start = {"policy": {"ref": "r"}}
    position = find_position(loop, run, start, iterations=2, target_reward=2.0)
    with pytest.raises(UserError, match="samples"):
        report_iterations(read_task("samples"), loop, position)
    assert not (tmp_path / "executor_output.json").exists()
    for name in outputs:
        (tmp_path / name).unlink()
    report_iterations(read_task(), loop, position)
    written = json.loads((tmp_path / "executor_output.json").read_text())["artifacts"]
    assert list(written) == outputs
    scalars = json.loads((tmp_path / "results").read_text())
    assert scalars["iteration"] == 2
    assert written["results"]["artifacts"][0]["metadata"] == scalars
    curves = read_answers((tmp_path / "curves").read_text())["/curves"]["curves"]
    assert {tuple(curve["x"]) for curve in curves} == {(1, 2)}
    assert f"{run}/iterations/2/reward@" in (tmp_path / "preview").read_text()


def test_a_failed_stage_says_nothing(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.start("sft", "sft", skill=9) == 2
    assert not (tmp_path / "kfp/sft/executor_output.json").exists()
    assert find_manifest(f"{launcher.run}/sft") is None


def test_the_loop_ends_at_its_target(launcher: Launcher) -> None:
    """Skills 1, 2, 3 earn 0.5, 0.75, 1: the second iteration reaches 0.75."""
    launcher.start("sft", "sft", skill=1)
    policy = launcher.handle("sft", "checkpoint")
    made = [policy := launcher.iteration(i, policy, target=0.75) for i in (1, 2, 3, 4)]
    assert [stage.REACHED in each for each in made] == [False, True, True, True]
    assert [each.get(stage.REACHED) for each in made[1:]] == [2, 2, 2]
    assert {each["ref"] for each in made[1:]} == {
        Artifact(f"{launcher.run}/iterations/2/policy-update").ref
    }
    assert find_manifest(f"{launcher.run}/iterations/3/rollout") is None
    assert "ref" not in launcher.handle("iterations/3/rollout", "rollouts")
    assert launcher.start("evaluate", "evaluate-after", {"policy": policy}) == 0
    assert find_manifest(f"{launcher.run}/evaluate-after") is not None, (
        "the last policy is evaluated"
    )


def test_nothing_follows_a_loop_that_goes_on_in_the_next_run(
    launcher: Launcher, tmp_path: Path
) -> None:
    assert launcher.start("sft", "sft", skill=1) == 0
    policy = {**launcher.handle("sft", "checkpoint"), stage.CONTINUED: 60.0}
    assert launcher.start("evaluate", "evaluate-after", {"policy": policy}) == 0
    assert find_manifest(f"{launcher.run}/evaluate-after") is None
    assert launcher.handle("evaluate-after", "metrics") == {stage.CONTINUED: 60.0}
    assert (tmp_path / "kfp/evaluate-after" / io.LOGS).read_text() == "of the launcher", (
        "it is not ours to write"
    )


def test_position_is_read_from_what_is_committed(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start("sft", "sft", skill=0)
    start = {"policy": launcher.handle("sft", "checkpoint")}
    names = ("rollout", "reward", "policy-update")
    steps = [StageCall(name=name, command=[], flags=[], wires={}, output="x") for name in names]
    loop = PodLoop(
        steps=steps, carry={"policy": "policy-update.checkpoint"}, reward="reward.mean-reward"
    )

    def locate(**limits: float) -> tuple[int, bool, str]:
        limits = {"iterations": 5, "target_reward": 2.0, **limits}
        found = find_position(loop, launcher.run, start, **limits)  # type: ignore[arg-type]
        return found.last, found.ended, found.carried["policy"]["ref"]

    assert locate() == (0, False, start["policy"]["ref"])
    made = [policy := start["policy"]]
    for i in (1, 2):
        made.append(policy := launcher.iteration(i, policy, target=2.0))
    launcher.start("rollout", "iterations/3/rollout", {"policy": policy}, iteration=3)
    assert locate() == (2, False, policy["ref"]), "the third is not committed whole"
    assert locate(iterations=2) == (2, True, policy["ref"])
    assert locate(target_reward=0.5) == (2, True, policy["ref"]), "skill 1 has earned 0.5"
    assert locate(target_reward=0.25) == (1, True, made[1]["ref"])
    check = StageCall(name="evaluate", command=[], flags=[], wires={}, output="x")
    checked = loop.model_copy(update={"check": check, "evaluate_every": 2})
    found = find_position(checked, launcher.run, start, iterations=5, target_reward=2.0)
    assert found.last == 1, "the second has an evaluation to come"
    assert launcher.start("evaluate", "iterations/2/evaluate", {"policy": policy}) == 0
    assert find_position(checked, launcher.run, start, iterations=5, target_reward=2.0).last == 2
    behind = find_position(
        loop, launcher.run, {"policy": made[1]}, iterations=5, target_reward=2.0, after=1
    )
    assert (behind.last, behind.carried["policy"]["ref"]) == (2, policy["ref"])
    shutil.rmtree(tmp_path / "run/iterations/1/policy-update")
    assert locate() == (0, False, start["policy"]["ref"]), "what is lost is made again"


def test_an_artifact_that_two_inputs_take_is_passed_once(launcher: Launcher) -> None:
    handle = {"ref": "r"}
    given = {
        "inputs": {"parameterValues": {"same_artifact": {"reference": "policy"}}, "artifacts": {}}
    }
    given["inputs"]["artifacts"] = {"policy": {"artifacts": [{"metadata": handle}]}}
    task = io.Task.read(json.dumps({**given, "outputs": {"outputFile": "/x"}}))
    assert task.inputs == {"policy": handle, "reference": handle}


@pytest.mark.parametrize(
    ("artifact", "path"),
    [
        ({"uri": "s3://b/p/x"}, "/s3/b/p/x"),
        ({"uri": "gs://b/p/x"}, "/gcs/b/p/x"),
        ({"uri": "minio://b/x"}, "/minio/b/x"),
        ({"uri": "/tmp/x"}, "/tmp/x"),
        ({"uri": "s3://b/x", "customPath": "/elsewhere"}, "/elsewhere"),
    ],
)
def test_where_the_launcher_keeps_an_artifact(artifact: dict[str, str], path: str) -> None:
    assert io.get_local_path(artifact) == Path(path)


def test_what_runs_in_a_stage_needs_no_kfp() -> None:
    code = (
        "import tuneloop.kfp.stage, tuneloop.kfp.iterations, tuneloop.kfp.report, tuneloop.config.pipeline, sys;"
        "import tuneloop.kfp.check_data;"
        "print(*({'kfp', 'kubernetes', 'google.protobuf', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_the_pods_of_a_jobset_have_what_cluster_pod_says(tmp_path: Path) -> None:
    pod = {"labels": {"team": "a"}, "annotations": {"cost": "7"}}
    task = io.Task({"url": str(tmp_path / "sft")}, {}, {}, (), tmp_path / "outputs")
    jobset = stage.build_stage_jobset(toy.sft, task, 2, 1, Cluster(pod=pod))
    (job,) = jobset["spec"]["replicatedJobs"]
    metadata = job["template"]["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"]["cost"] == "7"
