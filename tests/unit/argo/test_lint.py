"""Each rule finds its fault in an otherwise clean workflow, and nothing else."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.local.making import dag, given, shell, task, workflow
from tuneloop.argo.lint import lint_workflow
from tuneloop.config.loading import find_pipeline, list_pipelines


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


@pytest.mark.parametrize(
    ("change", "field", "remedy"), RULES, ids=[f"{field}-{remedy}" for _, field, remedy in RULES]
)
def test_rule(change: Change, field: str, remedy: str) -> None:
    document = copy.deepcopy(clean())
    change(document["spec"], *document["spec"]["templates"])
    problems = [str(problem) for problem in lint_workflow(document)]
    assert any(field in problem and remedy in problem for problem in problems), problems
