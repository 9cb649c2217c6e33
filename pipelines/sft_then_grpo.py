"""The whole road: data_prep → base_model → sft → GRPO loop → export, evaluated before and after the loop.

    tuneloop run sft_then_grpo

With its defaults it is the demo: a small Qwen3 made here learns to reverse digits from demonstrations most of which
copy them instead; the loop then sharpens the skill by reward alone. `grpo.py` has the loop.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tuneloop.config.loading import load_pipeline
from tuneloop.stages.sft import sft

if TYPE_CHECKING:
    from hera.workflows import Workflow

grpo = load_pipeline("grpo", beside=__file__)

Sft: Any = sft.settings(without={"seed", "weights"})


class Config(grpo.Config):  # type: ignore[name-defined,misc]
    """Configuration of `sft_then_grpo`: that of `grpo`, and `sft`."""

    sft: Sft = Sft()


def build_argo(config: Config) -> Workflow:
    """SFT, then the loop, as one Argo Workflow."""
    from hera.workflows import DAG

    from tuneloop.argo.template import stage_template, workflow

    graph = grpo.pod_graph(config)
    parameters = config.loop.model_dump(include=set(grpo.LOOP_PARAMETERS))
    with workflow("sft-then-grpo", parameters, cluster=config.cluster) as built:
        stages, loop = grpo.build_stages(config, graph)
        train = stage_template(
            sft,
            {**config.sft.model_dump(), "seed": config.seed, **config.published(grpo.RUN)},
            processes=config.processes,
            nodes=config.nodes,
            cluster=config.cluster,
        )
        part = grpo.build_part(config, stages, loop)
        with DAG(name="main"):
            data = stages["data-prep"](name="data-prep", arguments={"prompts": f"{grpo.RUN}/data-prep"})
            model = grpo.base_model_task(stages, data)
            tuned = train(
                name="sft",
                arguments={
                    "policy": grpo.CHECKPOINT % "base-model",
                    "prompts": grpo.PROMPTS,
                    "checkpoint": f"{grpo.RUN}/sft",
                },
            )
            model >> tuned
            grpo.build_rl(config, stages, part, model, tuned, grpo.CHECKPOINT % "sft")
    return built


def build_kfp(config: Config) -> Any:
    """SFT, then the loop, for Kubeflow Pipelines."""
    from kfp import dsl

    from tuneloop.kfp.template import pipeline, stage_step

    steps = grpo.kfp_steps(config)
    pods: Any = {"cluster": config.cluster, "kfp": config.kfp}
    dynamic = ["seed", *config.published("")]
    train = stage_step(sft, config.sft, dynamic=dynamic, processes=config.processes, nodes=config.nodes, **pods)

    @pipeline("sft-then-grpo")
    def built(
        store: str,
        run: str = "sft-then-grpo",
        seed: int = config.seed,
        target_reward: float = config.loop.target_reward,
    ) -> None:
        """Supervised fine-tuning, then GRPO, evaluated before and after the loop, and exported.

        Args:
            store: URL of the store, as pods reach it: s3://bucket/prefix
            run: name of the run; its artifacts lie at store/run, and the same name again resumes it
            seed: every random stream of the run is derived from it
            target_reward: the loop ends once a batch of rollouts earns this mean reward
        """
        at = f"{store}/{run}"
        with dsl.ExitHandler(steps["report"]("report", run=run, store=store)):
            prompts = steps["data-prep"]("data-prep", url=f"{at}/data-prep", seed=seed).outputs["prompts"]
            given = {"prompts": prompts, "seed": seed, **config.published(at)}
            model = steps["base-model"]("base-model", url=f"{at}/base-model", **given)
            tuned = train("sft", url=f"{at}/sft", policy=model.outputs["checkpoint"], **given)
            grpo.kfp_rl(config, steps, at, prompts, tuned.outputs["checkpoint"], seed, target_reward)

    return built


if "hera._cli" in sys.modules:  # `hera generate yaml` takes what it finds in the module
    workflow = build_argo(Config())

if __name__ == "__main__":  # sends it to the Argo server that ARGO_SERVER names
    from tuneloop.cli.cluster import submit_pipeline

    sys.exit(submit_pipeline(__file__, sys.argv[1:]))
