"""GRPO: data_prep → base_model → (rollout → reward → policy_update) repeated → evaluate → export.

    tuneloop run grpo --set base_model=path/to/a/hugging-face-model

The loop is an Argo template that calls itself: iteration k+1 starts from the checkpoint of iteration
k, until the iterations are used up or a batch of rollouts earns `target_reward`. After
`per_workflow` iterations the run continues in another workflow, so that its length is not limited.

What samples is one of three engines:

- With `vllm` one server lives as long as the workflow and loads each new version in place. With
  `engine.weights=pull` every version is published as a delta, and the server pulls it.
- With `transformers` every rollout generates in its own process, which is slower and bit-for-bit
  reproducible, as `vllm` is with `engine.deterministic`.
- With `endpoint` your own fleet pulls the versions, and only its URL is used. With
  `engine.weights=refit` its workers are given each version before they are sampled from.

`sft_then_grpo.py` takes `Config`, `stages` and `LOOP` from here: what changes here changes there.

With `loop.asynchronous` the next batch is sampled while the policy is updated on this one, so that
neither waits; all but the first batch of a workflow are one version old.
"""

from collections.abc import Sequence
from typing import Any

from tuneloop.algorithms._objective import PolicyGradient
from tuneloop.cli.pipeline_file import make_builders, render_file
from tuneloop.config.algorithms import choose_algorithm
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import PAIRS, SET_BY_PIPELINE
from tuneloop.config.trainer import SET_FOR_TRAINERS, TrainerConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.deploy_model import deploy_model
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.reward import reward
from tuneloop.stages.rollout import rollout
from tuneloop.workflow.loop import Graph, Loop, StageSpec, Step

# `LoopPipelineConfig` reads the sections `rollout`, `reward`, `update` and `evaluate` by these
# names (`config/loop.py`). `pipelines/sft.py` says what else knows names, and the number 8.
Config: Any = LoopPipelineConfig.with_sections(
    data=data_prep.settings(without=SET_BY_PIPELINE | PAIRS, sft=0),
    model=base_model.settings(without=SET_BY_PIPELINE),
    rollout=rollout.settings(without=SET_BY_PIPELINE, max_tokens=8),
    reward=reward.settings(),
    trainer=TrainerConfig,
    update=choose_algorithm(policy_update.settings(without=SET_FOR_TRAINERS), PolicyGradient),
    evaluate=evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8),
    export=export.settings(),
    deploy=(deploy_model.settings() | None, None),
)

# A step takes its inputs and parameters from wires: values of the loop (those of `carry` and
# `constants`; `iteration` and `endpoint` are always there), or outputs of a step before, under the
# names that they have in the YAML. The last step trains. A wire that leads nowhere is refused when
# this file is loaded (`workflow/loop.py`), and `runs/forking.py` begins a fork from `carry` and
# `constants`. On KFP the loop ends by the result `mean_reward` of whatever is the trainer's input
# `rewards` (`kfp/stage.py: report_commit`), which must be the same as `reward` here.
LOOP = Loop(
    steps=[
        Step(
            rollout,
            prompts="prompts",
            endpoint="endpoint",
            iteration="iteration",
            policy="policy",
        ),
        Step(reward, rollouts="rollout.rollouts"),
        Step(
            policy_update,
            policy="policy",
            rewards="reward.rewards",
            reference="reference",
            iteration="iteration",
        ),
    ],
    carry={"policy": "policy-update.checkpoint"},
    constants=["prompts", "reference"],
    reward="reward.mean-reward",
    check=Step(
        evaluate,
        prompts="prompts",
        endpoint="endpoint",
        iteration="iteration",
        policy="policy",
    ),
    finish=[
        Step(export, policy="policy"),
        Step(deploy_model, optional=True, model="export.model", metrics="evaluate.metrics"),
    ],
)


def stages(config: Config, required: Sequence[str] = ("train",)) -> list[StageSpec]:
    """Return the stages with their parameters.

    `seed` and `weights` reach the stages that have them by themselves.

    Args:
        config: the pipeline's settings.
        required: the splits of the data that the pipeline cannot do without.
    """
    engine = config.engine.kind
    options = config.engine.options
    base = StageSpec(
        base_model,
        config.model,
        model=config.base_model,
        completion_tokens={
            "train": config.rollout.max_tokens,
            "eval": config.evaluate.max_tokens,
        },
        engine_context=options.get("max_model_len"),
    )
    publication = config.engine.publication
    if publication:
        # The base model is published as version 0: servers that pull have it before training.
        base.parameters["publish_weights"] = publication.has_base_version
        base.parameters["weight_encoding"] = publication.encoding
    specs = [
        StageSpec(data_prep, config.data, required=list(required)),
        base,
        StageSpec(evaluate, config.evaluate, engine=engine, engine_args=options),
        StageSpec(export, config.export),
        StageSpec(rollout, config.rollout, engine=engine, engine_args=options),
        StageSpec(reward, config.reward),
        StageSpec(
            policy_update,
            config.update,
            trainer=config.trainer,
            processes=config.processes,
            nodes=config.nodes,
            max_staleness=config.max_staleness,
        ),
    ]
    # By default nothing serves the policy after the run.
    if config.deploy:
        specs.append(StageSpec(deploy_model, config.deploy))
    return specs


def draw(graph: Graph) -> None:
    """GRPO on prompts with verifiable rewards, evaluated before and after, and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    start = model.checkpoint
    # The loop brings its evaluations before and after, and the export: LOOP's `check` and `finish`.
    graph.loop(serve=start, policy=start, reference=start, prompts=data.prompts)


build_argo, build_kfp = make_builders("grpo", stages, draw, LOOP)
workflow = render_file(__name__, lambda: build_argo(Config()))
