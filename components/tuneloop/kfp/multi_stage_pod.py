"""The iterations of a loop in one task, as a step of a pipeline: what `tuneloop.kfp.iterations` runs.

The twin of `tuneloop.argo.multi_stage_pod`; the seed, which there is fixed, is here the pipeline's to give.
"""

import json
from collections.abc import Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Dataset, Markdown, Metrics, Output

from tuneloop.argo.multi_stage_pod import describe_loop, list_roles
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.errors import UserError
from tuneloop.kfp import template
from tuneloop.kfp.io import SAME
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import TARGET
from tuneloop.workflow.loop import Loop, StageSpec, output_of

ABOUT = {
    "url": "of the run: what the iterations make is committed below it",
    "run_id": "KFP's own, of the run that this task belongs to",
    "seed": "every random stream of the run is derived from it",
    TARGET: "rewards of this mean end the loop",
    SAME: "input → the other input that is the same artifact",
}


def iterations_step(loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig) -> template.Step:
    """Return the step that runs the iterations of a loop, and the rollout server beside them. Raises UserError where a
    stage spans several nodes."""
    image = config.cluster.images.format(image="rollout")
    settings, engine = config.loop, config.engine
    if spread := [spec.component.template for spec in specs if spec.nodes > 1]:
        remedy = f"{spread[0]} would have to run inside of a pod: set kfp.unroll to loop.iterations, or this to 1"
        raise UserError("nodes", config.nodes, remedy)
    described = describe_loop(loop, specs, {}, ["seed", *config.published("")], settings.evaluate_every)
    roles, served = list_roles(loop, specs, settings.evaluate_every), engine.name == "vllm"
    server: dict[str, Any] = {"port": engine.port, "engine_args": engine.options, "pull": engine.pull}
    role, cluster = config.cluster.merge_roles(roles, served)
    if served and (own := config.cluster.sampler.gpus):  # the last of the pod's; ranks take the first
        total = cluster.count_gpus(role)
        server["devices"] = ",".join(map(str, range(total - own, total)))
    flags = [
        *("--loop", described.model_dump_json(exclude_defaults=True), "--iterations", str(settings.iterations)),
        *("--per-task", str(settings.per_workflow), "--api", config.kfp.api),
        *("--endpoint", engine.rollout_endpoint_url or ""),
        *(("--weights", engine.weights) if engine.weights else ()),
        *(("--server", json.dumps(server, separators=(",", ":"))) if engine.name == "vllm" else ()),
    ]
    taken = {wire: name for step in loop.steps for name, wire in step.wires.items()}
    types = {name: template.TYPES.get(taken[name], Dataset) for name in (*loop.carry, *loop.constants)}
    shown = {"results": Metrics, "preview": Markdown, "curves": HTML}
    kinds: dict[str, Any] = {
        **{"url": str, "run_id": str, "seed": int, TARGET: float},
        **{get_output_name(name): Output[types[name]] for name in loop.carry},
        **{name: Output[kind] for name, kind in shown.items()},
        "last_iteration": dsl.OutputPath(int),
        output_of(loop.reward).replace("-", "_"): dsl.OutputPath(float),
    }
    signature = template.define_inputs(types, dict.fromkeys(types, True))
    signature |= {name: (kind, template.REQUIRED) for name, kind in kinds.items()}
    command, about = ["python3", "-m", "tuneloop.kfp.iterations"], "Iterations of the loop."
    made = template.define_container_component("iterations", about, signature, ABOUT, image, command, flags)

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = made(**template.pass_artifacts_once(arguments, types)).set_display_name(name)
        # It goes on from what the run has committed by now.
        template.configure_task_pod(task.set_caching_options(False), image, cluster, config.kfp, role)
        return task

    return step
