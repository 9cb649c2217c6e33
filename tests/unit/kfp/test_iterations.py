"""The rollout server beside several iterations in one task, and what the task gives to their stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planned import plan_server
from tests.waiting import free_port
from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, Interrupted
from tuneloop.core.server_token import VARIABLE
from tuneloop.kfp import rollout_server
from tuneloop.kfp.io import Task
from tuneloop.kfp.iterations import build_values
from tuneloop.kfp.rollout_server import run_server
from tuneloop.local.iterations import Iterations, StageEnded
from tuneloop.workflow.pod_loop import PodLoop


@pytest.fixture
def pod() -> Iterations:
    return Iterations(PodLoop(steps=[], carry={}, reward=""), run="", last=1, per_pod=1, target=1.0)


def test_stages_get_urls_below_the_run() -> None:
    policy = {"artifacts": [{"metadata": {"ref": "s3://b/runs/r/sft@sha256:1"}}]}
    inputs = {"parameterValues": {"url": "s3://b/runs/r"}, "artifacts": {"policy": policy}}
    task = Task.read(json.dumps({"inputs": inputs, "outputs": {"outputFile": "x"}}))
    assert build_values(task, {}) == {"policy": "s3://b/runs/r/sft@sha256:1"}
    assert build_values(task, {"weights": "@run@/weights"})["weights"] == "s3://b/runs/r/weights"
    assert build_values(task, {"weights": "s3://b/w"})["weights"] == "s3://b/w"


def test_the_mistake_of_a_server_ends_the_task_with_its_exit_code(
    tmp_path: Path, pod: Iterations
) -> None:
    plan = plan_server("serve").model_copy(update={"port": free_port()})
    server = {"port": plan.port, "flags": plan.flags, "pull": False}
    with (
        pytest.raises(StageEnded) as ended,
        run_server(server, str(tmp_path), {"policy": f"{tmp_path}/nowhere"}, pod),
    ):
        pytest.fail("there is no such policy")
    assert ended.value.code == EXIT_USER and VARIABLE not in os.environ, "its token went with it"


def test_a_server_that_was_killed_is_started_again(pod: Iterations) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(StageEnded) as ended:
        rollout_server._await_ready(process, f"http://127.0.0.1:{free_port()}/health", pod)
    assert ended.value.code == EXIT_RETRY


def test_a_server_is_waited_for_until_it_answers_or_the_task_is_to_end(
    tmp_path: Path, pod: Iterations
) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "http.server",
        str(port),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path),
    ]
    with subprocess.Popen(command) as process:
        try:
            pod.stopped = True
            with pytest.raises(Interrupted, match="was not ready yet"):
                rollout_server._await_ready(process, f"http://127.0.0.1:{port}/health", pod)
            pod.stopped = False
            (tmp_path / "health").touch()
            rollout_server._await_ready(process, f"http://127.0.0.1:{port}/health", pod)
        finally:
            process.terminate()
