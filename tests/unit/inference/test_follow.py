"""A follower outlives what goes wrong with it, and says so. What it does else is in tests/local/test_pull.py."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S, until
from tuneloop.inference import follower as follower_module
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines._readback import Readback
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.follower import Follower, prove_tensors
from tuneloop.inference.http_api import HttpApi
from tuneloop.weights.publish import publish_version


def test_whatever_goes_wrong_is_told_and_tried_again(tmp_path: Path) -> None:
    model = checkpoint_artifact(tmp_path / "policy", "qwen3").path / "model"
    publish_version(str(tmp_path / "weights"), 1, model)
    (tmp_path / "taken").write_text("a file where the directory should be")
    follower = Follower(
        EngineLoop(Vllm({})), str(tmp_path / "weights"), tmp_path / "taken", 0.01, "wait", None
    )
    follower.start()
    until(lambda: follower.trouble or not follower.is_alive())
    assert follower.is_alive() and "File exists" in follower.trouble
    follower.stop()
    follower.join(LIMIT_S)


def test_a_version_is_reported_once_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asked during the verification would otherwise record no pull."""
    publish_version(
        str(tmp_path / "weights"),
        1,
        checkpoint_artifact(tmp_path / "policy", "qwen3").path / "model",
    )
    engine = Vllm({})

    def change(model: Path, version: int, digest: str) -> None:
        engine.version, engine.digest = version, digest

    def prove(*_: object) -> Readback:
        seen.append(api.served())
        return Readback(2, 2, [], [])

    loop, seen = EngineLoop(engine), list[dict[str, Any]]()
    monkeypatch.setattr(engine, "change", change)
    monkeypatch.setattr(follower_module, "prove_tensors", prove)
    api = HttpApi(
        loop,
        follower := Follower(loop, str(tmp_path / "weights"), tmp_path / "at", 0.01, "wait", None),
    )
    worker = threading.Thread(target=loop.run)
    worker.start()
    try:
        follower._look()
    finally:
        loop.stop()
        worker.join(LIMIT_S)
    assert [(each["version"], each["digest"], each["pulled"]) for each in seen] == [(-1, "", {})]
    assert (api.served()["version"], api.served()["pulled"]["version"]) == (1, 1)


def test_a_server_that_waits_for_a_version_ends_when_told_to(tmp_path: Path) -> None:
    """As the first process of a container it would else ignore SIGTERM until it is killed."""
    line = [
        sys.executable,
        "-m",
        "tuneloop.inference.server",
        "--weights",
        str(tmp_path),
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert "waits for a version" in (process.stderr or sys.stdin).readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


def test_what_can_not_be_read_back_is_not_served(tmp_path: Path) -> None:
    """vLLM's worker is a plain module here: one tensor right, one wrong, one that it keeps in no known form."""
    held = torch.nn.ModuleDict(
        {name: torch.nn.Linear(3, 2, bias=False) for name in ("right", "wrong")}
    )
    files = {f"{name}.weight": part.weight.detach().clone() for name, part in held.items()}
    worker = SimpleNamespace(get_model=lambda: held)
    engine = Vllm({})
    engine.engine = SimpleNamespace(collective_rpc=lambda work, args: [work(worker, *args)])
    path = tmp_path / "model.safetensors"
    save_file(files, path)
    assert prove_tensors(engine, tmp_path).identical == 2
    files["wrong.weight"][1, 2] += 1
    save_file(files, path)
    with pytest.raises(RuntimeError, match=r"1 of 2 tensors differ, wrong\.weight among them"):
        prove_tensors(engine, tmp_path)
    files["wrong.weight"][1, 2] -= 1
    save_file(
        {"right.weight": files["right.weight"], "experts.weight": files["wrong.weight"]}, path
    )
    with pytest.raises(
        RuntimeError, match=r"1 of 2 tensors cannot be read back from this engine, experts\.weight"
    ):
        prove_tensors(engine, tmp_path)
