"""A follower outlives what goes wrong with it, and says so. What it does else is in tests/local/test_pull.py."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.making import checkpoint_artifact
from tuneloop import weights
from tuneloop.engines._follow import Follower
from tuneloop.engines._loop import EngineLoop
from tuneloop.engines.vllm import Vllm


def test_whatever_goes_wrong_is_told_and_tried_again(tmp_path: Path) -> None:
    model = checkpoint_artifact(tmp_path / "policy", "qwen3").path / "model"
    weights.publish(str(tmp_path / "weights"), 1, model)
    (tmp_path / "taken").write_text("a file where the directory should be")
    follower = Follower(EngineLoop(Vllm({})), str(tmp_path / "weights"), tmp_path / "taken", poll_s=0.01)
    follower.start()
    deadline = time.monotonic() + 30
    while not follower.trouble and follower.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert follower.is_alive() and "File exists" in follower.trouble
    follower.stop()
    follower.join(10)


def test_a_server_that_waits_for_a_version_ends_when_told_to(tmp_path: Path) -> None:
    """As the first process of a container it would else ignore SIGTERM until it is killed."""
    line = [sys.executable, "-m", "tuneloop.serve", "--weights", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert "waits for a version" in (process.stderr or sys.stdin).readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
