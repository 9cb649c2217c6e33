"""What the UI of Kubeflow Pipelines shows of a task beside its handle: the table `UI_OUTPUTS`.

An entry is all the code that another output needs (beside a row of docs/kfp.md, and `make golden`).
A number for other tasks is a result of the stage (`results` of `core/component.py`). When a pipeline
is compiled, `kfp/template.py` declares an entry for the components of stages, and `kfp/loop.py` for
the task of the iterations. In the pod `kfp/stage.py` and `kfp/iterations.py` write it. So this
module is imported where there is no kfp.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tuneloop.core.artifacts import Manifest
from tuneloop.core.component import Component
from tuneloop.core.json_types import JsonMapping
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task
from tuneloop.ui.report import render_metrics


@dataclass(frozen=True)
class CommittedArtifact:
    """An artifact that a stage has committed at a URL."""

    url: str
    manifest: Manifest


@dataclass(frozen=True)
class LoopProgress:
    """The progress of a loop.

    Attributes:
        rows: one an iteration, the newest last: its number ``iteration`` and its stages' scalars.
        rewards: of the newest iteration.
    """

    rows: Sequence[JsonMapping]
    rewards: CommittedArtifact


@dataclass(frozen=True)
class UiOutput:
    """An output artifact for people; no task takes it as an input.

    Attributes:
        name: of the artifact.
        type: its class in `kfp.dsl`, by which the UI chooses how to show it.
        applies_to: whether the tasks of a stage have it. The task of the iterations has every entry
            of `UI_OUTPUTS`, so that `write_loop` has to write a file in any case.
        write_stage: writes it, under this name, for what a stage has committed.
        write_loop: writes it, under this name, for the iterations of a loop.
    """

    name: str
    type: Literal["HTML", "Markdown", "Metrics"]
    applies_to: Callable[[Component], bool]
    write_stage: Callable[[Task, str, CommittedArtifact], None]
    write_loop: Callable[[Task, str, LoopProgress], None]


def _has_separate_results(stage: Component) -> bool:
    # The handle of metrics has the results already, and is shown as scalars.
    return stage.kind != "metrics"


def _write_results(task: Task, name: str, artifact: CommittedArtifact) -> None:
    task.write_metrics(name, artifact.manifest.scalars)


def _write_newest_results(task: Task, name: str, progress: LoopProgress) -> None:
    task.write_metrics(name, progress.rows[-1])


def _is_any(stage: Component) -> bool:
    return True


def _write_preview(task: Task, name: str, artifact: CommittedArtifact) -> None:
    previews.write_artifact_page(task, name, artifact.url, artifact.manifest)


def _write_newest_preview(task: Task, name: str, progress: LoopProgress) -> None:
    _write_preview(task, name, progress.rewards)


def _is_trained_with_loss(stage: Component) -> bool:
    return stage.kind == "checkpoint" and "loss" in stage.results


def _write_curves(task: Task, name: str, artifact: CommittedArtifact) -> None:
    previews.write_curves(task, name, artifact.url, artifact.manifest)


def _write_loop_curves(task: Task, name: str, progress: LoopProgress) -> None:
    task.write(name, render_metrics("iterations", progress.rows, "iteration"))


UI_OUTPUTS = (
    UiOutput(
        name="results",
        type="Metrics",
        applies_to=_has_separate_results,
        write_stage=_write_results,
        write_loop=_write_newest_results,
    ),
    UiOutput(
        name="preview",
        type="Markdown",
        applies_to=_is_any,
        write_stage=_write_preview,
        write_loop=_write_newest_preview,
    ),
    UiOutput(
        name="curves",
        type="HTML",
        applies_to=_is_trained_with_loss,
        write_stage=_write_curves,
        write_loop=_write_loop_curves,
    ),
)
"""Every output that the UI shows, in the order in which components declare them.

The report of a run has outputs of its own, `report.py`. docs/kfp.md lists all. No stage may have an
output of one of these names.
"""


def write_stage_outputs(task: Task, artifact: CommittedArtifact) -> None:
    """Write those of `UI_OUTPUTS` that the task of a stage has."""
    for output in UI_OUTPUTS:
        # A pipeline that was compiled by an earlier release may lack one.
        if output.name in task.outputs:
            output.write_stage(task, output.name, artifact)


def write_loop_outputs(task: Task, progress: LoopProgress) -> None:
    """Write those of `UI_OUTPUTS` that the task of the iterations has."""
    for output in UI_OUTPUTS:
        if output.name in task.outputs:
            output.write_loop(task, output.name, progress)
