"""What a schedule creates, as YAML: the workflow of its times, and where its runs get their model."""

from pathlib import Path

import pytest
import yaml

from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.cluster.schedule import Trigger, build_check_spec, take_base_model, template_spec
from tuneloop.config.loading import find_pipeline

HERE = Path(__file__).parent / "schedules"
TRIGGERS = {
    "data": Trigger(),
    "data-line": Trigger(minima={"mean_reward": 0.25}),
    "timed": Trigger(is_timed=True),
    "timed-line": Trigger(is_timed=True, minima={}),
}


@pytest.mark.parametrize("name", TRIGGERS)
def test_schedules_are_rendered_as_before(name: str, request: pytest.FixtureRequest) -> None:
    trigger = TRIGGERS[name]
    sft = find_pipeline("sft")
    workflow = prepare_workflow(sft.build(sft.configure()), run="nightly", store="s3://b/runs")
    spec = build_check_spec(workflow, "nightly", trigger)
    template = template_spec(workflow, "nightly")
    if trigger.minima is not None:
        take_base_model(template, "nightly")
    (base,) = [item for item in template["templates"] if item["name"] == "base-model"]
    rendered = {
        "check": spec,
        "template": {"arguments": template["arguments"], "base-model": base["container"]["args"]},
    }
    text = yaml.safe_dump(rendered, sort_keys=False, width=200)
    golden = HERE / f"{name}.yaml"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert golden.read_text() == text


def test_every_golden_file_has_its_trigger() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(TRIGGERS)
