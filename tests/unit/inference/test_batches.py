"""Who shares a batch of the engine, by an engine that says digits."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tests.unit.inference.rollout_server import Digits
from tests.waiting import LIMIT_S
from tuneloop.core.errors import Retryable
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.vllm import Vllm


class Watched(Digits):
    """Remembers what was running when a batch began, and the tickets of what was queued beside others'."""

    def __init__(self, deterministic: bool) -> None:
        super().__init__({})
        self.deterministic, self.duration_s = deterministic, 0.05
        self.found: list[int] = []
        self.shared = False

    def begin_batch(self) -> None:
        self.found.append(len(self.running))

    def submit(
        self, key: str, prompt_ids: Sequence[int], seed: int, sampling: Sampling, **_: bool
    ) -> None:
        self.shared |= {each.partition("-")[0] for each in self.running} not in (
            set(),
            {key.partition("-")[0]},
        )
        super().submit(key, prompt_ids, seed, sampling)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_engine_has_one_callers_requests_at_a_time(deterministic: bool) -> None:
    engine, over, made = Watched(deterministic), threading.Event(), []

    def emit(index: int, said: object) -> None:
        made.append((index, said))
        if len(made) == 4 * 3:
            over.set()

    loop = EngineLoop(engine)
    requests = [Request(str(i), [1, 2], [7, 8]) for i in range(3)]
    asked = [loop.call(loop.generate, requests, Sampling(), 0, None, emit) for _ in range(4)]
    loop.start()
    try:
        assert over.wait(LIMIT_S)
    finally:
        loop.stop()
        loop.join(LIMIT_S)
    assert sorted(index for index, _ in made) == [0] * 4 + [1] * 4 + [2] * 4
    assert len({each.result().number for each in asked}) == 4
    assert engine.found == ([0, 0, 0, 0] if deterministic else [0, 6, 12, 18])
    assert engine.shared is not deterministic


class Fallible(Digits):
    """Fails, as an engine does that loses a worker, at prompts that begin with 9."""

    def submit(
        self, key: str, prompt_ids: Sequence[int], seed: int, sampling: Sampling, **_: bool
    ) -> None:
        if prompt_ids[0] == 9:
            raise RuntimeError("a worker is gone")
        super().submit(key, prompt_ids, seed, sampling)


def test_an_engine_that_fails_at_a_request_keeps_none_of_its_ticket() -> None:
    """What it kept would end later, when nobody waits for it, and end the server."""
    engine = Fallible({})
    ended = threading.Event()
    loop = EngineLoop(engine)
    failing = [Request("a", [1], [7]), Request("b", [9], [7])]
    refused = loop.call(loop.generate, failing, Sampling(), 0, None, lambda *_: None)
    answered = loop.call(
        loop.generate, failing[:1], Sampling(), 0, None, lambda index, answer: ended.set()
    )
    loop.start()
    try:
        assert ended.wait(LIMIT_S)
    finally:
        loop.stop()
        loop.join(LIMIT_S)
    assert isinstance(refused.exception(), RuntimeError)
    assert answered.result().number == 1
    assert loop.broken == ""


class Ending(Vllm):
    """vLLM's class over an engine whose requests all end at once, for `reason`."""

    def __init__(self, reason: str, ids: list[int]) -> None:
        super().__init__({})
        self.version = 3
        self.keys: list[str] = []
        logprobs = SimpleNamespace(logprobs=[-0.5 for _ in ids])
        sample = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)

        def step() -> list[SimpleNamespace]:
            outputs: list[SimpleNamespace] = []
            for key in self.keys:
                fields = {"finished": True, "outputs": [sample], "prompt_logprobs": None}
                outputs.append(SimpleNamespace(request_id=key, **fields))
            return outputs

        self.engine = SimpleNamespace(step=step, abort_request=lambda keys: None)

    def submit(
        self, key: str, prompt_ids: Sequence[int], seed: int, sampling: Sampling, **_: bool
    ) -> None:
        self.keys.append(key)


@pytest.mark.parametrize("ids", [[], [5, 6]])
@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_request_that_vllm_gives_up_is_aborted_and_harms_no_other(
    reason: str, ids: list[int]
) -> None:
    engine = Ending(reason, ids)
    engine.submit("0-0-0", [1], 0, Sampling())
    ((key, completion),) = engine.step()
    assert key == "0-0-0"
    assert completion.ids == ids
    assert completion.finish_reason == "abort"
    assert completion.start_version == completion.end_version == 3
    with pytest.raises(Retryable, match="has given up a request"):
        Ending(reason, ids).generate([Request("a", [1], [7])], Sampling(), lambda done: None)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_other_ends_stay_as_vllm_says_them(reason: str) -> None:
    ((completion,),) = Ending(reason, [5]).generate(
        [Request("a", [1], [7])], Sampling(), lambda done: None
    )
    assert completion.finish_reason == reason
