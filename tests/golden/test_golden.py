"""Every pipeline's rendered YAML is what it was; `make golden` rewrites it after a wanted change."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tuneloop.cli import run_cli
from tuneloop.cluster.run_workflows import as_template, template_name
from tuneloop.config.loading import dump_workflow, find_pipeline

HERE = Path(__file__).parent
MANIFESTS = HERE.parents[1] / "manifests" / "components" / "pipelines"
PIPELINES = sorted(HERE.parents[1].glob("pipelines/*.py"))
FORMS = {
    "": [],
    "-transformers": ["--set", "engine.kind=transformers", "--set", "loop.evaluate_every=5"],
    "-asynchronous": ["--set", "loop.asynchronous=true", "--set", "loop.evaluate_every=5"],
    "-replicas": ["--set", "engine.replicas=2"],
    "-servers": [
        *(
            "--servers",
            "tuneloop-rollout",
            "--set",
            "engine.weights.kind=pull",
            "--set",
            "engine.weights.url=s3://bucket/weights",
        ),
        *(
            "--set",
            "engine.replicas=3",
            "--set",
            "cluster.sampler.gpus=4",
            "--set",
            "cluster.sampler.memory=24Gi",
        ),
        *("--set", "engine.args={tensor_parallel_size: 2, pipeline_parallel_size: 2}"),
    ],
    "-stages": [
        "--set",
        "engine.kind=transformers",
        "--set",
        "loop.evaluate_every=5",
        "--set",
        "loop.iterations_per_pod=0",
    ],
    "-asleep": ["--set", "engine.colocate=true", "--set", "engine.asleep={cpu: 100m, memory: 1Gi}"],
    "-shared": [
        *(
            "--set",
            "cluster.share.group=demo",
            "--set",
            "cluster.share.device_class=gpu.example.com",
        ),
        *("--set", "cluster.share.roles=apart", "--set", "cluster.share.request=512Mi"),
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.stem)
def test_rendered_yaml(
    pipeline: Path, form: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if form and "loop" not in find_pipeline(str(pipeline)).Config.model_fields:
        pytest.skip("has no loop")
    if (
        form in ("-asynchronous", "-replicas", "-servers", "-stages", "-asleep", "-shared")
        and pipeline.stem != "grpo"
    ):
        pytest.skip("the loop is grpo's")
    assert run_cli(["render", str(pipeline), *FORMS[form]]) == 0
    text = capsys.readouterr().out
    golden = HERE / "argo" / f"{pipeline.stem}{form}.yaml"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert golden.read_text() == text, (
        "rendered otherwise than before; `make golden` if that is wanted"
    )


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.stem)
def test_the_template_in_manifests_is_the_pipeline(
    pipeline: Path, request: pytest.FixtureRequest
) -> None:
    found = find_pipeline(str(pipeline))
    text = dump_workflow(as_template(found.build(found.configure()), template_name(found.name)))
    manifest = MANIFESTS / f"{pipeline.stem}.yaml"
    if request.config.getoption("--update-golden"):
        manifest.write_text(text)
    assert manifest.read_text() == text, (
        "rendered otherwise than before; `make golden` if that is wanted"
    )


def test_the_manifests_hold_every_pipeline(request: pytest.FixtureRequest) -> None:
    kustomization = MANIFESTS / "kustomization.yaml"
    names = ", ".join(f"{pipeline.stem}.yaml" for pipeline in PIPELINES)
    text = re.sub(
        r"^resources: .*", f"resources: [{names}]", kustomization.read_text(), flags=re.MULTILINE
    )
    if request.config.getoption("--update-golden"):
        kustomization.write_text(text)
    assert kustomization.read_text() == text, (
        "another list of pipelines than before; `make golden` if that is wanted"
    )


def test_every_golden_file_has_its_pipeline() -> None:
    known = {f"{p.stem}{form}" for p in PIPELINES for form in FORMS}
    assert {p.stem for p in (HERE / "argo").glob("*.yaml")} <= known


def test_hera_generates_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a whole run besides: its name, its store, and the labels by which it is seen."""
    monkeypatch.setenv("TUNELOOP_STORE", "s3://mine/runs")
    command = [sys.executable, "-m", "hera", "generate", "yaml", str(PIPELINES[0].parent)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    generated = [*yaml.load_all(text, yaml.CSafeLoader)]
    for pipeline, workflow in zip(PIPELINES, generated, strict=True):
        golden = yaml.load((HERE / "argo" / f"{pipeline.stem}.yaml").read_text(), yaml.CSafeLoader)
        spec = golden["spec"]
        run = workflow["metadata"]["generateName"].removesuffix("-")
        assert re.fullmatch(rf"{spec['arguments']['parameters'][0]['value']}-[0-9a-f]{{6}}", run)
        golden["metadata"]["generateName"] = f"{run}-"
        spec["arguments"]["parameters"][0]["value"] = run
        spec["arguments"]["parameters"][1]["value"] = "s3://mine/runs"
        template = as_template(golden, "any")["spec"]
        spec["podMetadata"] = template["podMetadata"]
        spec["workflowMetadata"] = {"labelsFrom": template["workflowMetadata"]["labelsFrom"]}
        assert workflow == golden


def test_a_pipelines_file_prints_a_run_of_a_chosen_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNELOOP_RUN", "demo")
    command = [sys.executable, str(PIPELINES[0].parent / "sft.py")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    workflow = yaml.load(text, yaml.CSafeLoader)
    values = {item["name"]: item["value"] for item in workflow["spec"]["arguments"]["parameters"]}
    assert values == {"run": "demo", "store": "s3://artifacts/runs"}
    assert workflow["metadata"]["generateName"] == "demo-"
