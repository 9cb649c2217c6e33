"""What stages are in a loop is read from their roles: a loop of stages under other names is read as any other."""

import sys
from pathlib import Path

from tuneloop.argo.run_plan import plan_stages
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.kfp.iterations import find_position
from tuneloop.runs.run_record import Run
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.pod_loop import PodLoop, StageCall
from tuneloop.workflow.settings import Cluster


@component("checkpoint", role="trainer", results={"version": int})
def distil(stage: Stage, rewards: Input, *, iteration: int = 0) -> Results:
    """Learn."""
    (stage.out / "model").mkdir()
    (stage.out / "model" / "weights").write_text(str(iteration))
    stage.metric(iteration, loss=1.0 / iteration)
    stage.facts.update(version=iteration)
    return {"version": iteration}


@component("rollouts", role="sampler")
def draw(stage: Stage, *, iteration: int = 0) -> Results:
    """Sample."""
    (stage.out / "rollouts").write_text(str(iteration))
    return {}


@component("rewards", role="scorer", results={"mean_reward": float})
def judge(stage: Stage, rollouts: Input, *, bonus: float = 0.0) -> Results:
    """Score."""
    (stage.out / "rewards").write_text(str(bonus))
    return {"mean_reward": 0.25 + bonus}


@component("metrics", role="evaluator", results={"mean_reward": float})
def examine(stage: Stage, checkpoint: Input) -> Results:
    """Measure."""
    (stage.out / "metrics").write_text("")
    return {"mean_reward": 1.0}


def looped(url: str, iterations: int) -> Run:
    for i in range(1, iterations + 1):
        at = f"{url}/iterations/{i}"
        draw(out=f"{at}/drawn", iteration=i)
        judge(out=f"{at}/judged", rollouts=f"{at}/drawn")
        judge(out=f"{at}/judged-again", rollouts=f"{at}/drawn", bonus=0.5)
        distil(out=f"{at}/distilled", rewards=f"{at}/judged-again", iteration=i)
    examine(out=f"{url}/examined", checkpoint=f"{url}/iterations/{iterations}/distilled")
    return Run.open(url.rpartition("/")[2], url.rpartition("/")[0])


def test_a_run_of_other_stages_has_rewards_and_curves(tmp_path: Path) -> None:
    run = looped(f"{tmp_path}/r", 2)
    assert [score.value for score in run.training_rewards()] == [0.75, 0.75], (
        "the last that scored counts"
    )
    assert [score.value for score in run.evaluations()] == [1.0]
    curves = {(curve.stage, curve.name): curve.y for curve in run.curves()}
    rewards = {("judge", "mean_reward"): [0.75, 0.75], ("examine", "mean_reward"): [1.0]}
    assert curves == {**rewards, ("distil", "loss"): [1.0, 0.5]}


NAMES = ("drawn", "judged-again", "distilled")


def test_the_position_of_a_loop_of_other_stages(tmp_path: Path) -> None:
    looped(f"{tmp_path}/r", 2)
    steps = [StageCall(name=name, command=[], flags=[], wires={}, output="x") for name in NAMES]
    loop = PodLoop(
        steps=steps, carry={"policy": "distilled.checkpoint"}, reward="judged-again.mean-reward"
    )
    start = {"policy": {"ref": "start"}}
    found = find_position(loop, f"{tmp_path}/r", start, iterations=3, target_reward=2.0)
    policy = found.carried["policy"]
    assert (policy["stage"], policy["version"], found.last, found.ended) == ("distil", 2, 2, False)
    found = find_position(loop, f"{tmp_path}/r", start, iterations=3, target_reward=0.75)
    assert (found.carried["policy"]["version"], found.last, found.ended) == (1, 1, True)


def test_a_plan_has_the_roles_of_stages_under_other_names() -> None:
    specs = [StageSpec(stage) for stage in (draw, judge, distil, examine)]
    plan = plan_stages("distilling", specs, Cluster(), wired=["iteration"])
    roles = {name: stage.role for name, stage in plan.stages.items()}
    assert roles == {
        "draw": "sampler",
        "judge": "scorer",
        "distil": "trainer",
        "examine": "evaluator",
    }
    assert plan.stages["distil"].component is distil
    absent = plan.stages["draw"].model_copy(update={"module": "antigravity"})
    assert absent.component is None
    assert "antigravity" not in sys.modules, "reading starts nobody's program"
