"""Build an Argo Workflow and a KFP pipeline from the definitions in a pipeline's file, and render
such a file.

Every file of `pipelines/`, and every pipeline of a user's, imports it: names and arguments here are
an interface, shown in docs/extending.md. The two functions are found in such a file by their names:
`build_argo` by `config/loading.py`, `build_kfp` by `cli/kfp.py` and `kfp/configure.py`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.workflow.loop import Graph, Loop, StageSpec


def make_builders(
    name: str,
    stages: Callable[[Any], Sequence[StageSpec]],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions `build_argo` and `build_kfp` of a pipeline.

    Each takes the pipeline's configuration. hera or kfp is imported when it is called, so that a
    pipeline's settings can be read without either.

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

        # The first task of a run configures the pipeline again.
        file = vars(sys.modules[stages.__module__]).get("__file__")
        if file is None:
            remedy = "has no file: save it as a .py file, which the tasks of a run read"
            raise UserError("pipeline", name, remedy)
        return build_pipeline(name, config, stages(config), draw, loop, file=file)

    def plan_kfp(config: Any) -> Any:
        from tuneloop.kfp.task_plan import plan_tasks

        return plan_tasks(name, config, stages(config), loop)

    # A fork begins at this loop (`runs/forking.py`), and a sweep may judge runs by its iterations
    # (`extensions/sweep/runs.py`). A pipeline that draws its graph itself lacks the attribute.
    vars(build_argo)["loop"] = loop
    # For the first task of a run on KFP (`kfp/configure.py`).
    vars(build_kfp)["plan"] = plan_kfp
    return build_argo, build_kfp


def render_file(name: str, build: Callable[[], Any]) -> Any:
    """Print the pipeline's Workflow as YAML where its file is run as a program.

    `hera generate yaml` renders the workflows that it finds in a module, so it gets one; others get
    None. Both get a whole run, which `argo submit` takes as it is (`tuneloop.argo.standalone`).

    Args:
        name: ``__name__`` of the file.
        build: makes its Workflow, of the default settings.
    """
    is_program = name == "__main__"
    if not is_program and "hera._cli" not in sys.modules:
        return None
    from tuneloop.argo.standalone import complete_run

    workflow = complete_run(build())
    if not is_program:
        return workflow
    from tuneloop.config.loading import dump_workflow

    sys.stdout.write(dump_workflow(workflow.to_dict()))
    return None
