"""Supervised fine-tuning: data_prep → base_model → sft → evaluate → export.

tuneloop run sft --set data.source=jsonl --set data.source_args.train=examples.jsonl --set base_model=path/to/model
"""

from typing import Any

from tuneloop.cli.pipeline_file import make_builders, run_file
from tuneloop.config.pipeline import SET_BY_PIPELINE, Nodes, PipelineConfig, Tokenize
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
    data=data_prep.settings(without=SET_BY_PIPELINE),
    model=base_model.settings(without=SET_BY_PIPELINE),
    sft=sft.settings(without=SET_BY_PIPELINE),
    evaluate=evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8),
    export=export.settings(),
)


def stages(config: Config) -> list[StageSpec]:
    """Return the stages with their parameters."""
    return [
        StageSpec(data_prep, config.data),
        StageSpec(base_model, config.model, model=config.base_model),
        *([StageSpec(tokenize_data)] if config.tokenize else []),
        StageSpec(sft, config.sft, processes=config.processes, nodes=config.nodes),
        StageSpec(evaluate, config.evaluate, engine="transformers"),
        StageSpec(export, config.export),
    ]


def draw(graph: Graph) -> None:
    """Supervised fine-tuning, evaluated and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    rows = data.prompts
    if graph.config.tokenize:
        rows = graph.stage(tokenize_data, policy=model.checkpoint, prompts=rows).tokens
    tuned = graph.stage(sft, policy=model.checkpoint, prompts=rows)
    graph.stage(evaluate, "evaluate-after", policy=tuned.checkpoint, prompts=data.prompts)
    graph.stage(export, policy=tuned.checkpoint)


build_argo, build_kfp = make_builders("sft", stages, draw)
workflow = run_file(__name__, __file__, lambda: build_argo(Config()))
