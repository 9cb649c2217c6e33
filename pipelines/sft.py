"""Supervised fine-tuning: data_prep → base_model → sft → export, evaluated before and after.

`data=chats.jsonl` takes your own rows.

`sft_then_grpo.py` takes `list_tuning_stages`, `fine_tune` and `Tokenize` from here; `dpo.py` has
code of its own for the same stages.
"""

from typing import Any

from tuneloop.cli.pipeline_file import make_builders, render_file
from tuneloop.config.pipeline import PAIRS, SET_BY_PIPELINE, Nodes, PipelineConfig, Tokenize
from tuneloop.config.trainer import SET_FOR_TRAINERS, TrainerConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.evaluate import evaluate
from tuneloop.stages.export import export
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data
from tuneloop.workflow.loop import Graph, StageSpec

# Most of what reads settings finds a section by its stage. By these names they are known to
# `config/rules.py`, `config/loading.py`, `config/pipeline.py`, `config/commented_yaml.py: FIRST`
# and `config/foreign_names.py`. The number 8 of `max_tokens` is also in `config/rules.py: RULES`,
# which replaces it for other models than the demo's.
Config: Any = PipelineConfig.with_sections(
    nodes=(Nodes, 1),
    tokenize=(Tokenize, False),
    data=data_prep.settings(without=SET_BY_PIPELINE | PAIRS),
    model=base_model.settings(without=SET_BY_PIPELINE),
    trainer=TrainerConfig,
    sft=sft.settings(without=SET_FOR_TRAINERS),
    evaluate=evaluate.settings(without=SET_BY_PIPELINE, max_tokens=8),
    export=export.settings(),
)


def list_tuning_stages(config: Any) -> list[StageSpec]:
    """Return the stages of fine-tuning: `sft`, and before it `tokenize_data` if it is enabled."""
    tuning: list[StageSpec] = []
    if config.tokenize:
        tuning.append(StageSpec(tokenize_data))
    tuning.append(
        StageSpec(
            sft,
            config.sft,
            trainer=config.trainer,
            processes=config.processes,
            nodes=config.nodes,
        )
    )
    return tuning


def fine_tune(graph: Graph, model: Any, rows: Any) -> Any:
    """Draw the stages of `list_tuning_stages`.

    Args:
        graph: of the pipeline, which may be another one than this.
        model: the checkpoint that is tuned.
        rows: the data, as `data_prep` has prepared it.

    Returns:
        The tuned checkpoint.
    """
    if graph.config.tokenize:
        # Otherwise each process of the trainer tokenizes all rows at every start.
        rows = graph.stage(tokenize_data, policy=model, prompts=rows).tokens
    return graph.stage(sft, policy=model, prompts=rows).checkpoint


def stages(config: Config) -> list[StageSpec]:
    """Return the stages with their parameters."""
    # The stage `base_model` checks that the prompts of each split named here leave room for these
    # tokens in the model's context.
    completion_tokens = {"eval": config.evaluate.max_tokens}
    specs = [
        StageSpec(data_prep, config.data, required=["sft"]),
        StageSpec(
            base_model,
            config.model,
            model=config.base_model,
            completion_tokens=completion_tokens,
        ),
    ]
    specs += list_tuning_stages(config)
    # Only pipelines with a loop have a rollout server.
    specs.append(StageSpec(evaluate, config.evaluate, engine="transformers"))
    specs.append(StageSpec(export, config.export))
    return specs


def draw(graph: Graph) -> None:
    """Supervised fine-tuning, evaluated before and after, and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    graph.stage(evaluate, "evaluate-before", policy=model.checkpoint, prompts=data.prompts)
    tuned = fine_tune(graph, model.checkpoint, data.prompts)
    # The same stage again, so that it needs a name of its own.
    graph.stage(evaluate, "evaluate-after", policy=tuned, prompts=data.prompts)
    graph.stage(export, policy=tuned)


build_argo, build_kfp = make_builders("sft", stages, draw)
workflow = render_file(__name__, lambda: build_argo(Config()))
