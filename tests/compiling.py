"""Pipelines compiled for Kubeflow, many times faster than kfp does it below a test."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tuneloop.config.loading import find_pipeline
from tuneloop.kfp.client import compile_to


@contextmanager
def without_sources() -> Iterator[None]:
    """Have kfp read no source for the names of its callers.

    For each setting of a task it asks for the whole stack, with lines of source, and takes from it the name of a
    method. A test has sixty callers, and for the source of each Python looks through thousands of modules.
    """
    from kfp.dsl import pipeline_task

    before = pipeline_task.inspect
    pipeline_task.inspect = SimpleNamespace(stack=functools.partial(inspect.stack, 0))
    try:
        yield
    finally:
        pipeline_task.inspect = before


def compiled(pipeline: str, sets: list[str], path: Path) -> Path:
    """Write the compiled form of `pipeline` with the settings ``KEY=VALUE``."""
    found = find_pipeline(pipeline)
    with without_sources():
        compile_to(found.module.build_kfp(found.configure(None, sets)), path)
    return path
