"""Several iterations in one task, as a step of a pipeline: what `tuneloop.kfp.segment` runs, written into its command.

The twin of `tuneloop.argo.multi_stage_pod`, whose graph it takes; the seed, which there is fixed, is here the
pipeline's to give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfp import dsl
from kfp.dsl import HTML, ClassificationMetrics, Dataset, Input, Markdown, Metrics, Model, Output

from tuneloop.argo.multi_stage_pod import as_text, part
from tuneloop.config.kfp import Kfp
from tuneloop.kfp.segment import RESULTS
from tuneloop.kfp.stage import TARGET
from tuneloop.kfp.template import REQUIRED, Step, container, place
from tuneloop.workflow.settings import Cluster

if TYPE_CHECKING:
    from hera.workflows import Workflow

ABOUT = {
    "url": "of the run: what the iterations make is committed below it",
    "iteration": "the first to run",
    "seed": "every random stream of the run is derived from it",
    TARGET: "rewards of this mean end the loop",
}


def segment_step(graph: Workflow, entrypoint: str, *, cluster: Cluster | None = None, kfp: Kfp | None = None) -> Step:
    """A step that runs the template `entrypoint` of `graph` and all that it calls, for a policy and prompts.

    Args:
        graph: with the workflow parameters run, store and target-reward; the stages' ``--seed`` is replaced.
        entrypoint: takes iteration, policy, prompts, reference; gives iteration, policy and mean-reward.
    """
    cluster, kfp = cluster or Cluster(), kfp or Kfp()
    image = cluster.images.format(image="rollout")
    signature: dict[str, tuple[Any, Any]] = {
        **{"policy": (Input[Model], REQUIRED), "prompts": (Input[Dataset], REQUIRED)},
        **{"reference": (Input[Model], REQUIRED), "url": (str, REQUIRED), "iteration": (int, REQUIRED)},
        **{"seed": (int, REQUIRED), TARGET: (float, REQUIRED)},
        **{"checkpoint": (Output[Model], REQUIRED), "results": (Output[Metrics], REQUIRED)},
        **{"preview": (Output[Markdown], REQUIRED), "curves": (Output[HTML], REQUIRED)},
        "confidence": (Output[ClassificationMetrics], REQUIRED),
        **{name: (dsl.OutputPath(kind), REQUIRED) for name, kind in RESULTS.items()},
    }
    written = ["--graph", as_text(_seeded(part(graph.to_dict(), entrypoint)))]
    command = ["python3", "-m", "tuneloop.kfp.segment"]
    made = container("iterations", "Iterations of the loop.", signature, ABOUT, image, command, written)

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = made(**arguments).set_display_name(name)
        place(task, image, cluster, kfp, True)
        return task

    return step


def _seeded(graph: dict[str, Any]) -> dict[str, Any]:
    """The graph, its stages' seed a parameter of it."""
    for template in graph["spec"]["templates"]:
        if "--seed" in (words := template.get("container", {}).get("args", [])):
            words[words.index("--seed") + 1] = "{{workflow.parameters.seed}}"
    graph["spec"]["arguments"]["parameters"].append({"name": "seed", "value": "0"})
    return graph
