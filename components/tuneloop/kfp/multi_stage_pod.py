"""Several iterations of a loop in one task, as a step of a pipeline: what `tuneloop.kfp.iterations` runs.

The twin of `tuneloop.argo.multi_stage_pod`; the seed, which there is fixed, is here the pipeline's to give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, ClassificationMetrics, Dataset, Input, Markdown, Metrics, Model, Output

from tuneloop.argo.multi_stage_pod import describe_loop
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.kfp.iterations import RESULTS
from tuneloop.kfp.stage import TARGET
from tuneloop.kfp.template import REQUIRED, Step, configure_task_pod, define_container_component
from tuneloop.workflow.loop import Loop, StageSpec

ABOUT = {
    "url": "of the run: what the iterations make is committed below it",
    "iteration": "the first to run",
    "seed": "every random stream of the run is derived from it",
    TARGET: "rewards of this mean end the loop",
}


def iterations_step(loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig) -> Step:
    """Return the step that runs several iterations of a loop, and the rollout server beside them.

    Args:
        specs: the stages that the loop calls, with their parameters.
    """
    image = config.cluster.images.format(image="rollout")
    settings, engine = config.loop, config.engine
    described = describe_loop(loop, specs, {}, ["seed", *config.published("")], settings.evaluate_every)
    server = {"port": engine.port, "engine_args": engine.options, "pull": engine.pull}
    written = [
        *("--loop", described.model_dump_json(exclude_defaults=True), "--iterations", str(settings.iterations)),
        *("--per-pod", str(settings.iterations_per_pod), "--endpoint", engine.rollout_endpoint_url or ""),
        *(("--weights", engine.weights) if engine.weights else ()),
        *(("--server", json.dumps(server, separators=(",", ":"))) if engine.name == "vllm" else ()),
    ]
    signature: dict[str, tuple[Any, Any]] = {
        **{"policy": (Input[Model], REQUIRED), "prompts": (Input[Dataset], REQUIRED)},
        **{"reference": (Input[Model], REQUIRED), "url": (str, REQUIRED), "iteration": (int, REQUIRED)},
        **{"seed": (int, REQUIRED), TARGET: (float, REQUIRED)},
        **{"checkpoint": (Output[Model], REQUIRED), "results": (Output[Metrics], REQUIRED)},
        **{"preview": (Output[Markdown], REQUIRED), "curves": (Output[HTML], REQUIRED)},
        "confidence": (Output[ClassificationMetrics], REQUIRED),
        **{name: (dsl.OutputPath(kind), REQUIRED) for name, kind in RESULTS.items()},
    }
    command = ["python3", "-m", "tuneloop.kfp.iterations"]
    made = define_container_component(
        "iterations", "Iterations of the loop.", signature, ABOUT, image, command, written
    )

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = made(**arguments).set_display_name(name)
        configure_task_pod(task, image, config.cluster, config.kfp, True)
        return task

    return step
