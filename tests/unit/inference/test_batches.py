"""Who shares a batch of the engine, by an engine that says digits."""

import threading
from collections.abc import Sequence

import pytest

from tests.unit.inference.rollout_server import Digits
from tests.waiting import LIMIT_S
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines import Sampling


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
