"""Supervised fine-tuning: data_prep → base_model → sft → export, evaluated before and after.

`data=chats.jsonl` takes your own rows.
"""

from typing import Any

from tuneloop.cli.pipeline_file import make_builders, render_file
from tuneloop.config.pipeline import PAIRS, SET_BY_PIPELINE, Nodes, PipelineConfig, Tokenize
from tuneloop.config.trainer import TRAINER_SETTINGS, TrainerConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data
from tuneloop.workflow.loop import Graph, StageSpec

Config: Any = PipelineConfig.with_sections(
    nodes=(Nodes, 1),
    tokenize=(Tokenize, False),
    data=data_prep.settings(without=SET_BY_PIPELINE | PAIRS),
    model=base_model.settings(without=SET_BY_PIPELINE),
    trainer=TrainerConfig,
    sft=sft.settings(without=SET_BY_PIPELINE.union(TRAINER_SETTINGS)),
    evaluate=evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8),
    export=export.settings(),
)


def list_tuning_stages(config: Any) -> list[StageSpec]:
    """Return `sft`, and `tokenize_data` if it is enabled: the stages of a pipeline that begins with fine-tuning."""
    tuned = StageSpec(
        sft, config.sft, trainer=config.trainer, processes=config.processes, nodes=config.nodes
    )
    return [StageSpec(tokenize_data), tuned] if config.tokenize else [tuned]


def fine_tune(graph: Graph, model: Any, rows: Any) -> Any:
    """Draw these stages, and return the checkpoint."""
    rows = (
        graph.stage(tokenize_data, policy=model, prompts=rows).tokens
        if graph.config.tokenize
        else rows
    )
    return graph.stage(sft, policy=model, prompts=rows).checkpoint


def stages(config: Config) -> list[StageSpec]:
    """Return the stages with their parameters."""
    return [
        StageSpec(data_prep, config.data, required=["sft"]),
        StageSpec(
            base_model,
            config.model,
            model=config.base_model,
            completion_tokens={"eval": config.evaluate.max_tokens},
        ),
        *list_tuning_stages(config),
        StageSpec(evaluate, config.evaluate, engine="transformers"),
        StageSpec(export, config.export),
    ]


def draw(graph: Graph) -> None:
    """Supervised fine-tuning, evaluated before and after, and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    graph.stage(evaluate, "evaluate-before", policy=model.checkpoint, prompts=data.prompts)
    tuned = fine_tune(graph, model.checkpoint, data.prompts)
    graph.stage(evaluate, "evaluate-after", policy=tuned, prompts=data.prompts)
    graph.stage(export, policy=tuned)


build_argo, build_kfp = make_builders("sft", stages, draw)
workflow = render_file(__name__, lambda: build_argo(Config()))
