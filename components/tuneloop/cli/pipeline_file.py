"""Build an Argo Workflow and a KFP pipeline from the definitions in a pipeline's file; run such a file as a program."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tuneloop.workflow.loop import Graph, Loop, StageSpec


def make_builders(
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

    vars(build_argo)["loop"] = loop  # a fork begins at this loop
    return build_argo, build_kfp


def run_file(name: str, path: str, build: Callable[[], Any]) -> Any:
    """Submit the pipeline to the Argo server that ARGO_SERVER names, if its file is run as a program. Return the
    Workflow for `hera generate yaml`, which renders the workflows that it finds in a module; otherwise None.

    Args:
        name, path: ``__name__`` and ``__file__`` of the file.
        build: makes its Workflow.
    """
    if name == "__main__":
        from tuneloop.cli.cluster import submit_pipeline

        sys.exit(submit_pipeline(path, sys.argv[1:]))
    return build() if "hera._cli" in sys.modules else None
