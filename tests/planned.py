"""Plans of stages that no pipeline has, and workflows that carry them."""

from collections.abc import Sequence
from typing import Any

from tuneloop.core.artifacts import Role
from tuneloop.core.component import find_component
from tuneloop.workflow.plan import PLAN, LoopPlan, PodResources, RunPlan, ServerPlan, StagePlan

IMAGE = "tuneloop/x:1"
OF_EXTENSIONS = {"evaluate_lm_eval": "tuneloop.extensions.evaluation.evaluate_lm_eval"}
"""Stage → its module, where that is an extension's."""


def planned(
    stage: str,
    template: str = "",
    *,
    accelerators: int = 0,
    nodes: int = 1,
    processes: int = 1,
    **parameters: Any,
) -> StagePlan:
    """Plan a stage of tuneloop's with these parameters alone; what they leave out is not in its plan."""
    module = OF_EXTENSIONS.get(stage, f"tuneloop.stages.{stage}")
    component = find_component(module)
    role: Role | None = component.role if component else None
    return StagePlan(
        template=template or stage.replace("_", "-"),
        module=module,
        role=role,
        parameters=parameters,
        wired=(),
        output="made",
        processes=processes,
        nodes=nodes,
        image=IMAGE,
        resource_role="trainer",
        resources=PodResources(cpu="1", memory_request="2Gi", accelerators=accelerators),
    )


def plan_server(template: str) -> ServerPlan:
    """Plan a server of rollouts."""
    resources = PodResources(cpu="1", memory_request="2Gi", accelerators=0)
    return ServerPlan(
        template=template, image=IMAGE, resource_role="sampler", resources=resources, port=8765
    )


def carrying(
    stages: Sequence[StagePlan],
    graphs: Sequence[dict[str, Any]] = (),
    loop: LoopPlan | None = None,
    servers: Sequence[str] = (),
    **parameters: str,
) -> dict[str, Any]:
    """Make a workflow with a pod for each stage, and `graphs`, of which one is `main`; by default its stages follow one
    another. `servers` are templates of servers, which are in its plan alone."""
    container = {"image": IMAGE, "command": ["true"]}
    leaves = [{"name": stage.template, "container": container} for stage in stages]
    calls = [[{"name": stage.template, "template": stage.template}] for stage in stages]
    plan = RunPlan(
        pipeline="toy",
        stages={stage.template: stage for stage in stages},
        servers={name: plan_server(name) for name in servers},
        loop=loop,
    )
    return {
        "metadata": {"name": "toy", "annotations": {PLAN: plan.dump()}},
        "spec": {
            "entrypoint": "main",
            "arguments": {
                "parameters": [{"name": name, "value": value} for name, value in parameters.items()]
            },
            "templates": [*leaves, *(graphs or [{"name": "main", "steps": calls}])],
        },
    }
