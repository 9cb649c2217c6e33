"""What KFP 2.17.0's driver and launcher, and Argo, ask of every compiled pipeline (source: tests/kfp_backend.py)."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp.dsl.pipeline_channel import PipelineArtifactChannel

from tests.compiling import compiled
from tests.kfp_backend import AlreadyExistsError, Backend, BackendRun, Interpreter, Values, pb
from tuneloop.kfp.doctor import SIZE_LIMIT, predict_workflow_size
from tuneloop.kfp.template import pass_artifacts_once

ROOT = Path(__file__).parents[3]
PIPELINES = {path.stem for path in ROOT.glob("pipelines/*.py")}
LOOPS = {"grpo", "sft_then_grpo"}
FORMS: Mapping[str, tuple[str, ...]] = {
    "in one task": ("loop.iterations=1000",),
    "written out": ("loop.iterations=8", "kfp.unroll=8", "loop.evaluate_every=2"),
}
MACROS = {"{{$.pipeline_job_uuid}}", "{{$.pipeline_job_name}}"}
"""That the driver replaces where a constant is one of them and nothing else."""


@pytest.fixture(
    scope="module",
    params=[(p, f) for p in sorted(PIPELINES) for f in FORMS if p in LOOPS or f == "in one task"],
    ids=lambda pair: " ".join(pair),
)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pipeline, form = request.param
    sets = FORMS[form] if pipeline in LOOPS else ()
    path = compiled(pipeline, [*sets], tmp_path_factory.mktemp("compiled") / "pipeline.yaml")
    return next(yaml.load_all(path.read_text(), yaml.CSafeLoader))


def test_no_task_is_given_an_artifact_twice(spec: Any) -> None:
    for name, task in _tasks(spec):
        sources = [
            json.dumps(each) for each in task.get("inputs", {}).get("artifacts", {}).values()
        ]
        assert len(sources) == len(set(sources)), (
            f"{name}: the metadata store takes an artifact once"
        )


def test_every_input_is_defined_and_given(spec: Any) -> None:
    for name, task in _tasks(spec):
        defined = spec["components"][task["componentRef"]["name"]].get("inputDefinitions", {})
        for kind in ("parameters", "artifacts"):
            given, wanted = set(task.get("inputs", {}).get(kind, {})), defined.get(kind, {})
            assert {k for k, each in wanted.items() if not each.get("isOptional")} <= given, name
            assert {each for each in given if not each.startswith("pipelinechannel--")} <= set(
                wanted
            ), name


def test_macros_stand_alone(spec: Any) -> None:
    """Within a longer text the driver leaves a macro as it is; the launcher fills in parameters alone."""
    for name, task in _tasks(spec):
        for key, source in task.get("inputs", {}).get("parameters", {}).items():
            text = source.get("runtimeValue", {}).get("constant")
            if isinstance(text, str) and text not in MACROS:
                left = re.sub(r"\{\{\$\.inputs\.parameters\['[^']+'\]\}\}", "", text)
                assert "{{" not in left and "[[" not in left, f"{name}: {key}: {text}"


def test_no_address_is_made_of_a_number(spec: Any) -> None:
    """KFP writes 1 into a text as ``1`` in one place, and as ``1.0`` in another."""
    for name, task in _tasks(spec):
        defined = spec["components"][task["componentRef"]["name"]]["inputDefinitions"].get(
            "parameters", {}
        )
        url = (
            task["inputs"]
            .get("parameters", {})
            .get("url", {})
            .get("runtimeValue", {})
            .get("constant", "")
        )
        for channel in re.findall(r"parameters\['([^']+)'\]", url):
            assert defined.get(channel, {}).get("parameterType", "STRING") == "STRING", name


def test_no_loop_and_no_condition_of_kfp(spec: Any) -> None:
    """A loop fills Argo's object, and a DAG whose last task is left out stays RUNNING in the metadata."""
    for name, task in _tasks(spec):
        assert "parameterIterator" not in task and "condition" not in task.get(
            "triggerPolicy", {}
        ), name


def test_the_workflow_fits_into_argos_object(spec: Any) -> None:
    assert predict_workflow_size(spec) < SIZE_LIMIT


def test_names_do_not_look_like_attempts(spec: Any) -> None:
    names = Counter(name for name, _ in _tasks(spec))
    assert not any(re.search(r"\(\d+\)$|driver$|^executor$|^root$", name) for name in names)


def test_of_two_inputs_that_are_one_artifact_the_first_is_passed() -> None:
    model = PipelineArtifactChannel(
        "checkpoint", channel_type="system.Model@0.0.1", task_name="sft", is_artifact_list=False
    )
    inputs = ["policy", "rewards", "reference"]
    for arguments in (
        {"policy": model, "reference": model, "url": "u"},
        {"url": "u", "reference": model, "policy": model},
    ):
        passed = pass_artifacts_once(arguments, inputs)
        assert passed == {"policy": model, "url": "u", "same_artifact": {"reference": "policy"}}


def test_the_metadata_store_takes_an_artifact_once_a_task(tmp_path: Path) -> None:
    """What the first test is about, asked of the store itself."""
    backend = Backend(tmp_path)
    interpreter = Interpreter(backend, BackendRun("id", "name", {}, tmp_path), {}, cache=False)
    kind = backend.get_type("system.Model", pb.ArtifactType, backend.store.put_artifact_type)
    model = pb.Artifact(type_id=kind, uri="s3://b/k")
    (model.id,) = backend.store.put_artifacts([model])
    interpreter.create_execution(
        "system.ContainerExecution", "t", "t", Values(artifacts={"policy": model}), None
    )
    with pytest.raises(AlreadyExistsError, match="event already exists"):
        given = Values(artifacts={"policy": model, "reference": model})
        interpreter.create_execution("system.ContainerExecution", "u", "u", given, None)


def _tasks(spec: Any) -> Iterator[tuple[str, Any]]:
    for graph in (spec["root"], *spec["components"].values()):
        yield from graph.get("dag", {}).get("tasks", {}).items()
