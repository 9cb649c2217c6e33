"""One pod for several iterations: what is written into its command, and what runs there."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tests.waiting import LIMIT_S, until
from tuneloop.argo.multi_stage_pod import as_text
from tuneloop.argo.pod_fields import OUTPUTS
from tuneloop.config.loading import find

COARSE = ["engine.name=transformers", "loop.iterations_per_pod=10"]


def segment_of(workflow: dict) -> dict:
    return next(t for t in workflow["spec"]["templates"] if t["name"] == "segment")


@pytest.fixture(scope="module")
def workflow() -> dict:
    found = find("grpo")
    return found.module.build_argo(found.configure(None, COARSE)).to_dict()


def test_the_graph_of_a_pod_has_nothing_that_argo_would_replace(workflow: dict) -> None:
    arguments = segment_of(workflow)["container"]["args"]
    text = arguments[arguments.index("--graph") + 1]
    assert "{{" not in text and OUTPUTS not in text
    graph = json.loads(text)
    assert {t["name"] for t in graph["spec"]["templates"]} == {"loop", "rollout", "reward", "policy-update"}
    assert as_text(graph) == text
    assert "{{inputs.parameters.policy}}" in yaml.safe_dump(graph)


def test_stages_of_a_pod_are_in_no_template_of_their_own(workflow: dict) -> None:
    names = {t["name"] for t in workflow["spec"]["templates"]}
    assert "segment" in names and not names & {"rollout", "reward", "policy-update"}


STAGE = '''
import os, random, sys, time
from pathlib import Path
from tuneloop.core.component import Stage, component

@component("made", results={"total": int})
def toy(stage: Stage, *, number: int = 0, wait_s: float = 0.0):
    """A toy."""
    Path(os.environ["SEEN"]).open("a").write(f"{os.getpid()} {number}\\n")
    until = time.monotonic() + (float(os.environ.get("SECOND_S", wait_s)) if number == 2 else wait_s)
    go = os.environ.get("GO")
    while time.monotonic() < until and not (go and os.path.exists(go)):
        if not go:
            stage.check_stop()
        time.sleep(0.01)
    (stage.out / "made.txt").write_text(str(number))
    return {"total": number + 1}
'''


def graph(store: Path, wait_s: float = 0.0) -> dict:
    """Two stages, the second of which takes the first one's result."""
    outputs = {"parameters": [{"name": "total", "valueFrom": {"path": f"{OUTPUTS}/total"}}]}
    words = ["--made", f"{store}/{{{{inputs.parameters.name}}}}", "--number", "{{inputs.parameters.number}}"]
    toy = {
        "name": "toy",
        "inputs": {"parameters": [{"name": "name"}, {"name": "number"}]},
        "outputs": outputs,
        "container": {
            "image": "none",
            "command": ["python", "-m", "tuneloop.stages.toy"],
            "args": [*words, "--wait-s", str(wait_s)],
            "env": [{"name": "TUNELOOP_OUTPUTS", "value": OUTPUTS}],
        },
    }

    def task(name: str, number: str, **about: str) -> dict:
        given = [{"name": "name", "value": name}, {"name": "number", "value": number}]
        return {"name": name, "template": "toy", "arguments": {"parameters": given}, **about}

    second = "{{tasks.first.outputs.parameters.total}}"
    dag = {
        "name": "main",
        "outputs": {
            "parameters": [{"name": "total", "valueFrom": {"parameter": "{{tasks.second.outputs.parameters.total}}"}}]
        },
        "dag": {"tasks": [task("first", "1"), task("second", second, depends="first")]},
    }
    return {"metadata": {"name": "main"}, "spec": {"entrypoint": "main", "arguments": {}, "templates": [dag, toy]}}


def start(tmp_path: Path, wait_s: float = 0.0, *, text: str = "", **environment: str) -> subprocess.Popen:
    """The program, with a stage `tuneloop.stages.toy`; `text`: another graph than `graph`."""
    (tmp_path / "toy.py").write_text(STAGE)
    program = f"""
        import importlib.util, sys
        from importlib.machinery import SourceFileLoader
        spec = importlib.util.spec_from_loader("tuneloop.stages.toy", SourceFileLoader("tuneloop.stages.toy", {str(tmp_path / "toy.py")!r}))
        sys.modules["tuneloop.stages.toy"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["tuneloop.stages.toy"])
        from tuneloop.local.segment import main
        main()
    """  # noqa: E501
    env = {**os.environ, **environment, "SEEN": str(tmp_path / "seen"), "TUNELOOP_OUTPUTS": str(tmp_path / "outputs")}
    text = text or as_text(graph(tmp_path / "store", wait_s))
    command = [sys.executable, "-c", textwrap.dedent(program), "--graph", text]
    return subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)


def test_stages_run_in_one_process_and_hand_over_results(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.wait(LIMIT_S) == 0, process.stderr.read()
    assert (tmp_path / "outputs" / "total").read_text() == "3"
    assert (tmp_path / "seen").read_text().splitlines() == [f"{process.pid} 1", f"{process.pid} 2"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_stopped_pod_is_taken_over_by_the_next(tmp_path: Path, number: int, code: int) -> None:
    words = tmp_path / "words"
    words.touch()
    process = start(tmp_path, SECOND_S="600", TUNELOOP_TERMINATION_LOG=str(words))
    second = tmp_path / "store" / "second"
    seen = tmp_path / "seen"
    until(lambda: seen.exists() and len(seen.read_text().splitlines()) == 2, child=process)  # the second is at work
    process.send_signal(number)
    assert process.wait(LIMIT_S) == code
    assert (code != 75) or words.read_text() == "interrupted: segment: stopped by a signal", "a free end"
    assert not (second / "manifest.json").exists() and not (tmp_path / "outputs").exists()
    again = start(tmp_path)
    assert again.wait(LIMIT_S) == 0
    ran = [line.split()[1] for line in (tmp_path / "seen").read_text().splitlines()]
    assert ran == ["1", "2", "2"], "the first stage did not run again"


def test_a_stage_that_ends_well_after_sigterm_is_the_last(tmp_path: Path) -> None:
    process = start(tmp_path, wait_s=600, GO=str(tmp_path / "go"))
    until((tmp_path / "seen").exists, child=process)
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    assert process.wait(LIMIT_S) == 75
    assert (tmp_path / "store" / "first" / "manifest.json").exists()
    assert len((tmp_path / "seen").read_text().splitlines()) == 1


def single(*command: str) -> str:
    """A graph of one container, as text."""
    container = {"image": "none", "command": list(command)}
    templates = [{"name": "main", "container": container}]
    return json.dumps({"metadata": {"name": "main"}, "spec": {"entrypoint": "main", "templates": templates}})


def test_a_stage_that_can_not_be_imported_ends_the_pod(tmp_path: Path) -> None:
    process = start(tmp_path, text=single("python", "-m", "tuneloop.stages.nowhere"))
    try:
        assert process.wait(LIMIT_S) == 1
        assert "No module named 'tuneloop.stages.nowhere'" in process.stderr.read()
    finally:
        process.kill()


def test_sigterm_reaches_a_stage_in_a_process_of_its_own(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f"trap 'exit 75' TERM; touch {begun}; while sleep 0.05; do :; done"
    process = start(tmp_path, text=single("sh", "-c", script))
    try:
        until(begun.exists, child=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 75
    finally:
        process.kill()


def test_a_users_mistake_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no directory")
    words = tmp_path / "words"
    words.touch()
    process = start(tmp_path, TUNELOOP_TERMINATION_LOG=str(words))
    assert process.wait(LIMIT_S) == 2
    assert "error: store" in process.stderr.read()
    assert words.read_text().startswith("error: store"), "the pod's message is that of its stage"
