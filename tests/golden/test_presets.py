"""What each preset of ``manifests/presets`` changes in a rendered pipeline is what it was."""

import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tuneloop.argo.lint import lint_workflow
from tuneloop.config.loading import dump_workflow, find_pipeline
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.manifest import parse_applied_object
from tuneloop.workflow.pod_schema import find_patch_errors
from tuneloop.workflow.strategic_merge import apply_patch

HERE = Path(__file__).parent / "presets"
PRESETS = sorted(Path(__file__).parents[2].glob("manifests/presets/*.yaml"))
# With a JobSet, a server and pods of one stage, all kinds of pods are there.
SETS = ["nodes=2"]


def render(preset: Path | None) -> JsonObject:
    pipeline = find_pipeline("grpo")
    return pipeline.build(pipeline.configure(preset, SETS))


@pytest.fixture(scope="module")
def plain() -> JsonObject:
    return render(None)


def list_changes(plain: JsonObject, changed: JsonObject) -> Iterator[str]:
    """Yield the lines that differ, each hunk below the template that it is in."""
    for template, other in zip(
        [plain, *plain["spec"]["templates"]], [changed, *changed["spec"]["templates"]]
    ):
        name = template.get("name", "workflow")
        # The templates come one by one.
        if name == "workflow":
            template = template | {"spec": template["spec"] | {"templates": []}}
            other = other | {"spec": other["spec"] | {"templates": []}}
        before = spread(template).splitlines()
        after = spread(other).splitlines()
        lines = list(difflib.unified_diff(before, after, n=1, lineterm=""))
        if lines:
            yield f"# {name}"
            yield from ("@@" if line.startswith("@@") else line for line in lines[2:])


def spread(template: JsonObject) -> str:
    """Dump a template whose texts of YAML and JSON are written out."""
    template = dict(template)
    if "podSpecPatch" in template:
        template["podSpecPatch"] = yaml.safe_load(template["podSpecPatch"])
    if "resource" in template:
        template["resource"] = dict(template["resource"]) | {
            "manifest": parse_applied_object(template)
        }
    template.get("metadata", {}).get("annotations", {}).pop("tuneloop.dev/plan", None)
    return dump_workflow(template)


def test_there_are_ten() -> None:
    assert len(PRESETS) >= 10
    assert {path.stem for path in PRESETS} == {path.stem for path in HERE.glob("*.diff")}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_changes_of_a_preset(
    preset: Path, plain: JsonObject, request: pytest.FixtureRequest
) -> None:
    changed = render(preset)
    text = "\n".join(list_changes(plain, changed)) + "\n"
    golden = HERE / f"{preset.stem}.diff"
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.read_text() == text, "rendered otherwise than before: `make golden` if wanted"
    assert not lint_workflow(changed)
    for template in changed["spec"]["templates"]:
        # Argo applies the workflow's patch, then the template's, to a pod like this one.
        pod: JsonObject = {"containers": [{"name": "main"}, {"name": "wait"}]}
        for owner in (changed["spec"], template):
            patch = yaml.safe_load(owner.get("podSpecPatch", "{}"))
            assert list(find_patch_errors({"spec": patch})) == []
            pod = apply_patch(pod, patch)
        names = [container["name"] for container in pod["containers"]]
        assert sorted(names) in (["main", "wait"], ["main"])
