"""Preference optimization: data_prep → base_model → sft → reference_logprobs → preference → evaluate → export.

    tuneloop run dpo --set preference.algorithm=ipo

With its defaults it learns from demonstrations most of which copy digits, and then from pairs to prefer reversing them.
The reference is the policy after SFT; its log-probabilities are computed once, by a stage of their own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.sft import sft

if TYPE_CHECKING:
    from hera.workflows import Workflow

DataPrep: Any = data_prep.settings(without=SET_BY_PIPELINE, train=256, preference=512, preference_eval=128)
BaseModelSettings: Any = base_model.settings(without=SET_BY_PIPELINE)
Sft: Any = sft.settings(without=SET_BY_PIPELINE)
ReferenceLogprobs: Any = reference_logprobs.settings(without={*SET_BY_PIPELINE, "mismatched_pairs"})
Preference: Any = preference.settings(without=SET_BY_PIPELINE)
Evaluate: Any = evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8)
Export: Any = export.settings()


class Config(PipelineConfig):
    """Configuration of `dpo`."""

    data: DataPrep = DataPrep()
    model: BaseModelSettings = BaseModelSettings()
    sft: Sft = Sft()
    reference: ReferenceLogprobs = ReferenceLogprobs()
    preference: Preference = Preference()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()

    def stages(self) -> dict[str, dict[str, Any]]:
        """Parameters of each stage but the seed."""
        return {
            "data_prep": self.data.model_dump(),
            "base_model": {**self.model.model_dump(), "model": self.base_model},
            "sft": self.sft.model_dump(),
            "reference_logprobs": {
                **self.reference.model_dump(),
                "mismatched_pairs": self.preference.algorithm == "kto",
            },
            "preference": self.preference.model_dump(),
            "evaluate": {**self.evaluate.model_dump(), "engine": "transformers"},
            "export": self.export.model_dump(),
        }


RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
CHECKPOINT = "{{tasks.%s.outputs.parameters.checkpoint}}"
PROMPTS = "{{tasks.data-prep.outputs.parameters.prompts}}"


def build_argo(config: Config) -> Workflow:
    """The pipeline as an Argo Workflow."""
    from hera.workflows import DAG

    from tuneloop.argo.template import stage_template, workflow

    asked, seed, cluster = config.stages(), {"seed": config.seed}, config.cluster
    with workflow("dpo", cluster=config.cluster) as built:
        prepare = stage_template(data_prep, asked["data_prep"] | seed, cluster=cluster)
        bring = stage_template(base_model, asked["base_model"] | seed, cluster=cluster)
        imitate = stage_template(sft, asked["sft"] | seed, processes=config.processes, cluster=cluster)
        refer = stage_template(reference_logprobs, asked["reference_logprobs"], cluster=cluster)
        prefer = stage_template(preference, asked["preference"] | seed, processes=config.processes, cluster=cluster)
        check = stage_template(evaluate, asked["evaluate"] | seed, cluster=cluster)
        save = stage_template(export, asked["export"], cluster=cluster)
        shown = {"policy": CHECKPOINT % "sft", "prompts": PROMPTS}
        with DAG(name="main"):
            data = prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            model = bring(name="base-model", arguments={"prompts": PROMPTS, "checkpoint": f"{RUN}/base-model"})
            tuned = imitate(
                name="sft",
                arguments={"policy": CHECKPOINT % "base-model", "prompts": PROMPTS, "checkpoint": f"{RUN}/sft"},
            )
            before = check(name="evaluate-before", arguments={**shown, "metrics": f"{RUN}/evaluate-before"})
            known = refer(name="reference-logprobs", arguments={**shown, "logprobs": f"{RUN}/reference-logprobs"})
            preferred = prefer(
                name="preference",
                arguments={
                    **shown,
                    "logprobs": "{{tasks.reference-logprobs.outputs.parameters.logprobs}}",
                    "checkpoint": f"{RUN}/preference",
                },
            )
            after = check(
                name="evaluate-after",
                arguments={
                    "policy": CHECKPOINT % "preference",
                    "prompts": PROMPTS,
                    "metrics": f"{RUN}/evaluate-after",
                },
            )
            done = save(name="export", arguments={"policy": CHECKPOINT % "preference", "model": f"{RUN}/export"})
            data >> model >> tuned >> [before, known]
            known >> preferred >> [after, done]
    return built


def build_kfp(config: Config) -> Any:
    """The pipeline for Kubeflow Pipelines."""
    from kfp import dsl

    from tuneloop.kfp.template import pipeline, report_step, stage_step

    asked = config.stages()
    pods: Any = {"cluster": config.cluster, "kfp": config.kfp}
    seeded: Any = {"dynamic": ["seed"], **pods}
    prepare = stage_step(data_prep, asked["data_prep"], **seeded)
    bring = stage_step(base_model, asked["base_model"], **seeded)
    imitate = stage_step(sft, asked["sft"], processes=config.processes, **seeded)
    refer = stage_step(reference_logprobs, asked["reference_logprobs"], **pods)
    prefer = stage_step(preference, asked["preference"], processes=config.processes, **seeded)
    check = stage_step(evaluate, asked["evaluate"], **seeded)
    save = stage_step(export, asked["export"], **pods)
    report = report_step(**pods)

    @pipeline("dpo")
    def built(store: str, run: str = "dpo", seed: int = config.seed) -> None:
        """Fine-tuning on demonstrations, then on pairs; evaluated before and after the pairs, and exported.

        Args:
            store: URL of the store, as pods reach it: s3://bucket/prefix
            run: name of the run; its artifacts lie at store/run, and the same name again resumes it
            seed: every random stream of the run is derived from it
        """
        at = f"{store}/{run}"
        with dsl.ExitHandler(report("report", run=run, store=store)):
            prompts = prepare("data-prep", url=f"{at}/data-prep", seed=seed).outputs["prompts"]
            model = bring("base-model", url=f"{at}/base-model", prompts=prompts, seed=seed).outputs["checkpoint"]
            tuned = imitate("sft", url=f"{at}/sft", policy=model, prompts=prompts, seed=seed).outputs["checkpoint"]
            check("evaluate-before", url=f"{at}/evaluate-before", policy=tuned, prompts=prompts, seed=seed)
            known = refer("reference-logprobs", url=f"{at}/reference-logprobs", policy=tuned, prompts=prompts)
            preferred = prefer(
                "preference",
                url=f"{at}/preference",
                policy=tuned,
                prompts=prompts,
                logprobs=known.outputs["logprobs"],
                seed=seed,
            ).outputs["checkpoint"]
            check("evaluate-after", url=f"{at}/evaluate-after", policy=preferred, prompts=prompts, seed=seed)
            save("export", url=f"{at}/export", policy=preferred)

    return built


if "hera._cli" in sys.modules:  # `hera generate yaml` takes what it finds in the module
    workflow = build_argo(Config())

if __name__ == "__main__":  # sends it to the Argo server that ARGO_SERVER names
    from tuneloop.cli.cluster import submit_pipeline

    sys.exit(submit_pipeline(__file__, sys.argv[1:]))
