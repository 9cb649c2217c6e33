"""Each rule finds its fault in an otherwise clean workflow, and nothing else."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.local.making import dag, given, shell, task, workflow
from tuneloop.argo.lint import lint_workflow
from tuneloop.config.loading import find_pipeline, list_pipelines
from tuneloop.core.errors import UserError


def clean() -> dict[str, Any]:
    pod = shell("pod", "true", inputs=("x",), outputs=("out",), retryStrategy={"limit": 1})
    pod["container"] |= {
        "image": "registry/tuneloop/base:1.0",
        "resources": {"requests": {"cpu": "1"}},
        "securityContext": {"runAsNonRoot": True},
    }
    loop = dag(
        task("work", "pod", arguments=given(x="{{inputs.parameters.i}}")),
        task(
            "next",
            "loop",
            depends="work",
            when="{{=asInt(inputs.parameters.i) < 3}}",
            arguments=given(i="1"),
        ),
        name="loop",
        inputs={"parameters": [{"name": "i"}]},
    )
    return workflow(pod, loop, dag(task("a", "loop", arguments=given(i="0"))))


Change = Callable[[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]], object]


def update(where: dict[str, Any], **more: Any) -> None:
    where |= more


def test_a_clean_workflow() -> None:
    assert lint_workflow(clean()) == []


@pytest.mark.parametrize("name", list_pipelines())
def test_our_own_pipelines(name: str) -> None:
    pipeline = find_pipeline(name)
    assert [str(problem) for problem in lint_workflow(pipeline.build(pipeline.configure()))] == []


RULES: list[tuple[Change, str, str]] = [
    (lambda s, pod, loop, main: update(s, entrypoint="zz"), "spec.entrypoint", "no such template"),
    (lambda s, pod, loop, main: update(s, onExit="zz"), "spec.onExit", "no such template"),
    (
        lambda s, pod, loop, main: update(s, hooks={"h": {"template": "zz"}}),
        "spec.h",
        "no such template",
    ),
    (lambda s, pod, loop, main: update(pod, name="Bad_Name"), "templates.Bad_Name", "lower-case"),
    (
        lambda s, pod, loop, main: update(main["dag"]["tasks"][0], template="zz"),
        "templates.main.tasks.a.template",
        "no such",
    ),
    (
        lambda s, pod, loop, main: update(main["dag"]["tasks"][0], onExit="zz"),
        "templates.main.tasks.a.hooks",
        "no such",
    ),
    (
        lambda s, pod, loop, main: update(main["dag"]["tasks"][0], arguments={}),
        "tasks.a.arguments",
        "is required by",
    ),
    (
        lambda s, pod, loop, main: update(main["dag"]["tasks"][0], arguments=given(i="0", j="1")),
        "tasks.a",
        "no such input",
    ),
    (
        lambda s, pod, loop, main: update(loop["dag"]["tasks"][1], depends="zz"),
        "tasks.next.depends",
        "is not a task",
    ),
    (
        lambda s, pod, loop, main: update(loop["dag"]["tasks"][0], depends="next"),
        "tasks.work",
        "waits for itself",
    ),
    (lambda s, pod, loop, main: loop["dag"]["tasks"][1].pop("when"), "tasks.next", "needs a when"),
    (
        lambda s, pod, loop, main: update(
            loop["dag"]["tasks"][1], arguments=given(i="{{tasks.zz.outputs.parameters.out}}")
        ),
        "tasks.next",
        "is not a task of this DAG",
    ),
    (
        lambda s, pod, loop, main: loop["dag"]["tasks"].append(
            task("b", "pod", arguments=given(x="{{tasks.work.outputs.parameters.out}}"))
        ),
        "tasks.b",
        "not waited for",
    ),
    (
        lambda s, pod, loop, main: loop["dag"]["tasks"].append(
            task(
                "b",
                "pod",
                depends="next",
                arguments=given(x="{{tasks.next.outputs.parameters.out}}"),
            )
        ),
        "tasks.b",
        "may be skipped",
    ),
    (
        lambda s, pod, loop, main: update(loop, timeout="1m"),
        "templates.loop.timeout",
        "a DAG has no timeout",
    ),
    (
        lambda s, pod, loop, main: pod["container"].pop("resources"),
        "templates.pod.resources",
        "request cpu",
    ),
    (
        lambda s, pod, loop, main: pod["container"].pop("securityContext"),
        "templates.pod.securityContext",
        "restricted",
    ),
    (lambda s, pod, loop, main: pod.pop("retryStrategy"), "templates.pod.retryStrategy", "evicted"),
    (
        lambda s, pod, loop, main: update(pod["container"], image="base:latest"),
        "templates.pod.image",
        "name a version",
    ),
    (
        lambda s, pod, loop, main: update(pod["container"], image="host:5000/base"),
        "templates.pod.image",
        "name a version",
    ),
    (
        lambda s, pod, loop, main: pod["container"]["resources"].update(
            limits={"nvidia.com/gpu": 1}
        ),
        "templates.pod.metadata.labels",
        "queue's label",
    ),
    (
        lambda s, pod, loop, main: update(
            pod, retryStrategy={"expression": "lastRetry.exitCode == 75"}
        ),
        "spec.templates.pod.retryStrategy.expression",
        "write asInt",
    ),
    (
        lambda s, pod, loop, main: update(
            pod, retryStrategy={"expression": "asInt(lastRetry.exitCode == 75"}
        ),
        "spec.templates.pod.retryStrategy.expression",
        "unexpected",
    ),
    (
        lambda s, pod, loop, main: update(main["dag"]["tasks"][0], when="{{=sprig.len('a') > 1}}"),
        "spec.templates.main.dag.tasks.a.when",
        "sprig.len is not supported",
    ),
    (
        lambda s, pod, loop, main: update(
            loop,
            outputs={
                "parameters": [{"name": "o", "valueFrom": {"expression": "workflow.parameters.x"}}]
            },
        ),
        "spec.templates.loop.outputs.parameters.o.valueFrom.expression",
        "write '{{workflow.parameters.x}}'",
    ),
    (
        lambda s, pod, loop, main: update(s["arguments"], parameters=[{"name": "n", "value": "1"}]),
        "spec.arguments.parameters.n.name",
        "YAML 1.1",
    ),
    (
        lambda s, pod, loop, main: (update(pod, daemon=True), update(s, parallelism=1)),
        "spec.parallelism",
        "the daemon pod counts, too",
    ),
]


DRAWN = """
from tuneloop.cli.pipeline_file import make_builders
from tuneloop.config.pipeline import SET_BY_PIPELINE, PipelineConfig
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.workflow.loop import StageSpec

Config = PipelineConfig.with_sections(data=data_prep.settings(without=SET_BY_PIPELINE))

def stages(config):
    return [StageSpec(data_prep, config.data)]

def draw(graph):
    "Names."
    graph.stage(data_prep, @names[0])
    for name in @names[1:]:
        graph.stage(data_prep if name else base_model, name)

build_argo, build_kfp = make_builders(@pipeline, stages, draw)
"""


def draw_stages(tmp_path: Path, *names: str, pipeline: str = "mine") -> list[str]:
    """Return what lint says of a pipeline that draws a stage under each of these names."""
    source = DRAWN.replace("@names", repr(names)).replace("@pipeline", repr(pipeline))
    # A module of one path is loaded once.
    file = tmp_path / f"mine_{len([*tmp_path.iterdir()])}.py"
    file.write_text(source)
    found = find_pipeline(str(file))
    return [str(problem) for problem in lint_workflow(found.build(found.configure()))]


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("measure", True),
        ("Measure-It", True),
        ("m" * 128, True),
        ("m" * 129, False),
        ("Measure_It", False),
        ("_measure", False),
        ("-measure", False),
        ("measure it", False),
        ("measure.it", False),
    ],
)
def test_names_of_stages_are_those_that_argo_takes(tmp_path: Path, name: str, good: bool) -> None:
    problems = draw_stages(tmp_path, name)
    assert len(problems) == (0 if good else 1)
    assert good or f"templates.main.dag.tasks: {name!r}"[:100] in problems[0]


@pytest.mark.parametrize(
    ("pipeline", "good"), [("p" * 57, True), ("p" * 58, False), ("My-Own", False), ("a_b", False)]
)
def test_names_of_pipelines_are_those_that_kubernetes_takes(
    tmp_path: Path, pipeline: str, good: bool
) -> None:
    problems = draw_stages(tmp_path, "measure", pipeline=pipeline)
    assert len([line for line in problems if "name the pipeline with" in line]) == 1 - good


def test_two_stages_under_one_name_are_one_line(tmp_path: Path) -> None:
    line = (
        "stages: 'measure': is the name of two stages that are drawn: give one of them another name"
    )
    with pytest.raises(UserError, match=re.escape(line)):
        draw_stages(tmp_path, "measure", "measure")
    with pytest.raises(
        UserError, match="stages: 'base-model': is drawn, and `stages` has no Stage"
    ):
        draw_stages(tmp_path, "measure", "")


def test_a_stage_under_the_name_of_one_that_the_loop_draws(tmp_path: Path) -> None:
    source = (list_pipelines()["grpo"]).read_text()
    taken = source.replace(
        "model = graph.stage(base_model, prompts=data.prompts)\n    start = model.checkpoint\n",
        'model = graph.stage(base_model, "evaluate-before", prompts=data.prompts)\n'
        "    start = model.checkpoint\n",
    )
    assert taken != source
    (tmp_path / "taken.py").write_text(taken)
    found = find_pipeline(str(tmp_path / "taken.py"))
    with pytest.raises(UserError, match="stages: 'evaluate-before': is the name of two stages"):
        found.build(found.configure())


@pytest.mark.parametrize(
    ("change", "field", "remedy"), RULES, ids=[f"{field}-{remedy}" for _, field, remedy in RULES]
)
def test_rule(change: Change, field: str, remedy: str) -> None:
    document = copy.deepcopy(clean())
    change(document["spec"], *document["spec"]["templates"])
    problems = [str(problem) for problem in lint_workflow(document)]
    assert any(field in problem and remedy in problem for problem in problems), problems
