"""The warm process with the real libraries: stages are its forks, start at once, and are processes of their own."""

import os
from pathlib import Path
from typing import Any

import pytest

from tuneloop.local.executor import Outcome, execute_workflow
from tuneloop.local.processes import WARM

pytestmark = pytest.mark.local


def stage(name: str, **more: Any) -> dict[str, Any]:
    """``python -m tuneloop.stages.<name> --help``: a whole start and end, and nothing in between."""
    container = {
        "image": "none",
        "command": ["python", "-m", f"tuneloop.stages.{name}"],
        "args": ["--help"],
        **more,
    }
    return {"name": name.replace("_", "-"), "container": container}


def run(workdir: Path, *names: str, **options: Any) -> Outcome:
    tasks: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        before = {"depends": tasks[-1]["name"]} if tasks else {}
        tasks.append({"name": f"s{index}", "template": name.replace("_", "-"), **before})
    templates = [
        *(stage(name) for name in dict.fromkeys(names)),
        {"name": "main", "dag": {"tasks": tasks}},
    ]
    document = {"metadata": {"name": "w"}, "spec": {"entrypoint": "main", "templates": templates}}
    return execute_workflow(document, workdir=workdir, **options)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's own warm process, not that of all tests."""
    monkeypatch.delenv(WARM, raising=False)


def test_stages_are_forks_of_the_warm_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = run(tmp_path, "sft", *["policy_update", "sft", "export"])
    pods = [node for node in outcome.nodes.values() if node.type == "Pod"]
    took = sorted(pod.finished - pod.started for pod in pods[1:])
    print(f"start to end of a stage, median of {len(took)}: {1000 * took[len(took) // 2]:.0f} ms")
    assert outcome.phase == "Succeeded"
    assert "no warm process" not in caplog.text
    for pod in pods:
        assert "usage: python -m tuneloop." in (tmp_path / pod.log).read_text()


def test_a_stage_that_fails_says_so(tmp_path: Path) -> None:
    template = stage("sft")
    template["container"]["args"] = ["--no-such-flag"]
    main = {"name": "main", "dag": {"tasks": [{"name": "s", "template": "sft"}]}}
    document = {
        "metadata": {"name": "w"},
        "spec": {"entrypoint": "main", "templates": [template, main]},
    }
    outcome = execute_workflow(document, workdir=tmp_path)
    assert outcome.exit_code == 2
    assert "error: python -m tuneloop.stages.sft" in outcome.message


def test_without_a_warm_process_stages_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it finds its libraries broken."""
    (tmp_path / "tokenizers.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    outcome = run(tmp_path / "run", "sft", "export")
    assert outcome.phase == "Succeeded"
    assert "no warm process: ImportError: broken" in caplog.text
