"""Real vLLM servers that follow published weights: what they hold, and what they do when something goes wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.local.test_vllm import ARGS, GREEDY, REQUESTS, Running, free_port, quiet
from tests.policies import commit_policy
from tuneloop import weights
from tuneloop.artifacts import Artifact, Draft
from tuneloop.canary import write_canary
from tuneloop.engines._client import Client
from tuneloop.generation import prove

pytestmark = pytest.mark.local


def follow(root: Path, *options: str) -> Running:
    """A server that follows `root`, once it serves."""
    port = free_port()
    line = [sys.executable, "-m", "tuneloop.serve", "--weights", str(root), "--host", "127.0.0.1", "--port", str(port)]
    line += ["--poll-interval", "0.1", "--engine-args", json.dumps(ARGS), *options]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    said = []
    for text in process.stderr or ():
        said.append(text)
        if "serve: version" in text:
            threading.Thread(target=(process.stderr or sys.stdin).read, daemon=True).start()
            running = Running(f"http://127.0.0.1:{port}", process)
            until(running, lambda served: served["version"] >= 0)
            return running
    raise AssertionError("".join(said))


def until(running: Running, done: Any, timeout_s: float = 30.0) -> dict[str, Any]:
    """What ``/version`` says once `done` of it is true."""
    deadline = time.monotonic() + timeout_s
    served: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            served = running.ask("GET", "/version")[1]
            if done(served):
                return served
        except ConnectionRefusedError:
            pass
        time.sleep(0.02)
    raise AssertionError(served)


def step(before: Artifact, url: Path, version: int) -> Artifact:
    """A checkpoint that follows `before` as an optimizer step would: a few per cent of the elements change."""
    from transformers import AutoModelForCausalLM

    draft = Draft(str(url))
    shutil.copytree(before.path / "model", draft.path / "model")
    path = draft.path / "model" / "model.safetensors"
    generator = torch.Generator().manual_seed(version)
    tensors = load_file(path)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=generator) < 0.03
        tensor[chosen] += 0.1 * tensor[chosen].sign() + 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    write_canary(AutoModelForCausalLM.from_pretrained(draft.path / "model"), draft.path / "canary.json")
    draft.commit(stage="policy_update", facts={"version": version})
    return Artifact(str(url))


def publish(root: Path, policy: Artifact) -> weights.Published:
    return weights.publish(
        str(root), policy.manifest.facts["version"], policy.path / "model", source=policy.manifest.digest
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """Eleven checkpoints, each a small step from the one before."""
    root = tmp_path_factory.mktemp("policies")
    made = [commit_policy(root / "v0", tied=request.param)]
    for version in range(1, 11):
        made.append(step(made[-1], root / f"v{version}", version))
    return made


@pytest.fixture(scope="module")
def served(chain: list[Artifact], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    root = tmp_path_factory.mktemp("weights")
    publish(root, chain[0])
    running = follow(root)
    yield running, root
    running.process.kill()
    running.process.wait()


def test_ten_updates_byte_for_byte(served: tuple[Running, Path], chain: list[Artifact]) -> None:
    """After each: all tensors that vLLM holds are those of the export, read back; and it computes with them."""
    running, root = served
    client = Client(running.url, 60)
    for policy in chain:
        version = policy.manifest.facts["version"]
        published = publish(root, policy)
        assert version == 0 or published.encoding == "gap8-xor"
        now = until(running, lambda said: said["pulled"].get("version") == version)  # noqa: B023
        assert now["digest"] == policy.manifest.digest and not now["trouble"]
        status, held = running.ask("POST", "/verify")
        count = len(load_file(policy.path / "model" / "model.safetensors"))
        assert (status, held) == (
            200, {"version": version, "tensors": count, "identical": count, "different": [], "unread": []}
        )  # fmt: skip
        assert now["pulled"]["identical"] == count and now["pulled"]["deltas"] == ([version] if version else [])
        client.load(policy)
        prove(client, policy, 0.05)
    assert {c.start_version for group in client.generate(REQUESTS, GREEDY, quiet) for c in group} == {10}
