"""A run made by real stages that compute next to nothing: named and shaped as tuneloop's own, so that what reads runs
can be tested in milliseconds. The learned thing is one number, `skill`: the share of completions that are right.

`Config` and `build_argo` make a pipeline of them (``toy_pipeline.py``), and this file is the program of each:
``python -m tests.unit.toy --flag …`` runs the one whose artifacts the flags name.
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tuneloop.core.artifacts import Manifest
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.workflow.loop import Loop, Step

SHARES = (0.25, 0.5, 0.75, 1.0)


def _skill(path: Path) -> int:
    return int(json.loads((path / "model" / "weights.json").read_text())["skill"])


def _save(stage: Stage, skill: int, version: int) -> None:
    (stage.out / "model").mkdir()
    (stage.out / "model" / "weights.json").write_text(json.dumps({"skill": skill}))
    stage.facts.update(version=version)


@component("checkpoint", role="trainer", results={"loss": float, "version": int})
def sft(
    stage: Stage,
    *,
    skill: Annotated[int, Field(ge=0, le=3, description="to begin with")] = 1,
    seed: int = 0,
) -> Results:
    """Make version 1 of the policy."""
    _save(stage, skill, 1)
    for step in range(1, 4):
        stage.metric(step, loss=3.0 / step)
    return {"loss": 1.0, "version": 1}


@component("rollouts", role="sampler", results={"completions": int, "mean_length": float})
def rollout(
    stage: Stage, policy: Input, *, iteration: int = 0, temperature: float = 1.0
) -> Results:
    """Pretend to sample."""
    (stage.out / "rollouts.json").write_text(
        json.dumps({"skill": _skill(policy.path), "iteration": iteration})
    )
    stage.facts.update(policy.manifest.facts, sampling={"temperature": temperature})
    length = 8.0 - _skill(policy.path)
    stage.metric(iteration, mean_length=length)
    return {"completions": 4, "mean_length": length}


@component("rewards", role="scorer", results={"mean_reward": float})
def reward(stage: Stage, rollouts: Input) -> Results:
    """Judge."""
    skill = json.loads((rollouts.path / "rollouts.json").read_text())["skill"]
    _judge(stage, skill, "rewards")
    stage.facts.update(rollouts.manifest.facts)
    return {"mean_reward": SHARES[skill]}


@component("checkpoint", role="trainer", results={"loss": float, "version": int})
def policy_update(stage: Stage, policy: Input, rewards: Input, *, iteration: int = 0) -> Results:
    """Learn one step of skill in two optimizer steps."""
    _save(stage, min(_skill(policy.path) + 1, 3), policy.manifest.facts["version"] + 1)
    for step in range(1, 3):
        stage.metric(step, loss=-0.1 * step, kl=0.01 * step, entropy=1.0 / step)
    return {"loss": -0.2, "version": policy.manifest.facts["version"] + 1}


@component("metrics", role="evaluator", results={"mean_reward": float})
def evaluate(stage: Stage, policy: Input, *, temperature: float = 0.0) -> Results:
    """Judge on held-out prompts."""
    _judge(stage, _skill(policy.path), "samples")
    return {"mean_reward": SHARES[_skill(policy.path)]}


@component("model", results={"parameters": int})
def export(stage: Stage, policy: Input, *, held: str = "") -> Results:
    """Copy the weights, once there is no file `held`."""
    while held and Path(held).exists():
        stage.check_stop()
        time.sleep(0.05)
    (stage.out / "weights.json").write_text(json.dumps({"skill": _skill(policy.path)}))
    stage.facts.update(version=policy.manifest.facts["version"])
    return {"parameters": 1}


def _judge(stage: Stage, skill: int, name: str) -> None:
    import pyarrow.json
    import pyarrow.parquet

    right = int(4 * SHARES[skill])
    rows = [
        {"id": f"p{i}", "prompt": f"reverse {i}<b>", "completion": "right" if i < right else "wrong", "answer": "right",
         "score": float(i < right), "outcome": "score"}
        for i in range(4)
    ]  # fmt: skip
    stage.facts["outcomes"] = {"score": len(rows)}
    # Tables made of Python objects, and pyarrow.parquet.write_table, import pandas: a second for each process.
    table = pyarrow.json.read_json(io.BytesIO("\n".join(map(json.dumps, rows)).encode()))
    with pyarrow.parquet.ParquetWriter(stage.out / f"{name}.parquet", table.schema) as file:
        file.write_table(table)


def make(
    url: str, iterations: int = 2, *, whole: bool = True, skill: int = 1
) -> dict[str, Manifest]:
    """Run the stages in this process, in the order of the loop, below `url`; unless `whole`, end with the loop."""
    made = {"sft": sft(out=f"{url}/sft", skill=skill)}
    policy = f"{url}/sft@{made['sft'].digest}"
    made["evaluate-before"] = evaluate(out=f"{url}/evaluate-before", policy=policy)
    for i in range(1, iterations + 1):
        at = f"{url}/iterations/{i}"
        made[f"{i}/rollout"] = rollout(out=f"{at}/rollout", policy=policy, iteration=i)
        made[f"{i}/reward"] = reward(out=f"{at}/reward", rollouts=f"{at}/rollout")
        update = policy_update(
            out=f"{at}/policy-update", policy=policy, rewards=f"{at}/reward", iteration=i
        )
        made[f"{i}/policy-update"], policy = update, f"{at}/policy-update@{update.digest}"
    if not whole:
        return made
    made["evaluate-after"] = evaluate(out=f"{url}/evaluate-after", policy=policy)
    made["export"] = export(out=f"{url}/export", policy=policy)
    return made


Sft: Any = sft.settings()


class Config(BaseModel):
    """Configuration of the toy."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    iterations: int = Field(2, ge=1, description="at most so many")
    per_workflow: int = Field(90, ge=1, le=90, description="so many in one workflow")
    sft: Sft = Sft()
    broken: bool = Field(False, description="let the export fail by a wrong flag")
    held: str = Field("", description="a file that the export waits to be deleted")


RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
IN = "{{inputs.parameters.%s}}"
OUT = "{{tasks.%s.outputs.parameters.%s}}"


def build_argo(config: Config) -> Any:
    """The toy's stages as a loop like that of `grpo`."""
    from hera.workflows import DAG, Parameter
    from hera.workflows.models import ValueFrom

    from tuneloop.argo.loop import CONTINUED, build_continue_template
    from tuneloop.argo.run_plan import plan_stages
    from tuneloop.argo.template import define_workflow, stage_template
    from tuneloop.workflow.loop import StageSpec
    from tuneloop.workflow.settings import Cluster

    at = f"{RUN}/iterations/{IN % 'iteration'}"
    more = "asInt(inputs.parameters.iteration) < asInt(workflow.parameters.iterations)"
    here = "asInt(inputs.parameters.iteration) % asInt(workflow.parameters['per-workflow']) != 0"
    last = "tasks['next'].status == 'Succeeded' ? tasks['next'].outputs.parameters.%s : %s"
    own = {
        "policy": "tasks['policy-update'].outputs.parameters.checkpoint",
        "iteration": f"string({IN % 'iteration'})",
    }
    specs = [StageSpec(each) for each in (rollout, reward, policy_update, evaluate)]
    specs += [StageSpec(sft, config.sft), StageSpec(export, held=config.held)]
    cluster = Cluster()
    plan = plan_stages("toy", specs, cluster, wired=["iteration"])
    limits = config.model_dump(include={"iterations", "per_workflow"})
    with define_workflow("toy", limits, plan=plan) as built:
        make_sft, sample, score, update, check, save = (
            stage_template(each, plan.stages[each.template], cluster)
            for each in (sft, rollout, reward, policy_update, evaluate, export)
        )
        with DAG(
            name="loop",
            inputs=[Parameter(name="iteration"), Parameter(name="policy")],
            outputs=[
                Parameter(name=k, value_from=ValueFrom(expression=last % (k, v)))
                for k, v in own.items()
            ],
        ) as loop:
            one = {"policy": IN % "policy", "iteration": IN % "iteration"}
            a = sample(name="rollout", arguments={**one, "rollouts": f"{at}/rollout"})
            scored = {"rollouts": OUT % ("rollout", "rollouts"), "rewards": f"{at}/reward"}
            b = score(name="reward", arguments=scored)
            learned = {"rewards": OUT % ("reward", "rewards"), "checkpoint": f"{at}/policy-update"}
            c = update(name="policy-update", arguments={**one, **learned})
            following = {
                "iteration": "{{=asInt(inputs.parameters.iteration) + 1}}",
                "policy": OUT % ("policy-update", "checkpoint"),
            }
            d = loop(name="next", arguments=following, when="{{=%s && %s}}" % (here, more))
            a >> b >> c >> d
        proceed = build_continue_template(CONTINUED, ("iteration", "policy"), cluster)
        with DAG(
            name=CONTINUED, inputs=[Parameter(name="iteration"), Parameter(name="policy")]
        ) as part:
            train = loop(
                name="loop", arguments={"iteration": IN % "iteration", "policy": IN % "policy"}
            )
            trained, reached = (
                OUT % ("loop", "policy"),
                "asInt(tasks.loop.outputs.parameters.iteration)",
            )
            more = f"{reached} < asInt(workflow.parameters.iterations)"
            onward = {"iteration": "{{=%s + 1}}" % reached, "policy": trained}
            over = "{{=!(%s)}}" % more
            judged = {"policy": trained, "metrics": f"{RUN}/evaluate-after"}
            after = check(name="evaluate-after", arguments=judged, when=over)
            lost = f"{RUN}/nowhere" if config.broken else trained
            done = save(
                name="export", arguments={"policy": lost, "model": f"{RUN}/export"}, when=over
            )
            train >> proceed(name="continue", arguments=onward, when="{{=%s}}" % more)
            train >> after >> done
        with DAG(name="main") as main:
            policy = OUT % ("sft", "checkpoint")
            start = make_sft(name="sft", arguments={"checkpoint": f"{RUN}/sft"})
            before = check(
                name="evaluate-before",
                arguments={"policy": policy, "metrics": f"{RUN}/evaluate-before"},
            )
            start >> before >> part(name="part", arguments={"iteration": "1", "policy": policy})
    built.entrypoint = main.name
    return built


LOOP = Loop(
    steps=[
        Step(rollout, policy="policy", iteration="iteration"),
        Step(reward, rollouts="rollout.rollouts"),
        Step(policy_update, policy="policy", rewards="reward.rewards", iteration="iteration"),
    ],
    carry={"policy": "policy-update.checkpoint"},
    constants=[],
    reward="reward.mean-reward",
    check=Step(evaluate, policy="policy"),
    finish=[Step(export, policy="policy")],
)
vars(build_argo)["loop"] = LOOP


def main(argv: list[str]) -> None:
    """Run the stage whose output and inputs are the artifacts that `argv` names."""
    stages = (sft, rollout, reward, policy_update, evaluate, export)
    artifacts = {name for stage in stages for name in (stage.output, *stage.inputs)}
    named = {word[2:] for word in argv if word.startswith("--")} & artifacts
    next(stage for stage in stages if {stage.output, *stage.inputs} == named).main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
