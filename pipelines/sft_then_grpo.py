"""SFT and then GRPO: data_prep → base_model → sft → GRPO loop → export.

    tuneloop run sft_then_grpo

The policy is evaluated before and after the loop, which `grpo.py` has. With its defaults it is the
demo: a small Qwen3 made here learns to reverse digits from demonstrations most of which copy them
instead. The loop then sharpens the skill by reward alone.

A default that is set here is the author's for every base model: no rule of `config/rules.py: RULES`
replaces it, unless the rule lists it (`tests/unit/config/test_followed.py`). `data` is set again,
as `grpo` has no demonstrations.
"""

from typing import Any

from tuneloop.cli.pipeline_file import make_builders, render_file
from tuneloop.config.loading import load_pipeline
from tuneloop.config.pipeline import PAIRS, SET_BY_PIPELINE
from tuneloop.config.trainer import SET_FOR_TRAINERS
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.sft import sft
from tuneloop.workflow.loop import Graph, StageSpec

# Pipelines are files, not modules of a package: those beside this one are loaded by name. So this
# pipeline has each stage, setting and wire of both; what is overridden is listed below.
grpo = load_pipeline("grpo", beside=__file__)
tuning = load_pipeline("sft", beside=__file__)

Config: Any = grpo.Config.with_sections(
    tokenize=(tuning.Tokenize, False),
    data=data_prep.settings(without=SET_BY_PIPELINE | PAIRS),
    sft=sft.settings(without=SET_FOR_TRAINERS),
)


def stages(config: Config) -> list[StageSpec]:
    """Return the stages of `grpo` and `sft` with their parameters."""
    specs: list[StageSpec] = grpo.stages(config, required=["sft", "train"])
    specs += tuning.list_tuning_stages(config)
    return specs


def draw(graph: Graph) -> None:
    """Supervised fine-tuning, then GRPO, evaluated before and after the loop, and exported."""
    data = graph.stage(data_prep)
    model = graph.stage(base_model, prompts=data.prompts)
    start = tuning.fine_tune(graph, model.checkpoint, data.prompts)
    # The server boots with the base model while SFT trains, and loads `start` then. The loop draws
    # the evaluations and the export, too: `evaluate` asks the loop's server.
    graph.loop(serve=model.checkpoint, policy=start, reference=start, prompts=data.prompts)


build_argo, build_kfp = make_builders("sft-then-grpo", stages, draw, grpo.LOOP)
workflow = render_file(__name__, lambda: build_argo(Config()))
