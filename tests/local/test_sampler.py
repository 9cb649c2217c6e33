"""Two sessions of a gateway on this machine sample from one vLLM server, which starts when the first one samples."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extensions.gateway.test_drain import DATUM, ask, fetch, serve
from tests.policies import commit_policy
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact
from tuneloop.inference.engines.transformers import Transformers

pytestmark = [pytest.mark.local, pytest.mark.slow]

CONFIG = """
worker: {idle: 3600}
sampler: {idle: 60, engine_args: {enforce_eager: true, dtype: float32}}
"""
PROMPT = [5, 6, 7, 8]


class Trained:
    """A session with a model of its own."""

    def __init__(self, gateway: SimpleNamespace, key: str, base: str) -> None:
        self.gateway = gateway
        self.id = gateway.http.post(
            "/v1/sessions", json={}, headers={"Idempotency-Key": key}
        ).json()["id"]
        self.model, self.number = f"{self.id}:train:0", 0
        self.result("create_model", session_id=self.id, base_model=base)

    def result(self, what: str, **body: Any) -> Any:
        answer = fetch(self.gateway, ask(self.gateway, what, **body)).json()
        assert "error" not in answer, answer
        return answer

    def numbered(self, what: str, **body: Any) -> Any:
        self.number += 1
        return self.result(what, model_id=self.model, seq_id=self.number, **body)

    def train(self, rate: float) -> None:
        given = {"data": [DATUM], "loss_fn": "cross_entropy"}
        self.numbered("forward_backward", forward_backward_input=given)
        self.numbered("optim_step", adam_params={"learning_rate": rate})

    def sampler(self, number: int) -> str:
        about = {"path": None, "sampling_session_seq_id": number}
        return str(self.numbered("save_weights_for_sampler", **about)["sampling_session_id"])

    def sample(self, sampler: str, number: int) -> tuple[list[int], list[float]]:
        params = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "stop": [0]}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        about = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1}
        (made,) = self.result("asample", prompt=prompt, sampling_params=params, **about)[
            "sequences"
        ]
        return made["tokens"], made["logprobs"]


def score(checkpoint: Artifact, ids: list[int]) -> list[float]:
    engine = Transformers()
    engine.load(checkpoint)
    return engine.score([*PROMPT, *ids])[len(PROMPT) - 1 :]


def test_sessions_share_a_sampler_that_is_started_when_needed_and_ends_with_the_gateway(
    tmp_path: Path,
) -> None:
    base = commit_policy(tmp_path / "base", 3).ref
    (config := tmp_path / "gateway.yaml").write_text(CONFIG)
    log = tmp_path / "gateway-logs" / "sampler.log"
    with serve(tmp_path, "--config", str(config)) as gateway:
        one, two = (Trained(gateway, key, base) for key in "ab")
        one.train(0.01)
        two.train(0.05)  # as many steps, so the versions have one number and two digests
        assert not log.exists(), "nobody has sampled"
        samplers = [each.sampler(1) for each in (one, two)]
        for number in (1, 2):  # by turns: each has its own weights loaded again
            made = [each.sample(sampler, number) for each, sampler in zip((one, two), samplers)]
            for each, (ids, logprobs) in zip((one, two), made):
                (url,) = tmp_path.glob(
                    f"store/sessions/local/{each.id.partition('.')[2]}/train-0/snapshots/*"
                )
                wanted = score(Artifact(str(url)), ids)
                assert logprobs == pytest.approx(wanted, abs=2e-3)
        assert made[0][1] != made[1][1]
        with ThreadPoolExecutor(
            2
        ) as pool:  # at the same time: neither is starved, nor sees the other's weights
            again = list(
                pool.map(
                    lambda each: [each[0].sample(each[1], n) for n in (3, 4, 5)],
                    zip((one, two), samplers),
                )
            )
        for each, first in zip(again, made):
            for ids, logprobs in each:
                assert ids == first[0] and logprobs == pytest.approx(first[1], abs=2e-3)
        address = f"--port\0{_find_port(tmp_path)}\0"
        (server,) = (
            path for path in Path("/proc").glob("[0-9]*/cmdline") if address in _read(path)
        )
        gateway.process.terminate()
        gateway.process.wait(LIMIT_S)
    until(lambda: not _read(server))
    assert not list(tmp_path.glob("store/sessions/local/*/train-0/snapshots/*"))


def _find_port(home: Path) -> str:
    return (
        (home / "gateway-logs" / "sampler.log")
        .read_text()
        .partition("http://127.0.0.1:")[2]
        .split()[0]
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
