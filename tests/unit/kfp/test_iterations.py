"""The rollout server beside several iterations in one task."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import free_port
from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, Interrupted
from tuneloop.core.server_token import VARIABLE
from tuneloop.kfp import iterations
from tuneloop.kfp.iterations import run_server
from tuneloop.local.iterations import Iterations, StageEnded
from tuneloop.workflow.pod_loop import PodLoop


@pytest.fixture
def pod() -> Iterations:
    return Iterations(PodLoop(steps=[], carry={}, reward=""), run="", last=1, per_pod=1, target=1.0)


def test_the_mistake_of_a_server_ends_the_task_with_its_exit_code(
    tmp_path: Path, pod: Iterations
) -> None:
    server = {"port": free_port(), "engine_args": {}, "pull": False}
    with (
        pytest.raises(StageEnded) as ended,
        run_server(server, str(tmp_path), {"policy": f"{tmp_path}/nowhere"}, pod),
    ):
        pytest.fail("there is no such policy")
    assert ended.value.code == EXIT_USER and VARIABLE not in os.environ, "its token went with it"


def test_a_server_that_was_killed_is_started_again(pod: Iterations) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with pytest.raises(StageEnded) as ended:
        iterations._await_ready(process, f"http://127.0.0.1:{free_port()}/health", pod)
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
                iterations._await_ready(process, f"http://127.0.0.1:{port}/health", pod)
            pod.stopped = False
            (tmp_path / "health").touch()
            iterations._await_ready(process, f"http://127.0.0.1:{port}/health", pod)
        finally:
            process.terminate()
