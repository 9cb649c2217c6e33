"""GRPO: data_prep → base_model → (rollout → reward → policy_update) repeated → evaluate → export.

    tuneloop run grpo --set base_model=path/to/a/hugging-face-model

The loop is an Argo template that calls itself: iteration k+1 starts from the checkpoint of iteration k, until the
iterations are used up or a batch of rollouts earns `target_reward`. After `per_workflow` iterations the run goes on in
another workflow, so that it may be as long as it likes. With the engine `vllm` one server lives as long as
the run and loads each new version in place; with `transformers` every rollout generates in its own process, which is
slower and bit-for-bit reproducible. With `engine.pull` every version is published as a delta, and the server pulls
it; with the engine `endpoint` a fleet that somebody else owns does, and is asked for rollouts by URL alone, or its
workers are brought to each version before they are asked (`engine.fleet`).

With `loop.asynchronous` the next batch is sampled while the policy is updated on this one: nobody waits, and all but
the first batch of a workflow are one version old.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import SET_BY_PIPELINE
from tuneloop.core.errors import UserError
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout

if TYPE_CHECKING:
    from hera.workflows import DAG, Parameter, Task, Workflow

GIVEN = {*SET_BY_PIPELINE, "weights"}

DataPrep: Any = data_prep.settings(without=GIVEN)
BaseModelSettings: Any = base_model.settings(without=GIVEN)
Rollout: Any = rollout.settings(without=GIVEN, max_tokens=8)
Reward: Any = reward.settings()
PolicyUpdate: Any = policy_update.settings(without=GIVEN)
Evaluate: Any = evaluate.settings(without=GIVEN, max_tokens=8)
Export: Any = export.settings()


class Config(LoopPipelineConfig):
    """Configuration of `grpo`."""

    data: DataPrep = DataPrep()
    model: BaseModelSettings = BaseModelSettings()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    update: PolicyUpdate = PolicyUpdate()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()


RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
IN = "{{inputs.parameters.%s}}"
LOOP_PARAMETERS = ("iterations", "per_workflow", "target_reward")
AROUND = ("data-prep", "base-model", "evaluate", "export", "serve")
ITERATION = ("rollout", "reward", "policy-update")
SAMPLING = ("prompts", "endpoint", "iteration", "policy")
BATCH_OUTPUTS = ("rewards", "mean-reward")
LOOP_OUTPUTS = ("policy", "iteration", "mean-reward")
CARRIED = ("prompts", "reference")
"""References that every iteration needs, and so every workflow of the loop."""
MORE = (
    "asInt(%s) < asInt(workflow.parameters.iterations) && asFloat(%s) < asFloat(workflow.parameters['target-reward'])"
)
"""Whether there is an iteration after this one, of which it takes the number and the mean reward."""
CHECKPOINT = "{{tasks.%s.outputs.parameters.checkpoint}}"
PROMPTS = "{{tasks.data-prep.outputs.parameters.prompts}}"


def build_argo(config: Config) -> Workflow:
    """The loop as an Argo Workflow."""
    from hera.workflows import DAG

    from tuneloop.argo.template import workflow

    graph = pod_graph(config)
    with workflow("grpo", config.loop.model_dump(include=set(LOOP_PARAMETERS)), cluster=config.cluster) as built:
        stages, loop = build_stages(config, graph)
        part = build_part(config, stages, loop)
        with DAG(name="main") as main:
            data = stages["data-prep"](name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            model = base_model_task(stages, data)
            build_rl(config, stages, part, model, model, CHECKPOINT % "base-model")
    built.entrypoint = main.name
    return built


def build_stages(config: Config, graph: Workflow | None) -> tuple[dict[str, Any], DAG]:
    """The templates of the stages by name, and the loop over some of them; to be called inside a Workflow.

    Args:
        graph: what `pod_graph` made.
    """
    if graph is None:
        stages = templates(config, (*AROUND, *ITERATION))
        return stages, build_loop(config, stages)
    return templates(config, AROUND), build_pods(config, graph)


def pod_graph(config: Config, *, served: bool = False) -> Workflow | None:
    """The part of the loop that one pod runs, if pods run several stages; to be called outside a Workflow.

    Args:
        served: the rollout server is in the same pod, for there is none beside it; the graph's entry is `pod`, then.
    """
    from tuneloop.argo.template import workflow

    if not config.loop.iterations_per_pod:
        return None
    parameters = {**config.loop.model_dump(), "per_workflow": config.loop.iterations_per_pod}
    with workflow("pod", {name: parameters[name] for name in LOOP_PARAMETERS}) as graph:
        stages = templates(config, (*ITERATION, "evaluate", *(["serve"] if served else [])))
        loop = build_loop(config, stages)
        if served:
            build_served(config, stages, loop)
    return graph


def build_served(config: Config, stages: dict[str, Any], loop: DAG) -> None:
    """The template `pod`: the loop beside its server."""
    from hera.workflows import DAG, Parameter
    from hera.workflows.models import ValueFrom

    passed, made = ("iteration", "policy", *CARRIED), ("iteration", "policy", "mean-reward")
    told = {name: ValueFrom(parameter="{{tasks.loop.outputs.parameters.%s}}" % name) for name in made}
    with DAG(
        name="pod",
        inputs=[Parameter(name=name) for name in passed],
        outputs=[Parameter(name=name, value_from=value) for name, value in told.items()],
    ):
        server, endpoint = serve_task(config, stages, IN % "policy")
        server >> loop(name="loop", arguments={**{name: IN % name for name in passed}, "endpoint": endpoint})


def templates(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """Stages as Hera templates, by name; to be called inside a Workflow."""
    from tuneloop.argo.template import server_template, stage_template

    engine = {"engine": config.engine.name, "engine_args": config.engine.options, "seed": config.seed}
    published = config.published(RUN)
    seed = {"seed": config.seed}
    stage = functools.partial(stage_template, cluster=config.cluster)
    sampling: Any = {"dynamic": ["iteration", "endpoint"]}
    training: Any = {"dynamic": ["iteration"], "processes": config.processes, "nodes": config.nodes}
    server = {"port": config.engine.port, "engine_args": config.engine.options, "cluster": config.cluster}
    model = {**config.model.model_dump(), "model": config.base_model}
    update = {**config.update.model_dump(), "max_staleness": config.max_staleness, **seed, **published}
    makers = {
        "data-prep": lambda: stage(data_prep, {**config.data.model_dump(), **seed}),
        "base-model": lambda: stage(base_model, {**model, **seed, **published}),
        "rollout": lambda: stage(rollout, {**config.rollout.model_dump(), **engine}, **sampling),
        "reward": lambda: stage(reward, config.reward.model_dump()),
        "policy-update": lambda: stage(policy_update, update, **training),
        "evaluate": lambda: stage(evaluate, {**config.evaluate.model_dump(), **engine}, **sampling),
        "export": lambda: stage(export, config.export.model_dump()),
        "serve": lambda: server_template(**server, **published),
    }
    return {name: makers[name]() for name in names if name != "serve" or config.engine.name == "vllm"}


def base_model_task(stages: dict[str, Any], data: Task) -> Task:
    """The stage that brings the model, with a tokenizer trained on the data where it is made here."""
    task = stages["base-model"](name="base-model", arguments={"prompts": PROMPTS, "checkpoint": f"{RUN}/base-model"})
    data >> task
    return task


def build_loop(config: Config, stages: dict[str, Any]) -> DAG:
    """Iterations from a policy on, until the loop or this workflow's part of it ends."""
    from hera.workflows import DAG, Parameter

    names = ("iteration", "policy", *CARRIED, "endpoint")
    if not config.loop.asynchronous:
        return build_turn(config, stages, "loop", names, None)
    batch = build_batch(stages)
    turn = build_turn(config, stages, "turn", (*names, "rewards", "mean-reward"), batch)
    with DAG(
        name="loop",
        inputs=[Parameter(name=name) for name in names],
        outputs=[told(name, "{{tasks.turn.outputs.parameters.%s}}" % name) for name in LOOP_OUTPUTS],
    ) as loop:
        given = {name: IN % name for name in names}
        first = batch(name="batch", arguments={name: given[name] for name in SAMPLING})
        scored = {name: "{{tasks.batch.outputs.parameters.%s}}" % name for name in BATCH_OUTPUTS}
        first >> turn(name="turn", arguments={**given, **scored})
    return loop


def build_batch(stages: dict[str, Any]) -> DAG:
    """Rollouts of an iteration, and their rewards."""
    from hera.workflows import DAG, Parameter

    with DAG(
        name="batch",
        inputs=[Parameter(name=name) for name in SAMPLING],
        outputs=[told(name, "{{tasks.reward.outputs.parameters.%s}}" % name) for name in BATCH_OUTPUTS],
    ) as batch:
        sample_tasks(stages)
    return batch


def sample_tasks(stages: dict[str, Any]) -> Task:
    """From the enclosing template's policy to scored rollouts: the task that scores."""
    at = f"{RUN}/iterations/{IN % 'iteration'}"
    sample = stages["rollout"](
        name="rollout", arguments={**{name: IN % name for name in SAMPLING}, "rollouts": f"{at}/rollout"}
    )
    score: Task = stages["reward"](
        name="reward",
        arguments={"rollouts": "{{tasks.rollout.outputs.parameters.rollouts}}", "rewards": f"{at}/reward"},
    )
    sample >> score
    return score


def build_turn(config: Config, stages: dict[str, Any], name: str, inputs: Sequence[str], batch: DAG | None) -> DAG:
    """One iteration, which calls the next.

    Args:
        name: of the template.
        inputs: its parameters.
        batch: what `build_batch` made, if the loop is asynchronous: then the iteration is given its rewards, and
            samples those of the next beside its update, with the policy that it starts from.
    """
    from hera.workflows import DAG, Parameter

    at = f"{RUN}/iterations/{IN % 'iteration'}"
    reward = "inputs.parameters" if batch else "tasks.reward.outputs.parameters"
    here = "asInt(inputs.parameters.iteration) % asInt(workflow.parameters['per-workflow']) != 0"
    more = "{{=%s && %s}}" % (here, MORE % ("inputs.parameters.iteration", f"{reward}['mean-reward']"))
    after = "{{=asInt(inputs.parameters.iteration) + 1}}"
    own = {
        "policy": "tasks['policy-update'].outputs.parameters.checkpoint",
        "iteration": f"string({IN % 'iteration'})",
        "mean-reward": f"{reward}['mean-reward']",
    }
    # Only a task that ran has outputs; Argo says so by its status.
    last = "tasks.next.status == 'Succeeded' ? tasks.next.outputs.parameters['%s'] : %s"
    ahead = "{{=tasks.ahead.status == 'Succeeded' ? tasks.ahead.outputs.parameters['%s'] : ''}}"
    carried = {name: IN % name for name in (*CARRIED, "endpoint")}
    with DAG(
        name=name,
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[told(name, expression=last % (name, own[name])) for name in LOOP_OUTPUTS],
    ) as turn:
        scored = None if batch else sample_tasks(stages)
        update = stages["policy-update"](
            name="policy-update",
            arguments={
                "policy": IN % "policy",
                "rewards": "{{%s.rewards}}" % reward,
                "reference": IN % "reference",
                "checkpoint": f"{at}/policy-update",
                "iteration": IN % "iteration",
            },
        )
        over = [update]
        if scored:
            scored >> update
        if batch:
            sampling = {**{name: IN % name for name in SAMPLING}, "iteration": after}
            over.append(batch(name="ahead", arguments=sampling, when=more))
            carried |= {name: ahead % name for name in BATCH_OUTPUTS}
        following = turn(
            name="next",
            arguments={"iteration": after, "policy": CHECKPOINT % "policy-update", **carried},
            when=more,
        )
        if config.loop.evaluate_every:
            check = stages["evaluate"](
                name="evaluate",
                arguments={
                    **{name: IN % name for name in SAMPLING},
                    "policy": CHECKPOINT % "policy-update",
                    "metrics": f"{at}/evaluate",
                },
                when="{{=asInt(inputs.parameters.iteration) %% %d == 0}}" % config.loop.evaluate_every,
            )
            over >> check  # a server holds one version at a time
            following.depends = "policy-update && (evaluate.Succeeded || evaluate.Skipped)"
        else:
            over >> following
    return turn


def told(name: str, value: str = "", expression: str | None = None) -> Parameter:
    """An output parameter of a graph."""
    from hera.workflows import Parameter
    from hera.workflows.models import ValueFrom

    return Parameter(
        name=name, value_from=ValueFrom(expression=expression) if expression else ValueFrom(parameter=value)
    )


def build_pods(config: Config, graph: Workflow) -> DAG:
    """The loop with a pod for every `iterations_per_pod` iterations: what one pod runs, which calls the next."""
    from hera.workflows import DAG, Parameter
    from hera.workflows.models import ValueFrom

    from tuneloop.argo.multi_stage_pod import segment_template

    inputs, outputs = ("iteration", "policy", *CARRIED, "endpoint"), ("iteration", "policy", "mean-reward")
    fixed = {name: f"{{{{workflow.parameters.{name}}}}}" for name in ("run", "store", "iterations", "target-reward")}
    fixed["per-workflow"] = str(config.loop.iterations_per_pod)
    segment = segment_template(graph, "loop", inputs, outputs, fixed=fixed, cluster=config.cluster)
    ended = "tasks.segment.outputs.parameters"
    more = MORE % (f"{ended}.iteration", f"{ended}['mean-reward']")
    here = f"asInt({ended}.iteration) % asInt(workflow.parameters['per-workflow']) != 0"
    last = "tasks.next.status == 'Succeeded' ? tasks.next.outputs.parameters['%s'] : %s['%s']"
    with DAG(
        name="loop",
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[Parameter(name=name, value_from=ValueFrom(expression=last % (name, ended, name))) for name in outputs],
    ) as loop:
        given = {name: IN % name for name in inputs}
        turn = segment(name="segment", arguments=given)
        following = {"iteration": "{{=asInt(%s.iteration) + 1}}" % ended, "policy": "{{%s.policy}}" % ended}
        again = loop(name="next", arguments={**given, **following}, when="{{=%s && %s}}" % (here, more))
        turn >> again
    return loop


def build_part(config: Config, stages: dict[str, Any], loop: DAG) -> DAG:
    """One workflow's part of the loop, then either the next workflow, or evaluation and export.

    Args:
        loop: what `build_loop` made.
    """
    from hera.workflows import DAG, Parameter

    from tuneloop.argo.continuation import proceed_template

    passed = ("iteration", "policy", *CARRIED)
    proceed = proceed_template("continued", passed, config.cluster)
    ended = "tasks.loop.outputs.parameters"
    more = MORE % (f"{ended}.iteration", f"{ended}['mean-reward']")
    trained, over = "{{%s.policy}}" % ended, "{{=!(%s)}}" % more
    with DAG(name="part", inputs=[Parameter(name=name) for name in (*passed, "endpoint")]) as part:
        train = loop(name="loop", arguments={name: IN % name for name in (*passed, "endpoint")})
        following = {"iteration": "{{=asInt(%s.iteration) + 1}}" % ended, "policy": trained}
        onward = proceed(
            name="continue", arguments={**{name: IN % name for name in CARRIED}, **following}, when="{{=%s}}" % more
        )
        after = stages["evaluate"](
            name="evaluate-after",
            arguments={
                **{name: IN % name for name in ("prompts", "endpoint")},
                **{"policy": trained, "iteration": "0", "metrics": f"{RUN}/evaluate-after"},
            },
            when=over,
        )
        done = stages["export"](name="export", arguments={"policy": trained, "model": f"{RUN}/export"}, when=over)
        train >> onward
        # One after the other: a server holds one version at a time.
        train >> after >> done
    with DAG(name="continued", inputs=[Parameter(name=name) for name in passed]):
        server, endpoint = serve_task(config, stages, IN % "policy")
        again = part(name="part", arguments={**{name: IN % name for name in passed}, "endpoint": endpoint})
        server >> again
    return part


def serve_task(config: Config, stages: dict[str, Any], policy: str) -> tuple[list[Task], str]:
    """The rollout server that boots with `policy`, if the engine has one, and the endpoint; inside a DAG.

    A server that pulls needs no policy: it finds the latest version.
    """
    if config.engine.name != "vllm":
        return [], config.engine.rollout_endpoint_url or ""
    serve = stages["serve"](name="serve", arguments={} if config.engine.pull else {"policy": policy})
    return [serve], f"http://{{{{tasks.serve.ip}}}}:{config.engine.port}"


def build_rl(config: Config, stages: dict[str, Any], part: DAG, model: Task, start: Task, policy: str) -> None:
    """Evaluate the policy, then loop; to be called inside the main DAG.

    Args:
        part: what `build_part` made.
        model: the task whose checkpoint the server boots with, while `start` may still be training, unless both want
            the same device.
        start: the task that makes `policy`.
        policy: the tag of its checkpoint: where the loop starts, and what a KL term refers to.
    """
    server, endpoint = serve_task(config, stages, CHECKPOINT % "base-model")
    shared = {"prompts": PROMPTS, "endpoint": endpoint}
    before = stages["evaluate"](
        name="evaluate-before",
        arguments={**shared, "policy": policy, "iteration": "0", "metrics": f"{RUN}/evaluate-before"},
    )
    train = part(name="part", arguments={**shared, "iteration": "1", "policy": policy, "reference": policy})
    (start if config.engine.colocate else model) >> server
    [start, *server] >> before >> train


def build_kfp(config: Config) -> Any:
    """The loop for Kubeflow Pipelines: written out if it is short, else a ParallelFor over committed state."""
    from kfp import dsl

    from tuneloop.kfp.template import pipeline

    steps = kfp_steps(config)

    @pipeline("grpo")
    def built(
        store: str, run: str = "grpo", seed: int = config.seed, target_reward: float = config.loop.target_reward
    ) -> None:
        """GRPO on prompts with verifiable rewards, evaluated before and after, and exported.

        Args:
            store: URL of the store, as pods reach it: s3://bucket/prefix
            run: name of the run; its artifacts lie at store/run, and the same name again resumes it
            seed: every random stream of the run is derived from it
            target_reward: the loop ends once a batch of rollouts earns this mean reward
        """
        at = f"{store}/{run}"
        with dsl.ExitHandler(steps["report"]("report", run=run, store=store)):
            prompts = steps["data-prep"]("data-prep", url=f"{at}/data-prep", seed=seed).outputs["prompts"]
            published = config.published(at)
            model = steps["base-model"]("base-model", url=f"{at}/base-model", prompts=prompts, seed=seed, **published)
            kfp_rl(config, steps, at, prompts, model.outputs["checkpoint"], seed, target_reward)

    return built


def kfp_steps(config: Config) -> dict[str, Any]:
    """Every stage of the loop as a function that makes its KFP task, by name."""
    from tuneloop.kfp.grain import segment_step
    from tuneloop.kfp.template import position_step, report_step, stage_step

    for name, given in (("loop.asynchronous", config.loop.asynchronous), ("engine.colocate", config.engine.colocate)):
        if given:
            raise UserError(name, True, "is built for Argo and for one machine: leave it out here")
    graph = pod_graph(config, served=True)
    pods: Any = {"cluster": config.cluster, "kfp": config.kfp}
    engine = {
        **{"engine": config.engine.name, "engine_args": config.engine.options},
        "endpoint": config.engine.rollout_endpoint_url,
    }
    model = {**config.model.model_dump(), "model": config.base_model}
    seed, turn, publish = ["seed"], ["seed", "iteration"], list(config.published(""))
    update: Any = {"dynamic": [*turn, *publish], "processes": config.processes, "nodes": config.nodes}
    return {
        "data-prep": stage_step(data_prep, config.data, dynamic=seed, **pods),
        "base-model": stage_step(base_model, model, dynamic=[*seed, *publish], **pods),
        "rollout": stage_step(rollout, {**config.rollout.model_dump(), **engine}, dynamic=turn, **pods),
        "reward": stage_step(reward, config.reward, **pods),
        "policy-update": stage_step(policy_update, config.update, **update, **pods),
        "evaluate": stage_step(evaluate, {**config.evaluate.model_dump(), **engine}, dynamic=turn, **pods),
        "export": stage_step(export, config.export, **pods),
        "position": position_step(**pods),
        "report": report_step(**pods),
        **({"iterations": segment_step(graph, "pod", **pods)} if graph else {}),
    }


def kfp_rl(config: Config, steps: dict[str, Any], at: str, prompts: Any, policy: Any, seed: Any, target: Any) -> None:
    """Evaluate the policy, loop, evaluate again, export; to be called inside a pipeline.

    Args:
        at: URL of the run.
        prompts, policy: artifacts: what is sampled, and where the loop starts.
        seed, target: parameters of the pipeline.
    """
    from kfp import dsl

    def check(name: str, where: str, policy: Any, iteration: Any = 0) -> Any:
        return steps["evaluate"](
            name, url=f"{where}/{name}", policy=policy, prompts=prompts, seed=seed, iteration=iteration
        )

    def turn(i: Any, base: Any, start: Any) -> Any:
        """Iteration `i` from the policy `start`, committed below the URL `base`: its policy_update."""
        here = {"seed": seed, "iteration": i}
        sample = steps["rollout"]("rollout", url=f"{base}/rollout", policy=start, prompts=prompts, **here)
        score = steps["reward"]("reward", url=f"{base}/reward", rollouts=sample.outputs["rollouts"])
        rewards = score.outputs["rewards"]
        given = {"policy": start, "rewards": rewards, "reference": policy, "target_reward": target}
        given |= config.published(at)
        return steps["policy-update"]("policy-update", url=f"{base}/policy-update", **given, **here)

    def turns(i: Any, base: Any, start: Any) -> Any:
        """As `turn`, of all iterations that one pod runs, `i` the first."""
        given = {"policy": start, "prompts": prompts, "reference": policy, "seed": seed, "target_reward": target}
        return steps["iterations"]("iterations", url=at, iteration=i, **given)

    count, pod = config.loop.iterations, config.loop.iterations_per_pod
    stride, ahead = (pod, turns) if pod else (1, turn)
    every = 0 if pod else config.loop.evaluate_every  # a pod of several iterations evaluates by itself
    rounds = range(1, count + 1, stride)
    check("evaluate-before", at, policy)
    if len(rounds) <= config.kfp.unroll:
        trained = policy
        for i in rounds:
            base = f"{at}/iterations/{i}"
            trained = ahead(i, base, trained).outputs["checkpoint"]
            if every and i % every == 0:
                check("evaluate", base, trained, i)
    else:
        asked = {"policy": policy, "run": at, "iterations": count, "evaluate_every": every, "target_reward": target}
        asked["stride"] = stride
        plan = steps["position"]("plan", iteration=0, **asked)
        with dsl.ParallelFor(plan.outputs["todo"], parallelism=1) as i:
            start = steps["position"]("turn", iteration=i, **asked)
            base = start.outputs["at"]  # made there: a number of KFP's becomes 1 in one text, and 1.0 in another
            update = ahead(i, base, start.outputs["start"])
            if every:
                with dsl.If(start.outputs["evaluate"] == True):  # noqa: E712 - kfp reads the comparison
                    check("evaluate", base, update.outputs["checkpoint"], i)
        trained = steps["position"]("last", iteration=0, **asked).after(update).outputs["start"]
    check("evaluate-after", at, trained)
    steps["export"]("export", url=f"{at}/export", policy=trained)


if "hera._cli" in sys.modules:  # `hera generate yaml` takes what it finds in the module
    workflow = build_argo(Config())

if __name__ == "__main__":  # sends it to the Argo server that ARGO_SERVER names
    from tuneloop.cli.cluster import submit_pipeline

    sys.exit(submit_pipeline(__file__, sys.argv[1:]))
