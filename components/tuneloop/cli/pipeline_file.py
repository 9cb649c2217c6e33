"""What a pipeline's file builds of what it says: an Argo Workflow, and a KFP pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tuneloop.workflow.loop import Graph, Loop, StageSpec


def builders(
    name: str,
    stages: Callable[[Any], Sequence[StageSpec]],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions `build_argo` and `build_kfp` of a pipeline, each of which takes its configuration.

    Args:
        name: of the pipeline, in kebab-case.
        stages: its stages, for a configuration.
        draw: calls them; its docstring describes the pipeline.
        loop: what `draw` calls as the loop.
    """

    def build_argo(config: Any) -> Any:
        from tuneloop.argo.pipeline import build_workflow

        return build_workflow(name, config, stages(config), draw, loop)

    def build_kfp(config: Any) -> Any:
        from tuneloop.kfp.pipeline import build_pipeline

        return build_pipeline(name, config, stages(config), draw, loop)

    return build_argo, build_kfp
