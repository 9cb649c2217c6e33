"""Run compiled pipelines on this machine, by KFP's own local runner.

    init_local_runner(pipeline_root, cache=True)
    build_kfp(config)(run="mine", store="runs")

kfp's `SubprocessRunner` takes lightweight Python components only: for others it would need the container's file
system. Our stages need none: an image holds what this environment holds, and all paths come in the executor input.
So the one check that refuses container components is lifted, and the warning about their image with it. The checks
are methods of `SubprocessTaskHandler`; kfp 2.17 offers no way to plug in a handler.

A ParallelFor over a task's output is found by the runner only if that output is called ``Output``, which kfp lets no
component with other outputs have. So each output is kept under the name, too, by which the loop asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kfp import local as kfp_local
from kfp.local.io import IOStore
from kfp.local.subprocess_task_handler import SubprocessTaskHandler


def init_local_runner(pipeline_root: str | Path, *, cache: bool = False) -> None:
    """Run pipelines and components that this process calls from now on here, in subprocesses.

    Args:
        pipeline_root: a directory for handles, previews and kfp's cache; artifacts themselves lie in the store.
        cache: let kfp skip a task that ended well with the same inputs before, as the backend does.
    """
    SubprocessTaskHandler.validate_not_container_component = _accept
    SubprocessTaskHandler.validate_image = _accept
    IOStore.put_task_output = _put_task_output
    runner = kfp_local.SubprocessRunner(use_venv=False)
    kfp_local.init(runner, pipeline_root=str(pipeline_root), enable_caching=cache, raise_on_error=True)


def _accept(self: SubprocessTaskHandler, subject: object) -> None:
    """Nothing is refused."""


def _put_task_output(self: IOStore, task_name: str, key: str, value: Any) -> None:
    self._task_output_data[task_name][key] = value
    self.put_parent_input(f"pipelinechannel--{task_name}-{key}", value)
