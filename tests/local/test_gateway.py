"""A session on this machine: Tinker's own client teaches a policy something, and what docs/sharing.md shows runs."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tinker

from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]

DOCS = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text().partition("## Gateway")[2]
GOAL = 7
"""The token that is rewarded."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    home = tmp_path_factory.mktemp("gateway")
    checkpoint_artifact(home / "runs/mine/sft")
    command = [sys.executable, "-m", "tuneloop.cli", "gateway", "--local", "--store", "runs"]
    command += ["--port", "0", "--token-file", "token"]
    process = subprocess.Popen(command, cwd=home, stderr=subprocess.PIPE, text=True)
    url = re.search(r"http://\S+", process.stderr.readline())[0]
    token = (home / "token").read_text().strip()
    yield SimpleNamespace(home=home, url=url, token=token)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def test_a_loop_through_the_primitives_learns(gateway: SimpleNamespace) -> None:
    """Policy gradient by hand: more of one token. Then a second model goes on from what the first one saved."""
    service = tinker.ServiceClient(base_url=gateway.url, api_key=gateway.token)
    model = service.create_lora_training_client(base_model="runs/mine/sft", rank=0).result()
    rewards = []
    for step in range(12):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = {
            prompt: tinker.SamplingParams(max_tokens=6, stop=[], seed=10 * step + prompt)
            for prompt in (3, 4, 5, 6)
        }
        asked = [
            sampler.sample(tinker.ModelInput.from_ints([prompt]), 8, params[prompt])
            for prompt in params
        ]
        samples = [
            (prompt, each)
            for prompt, future in zip((3, 4, 5, 6), asked)
            for each in future.result().sequences
        ]
        scores = np.array([np.mean(np.array(each.tokens) == GOAL) for _, each in samples])
        rewards.append(scores.mean())
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints([prompt, *each.tokens[:-1]]),
                loss_fn_inputs={
                    "target_tokens": each.tokens,
                    "logprobs": each.logprobs,
                    "advantages": [score - scores.mean()] * len(each.tokens),
                },
            )
            for (prompt, each), score in zip(samples, scores.tolist())
        ]
        gradient = model.forward_backward(data, "importance_sampling")
        taken = model.optim_step(tinker.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        gradient.result(), taken.result()
    assert rewards[0] < 0.2 and rewards[-1] > 0.8, rewards

    path = model.save_state("learned").result().path
    other = service.create_training_client_from_state_with_optimizer(path).result()
    for each in (model, other):
        (
            each.forward_backward(data, "ppo").result(),
            each.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(),
        )
    after = [each.forward(data, "ppo").result().loss_fn_outputs for each in (model, other)]
    assert all(a["logprobs"].tolist() == b["logprobs"].tolist() for a, b in zip(*after))
    session = service.holder.get_session_id().partition(".")[2]
    saved = Artifact(str(gateway.home / f"runs/sessions/local/{session}/train-0/weights/learned"))
    assert saved.manifest.facts["version"] == 12 and saved.path
    service.close("success").result()


def test_what_the_page_shows_runs(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = DOCS.split("```")[1::2]
    monkeypatch.setenv("TINKER_BASE_URL", gateway.url)
    monkeypatch.setenv("TINKER_API_KEY", gateway.token)
    exec(next(block for block in blocks if block.startswith("python\n")).removeprefix("python"), {})
    said = capsys.readouterr().out
    assert "loss:sum" in said and ":train:0/weights/first" in said
    lines = next(block for block in blocks if "curl" in block)
    env = {
        **os.environ,
        "URL": gateway.url,
        "TOKEN": gateway.token,
        "BASE": str(gateway.home / "runs/mine/sft"),
    }
    done = subprocess.run(
        ["bash", "-eu"], input=lines, env=env, capture_output=True, text=True, timeout=10 * LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(re.search(r'{"sequences".*"weight_version":\d+}', done.stdout)[0])
    assert len(answer["sequences"][0]["tokens"]) <= 4 and answer["weight_version"] == 0
