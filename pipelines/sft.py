"""Supervised fine-tuning: data_prep → base_model → sft → evaluate → export.

tuneloop run sft --set data.source=jsonl --set data.source_args.train=examples.jsonl --set base_model=path/to/model
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tuneloop.config.pipeline import SET_BY_PIPELINE, Nodes, PipelineConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft

if TYPE_CHECKING:
    from hera.workflows import Workflow

DataPrep: Any = data_prep.settings(without=SET_BY_PIPELINE)
BaseModelSettings: Any = base_model.settings(without=SET_BY_PIPELINE)
Sft: Any = sft.settings(without=SET_BY_PIPELINE)
Evaluate: Any = evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8)
Export: Any = export.settings()


class Config(PipelineConfig):
    """Configuration of `sft`."""

    nodes: Nodes = 1
    data: DataPrep = DataPrep()
    model: BaseModelSettings = BaseModelSettings()
    sft: Sft = Sft()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()


RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
CHECKPOINT = "{{tasks.%s.outputs.parameters.checkpoint}}"
PROMPTS = "{{tasks.data-prep.outputs.parameters.prompts}}"


def build_argo(config: Config) -> Workflow:
    """The pipeline as an Argo Workflow."""
    from hera.workflows import DAG

    from tuneloop.argo.template import stage_template, workflow

    seed = {"seed": config.seed}
    with workflow("sft", cluster=config.cluster) as built:
        prepare = stage_template(data_prep, {**config.data.model_dump(), **seed}, cluster=config.cluster)
        bring = stage_template(
            base_model, {**config.model.model_dump(), **seed, "model": config.base_model}, cluster=config.cluster
        )
        train = stage_template(
            sft,
            {**config.sft.model_dump(), **seed},
            processes=config.processes,
            nodes=config.nodes,
            cluster=config.cluster,
        )
        check = stage_template(
            evaluate, {**config.evaluate.model_dump(), **seed, "engine": "transformers"}, cluster=config.cluster
        )
        save = stage_template(export, config.export.model_dump(), cluster=config.cluster)
        with DAG(name="main"):
            data = prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            model = bring(name="base-model", arguments={"prompts": PROMPTS, "checkpoint": f"{RUN}/base-model"})
            tuned = train(
                name="sft",
                arguments={"policy": CHECKPOINT % "base-model", "prompts": PROMPTS, "checkpoint": f"{RUN}/sft"},
            )
            after = check(
                name="evaluate-after",
                arguments={"policy": CHECKPOINT % "sft", "prompts": PROMPTS, "metrics": f"{RUN}/evaluate-after"},
            )
            done = save(name="export", arguments={"policy": CHECKPOINT % "sft", "model": f"{RUN}/export"})
            data >> model >> tuned >> [after, done]
    return built


def build_kfp(config: Config) -> Any:
    """The pipeline for Kubeflow Pipelines."""
    from kfp import dsl

    from tuneloop.kfp.template import pipeline, report_step, stage_step

    pods: Any = {"cluster": config.cluster, "kfp": config.kfp}
    prepare = stage_step(data_prep, config.data, dynamic=["seed"], **pods)
    bring = stage_step(base_model, {**config.model.model_dump(), "model": config.base_model}, dynamic=["seed"], **pods)
    train = stage_step(sft, config.sft, dynamic=["seed"], processes=config.processes, nodes=config.nodes, **pods)
    engine = {"engine": "transformers"}
    check = stage_step(evaluate, {**config.evaluate.model_dump(), **engine}, dynamic=["seed"], **pods)
    save = stage_step(export, config.export, **pods)
    report = report_step(**pods)

    # Not `sft`: kfp takes a file whose pipeline has a component's name for that component.
    @pipeline("sft-pipeline")
    def built(store: str, run: str = "sft", seed: int = config.seed) -> None:
        """Supervised fine-tuning, evaluated and exported.

        Args:
            store: URL of the store, as pods reach it: s3://bucket/prefix
            run: name of the run; its artifacts lie at store/run, and the same name again resumes it
            seed: every random stream of the run is derived from it
        """
        at = f"{store}/{run}"
        with dsl.ExitHandler(report("report", run=run, store=store)):
            prompts = prepare("data-prep", url=f"{at}/data-prep", seed=seed).outputs["prompts"]
            model = bring("base-model", url=f"{at}/base-model", prompts=prompts, seed=seed).outputs["checkpoint"]
            tuned = train("sft", url=f"{at}/sft", policy=model, prompts=prompts, seed=seed).outputs["checkpoint"]
            check("evaluate-after", url=f"{at}/evaluate-after", policy=tuned, prompts=prompts, seed=seed)
            save("export", url=f"{at}/export", policy=tuned)

    return built


if "hera._cli" in sys.modules:  # `hera generate yaml` takes what it finds in the module
    workflow = build_argo(Config())

if __name__ == "__main__":  # sends it to the Argo server that ARGO_SERVER names
    from tuneloop.cli.cluster import submit_pipeline

    sys.exit(submit_pipeline(__file__, sys.argv[1:]))
