"""Preference optimization: data_prep → base_model → sft → reference_logprobs → preference → export.

    tuneloop run dpo --set base_model=path/to/a/hugging-face-model --set data=pairs.jsonl

The policy is evaluated before and after the pairs. With its defaults it is a demo: it learns from
demonstrations most of which copy digits, and then from pairs to prefer reversing them. A model that
was trained before starts with the pairs (`sft` is null). The reference is the policy before the
pairs; its log-probabilities are computed once, by a stage of their own.
"""

from typing import Any

from tuneloop.algorithms._preference import Preference
from tuneloop.cli.pipeline_file import make_builders, render_file
from tuneloop.config.algorithms import choose_algorithm
from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig, Tokenize
from tuneloop.config.trainer import SET_FOR_TRAINERS, TrainerConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data
from tuneloop.workflow.loop import Graph, StageSpec

# A pretrained model skips this section: `config/rules.py` unsets an optional one of the name `sft`.
TUNING = sft.settings(without=SET_FOR_TRAINERS)

# `pipelines/sft.py` says what knows the names of sections, and the number 8.
Config: Any = PipelineConfig.with_sections(
    tokenize=(Tokenize, False),
    data=data_prep.settings(without=SET_BY_PIPELINE),
    model=base_model.settings(without=SET_BY_PIPELINE),
    trainer=TrainerConfig,
    sft=(TUNING | None, TUNING()),
    reference=reference_logprobs.settings(
        without=SET_FOR_TRAINERS | {"mismatched_pairs", "max_length"}
    ),
    preference=choose_algorithm(preference.settings(without=SET_FOR_TRAINERS), Preference),
    evaluate=evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8),
    export=export.settings(),
)


DEMO_SIZES = {"train": 256, "preference": 512, "preference_eval": 128}
"""Rows of the digits that this pipeline learns with its defaults; of other data all are taken."""


def choose_sizes(data: Any) -> Any:
    """Return the settings of the data, for digits with the demo's numbers where none are set."""
    # Digits are made on demand and have no end, so that somebody has to say how many.
    if data.source != "digits":
        return data
    sizes: dict[str, int] = {}
    for name, size in DEMO_SIZES.items():
        if getattr(data, name) is None:
            sizes[name] = size
    return data.model_copy(update=sizes)


def stages(config: Config) -> list[StageSpec]:
    """Return the stages with their parameters."""
    trainer = config.trainer
    required = ["preference"]
    tuning: list[StageSpec] = []
    # Both what is tuned on demonstrations and what is tuned on pairs reads tokenized rows.
    if config.tokenize:
        tuning.append(StageSpec(tokenize_data))
    if config.sft:
        required.insert(0, "sft")
        tuning.append(StageSpec(sft, config.sft, trainer=trainer, processes=config.processes))
    # KTO estimates the divergence from completions of other prompts.
    mismatched = config.preference.algorithm.needs_kl
    specs = [
        StageSpec(data_prep, choose_sizes(config.data), required=required),
        StageSpec(
            base_model,
            config.model,
            model=config.base_model,
            completion_tokens={"eval": config.evaluate.max_tokens},
        ),
    ]
    specs += tuning
    specs += [
        StageSpec(
            reference_logprobs,
            config.reference,
            trainer=trainer,
            mismatched_pairs=mismatched,
            # What is trained on has to be scored.
            max_length=config.preference.max_length,
        ),
        # Unlike those of `sft.py`, stages here train in one pod: there is no setting `nodes`.
        StageSpec(preference, config.preference, trainer=trainer, processes=config.processes),
        StageSpec(evaluate, config.evaluate, engine="transformers"),
        StageSpec(export, config.export),
    ]
    return specs


def draw(graph: Graph) -> None:
    """Fine-tuning on demonstrations, then on pairs; evaluated before and after the pairs, and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    # Evaluations read prompts. Stages that train read the tokens if `tokenize_data` makes them.
    rows = data.prompts
    if graph.config.tokenize:
        rows = graph.stage(tokenize_data, policy=model.checkpoint, prompts=rows).tokens
    reference = model.checkpoint
    if graph.config.sft:
        reference = graph.stage(sft, policy=model.checkpoint, prompts=rows).checkpoint
    graph.stage(evaluate, "evaluate-before", policy=reference, prompts=data.prompts)
    logprobs = graph.stage(reference_logprobs, policy=reference, prompts=rows).logprobs
    preferred = graph.stage(preference, policy=reference, prompts=rows, logprobs=logprobs)
    graph.stage(evaluate, "evaluate-after", policy=preferred.checkpoint, prompts=data.prompts)
    graph.stage(export, policy=preferred.checkpoint)


build_argo, build_kfp = make_builders("dpo", stages, draw)
workflow = render_file(__name__, lambda: build_argo(Config()))
