"""The vLLM server that the sessions of a namespace share: it is started when one of them first samples, has the weights
that the request at hand needs, each proved by its canary, and is given back when nobody has sampled for a while."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from tuneloop.core.errors import Retryable
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.gateway.resident import Snapshot
from tuneloop.inference.engines import Engine, Sampling
from tuneloop.inference.engines._client import Client
from tuneloop.inference.generate import prove_weights
from tuneloop.inference.refusals import Refused

PORT = 8000
START_S = 900.0
"""Seconds that a request waits for the server: for quota, a node, its image, and the engine's start."""
SILENT_S = 300.0
"""Seconds without a byte after which it counts as lost."""
TOLERANCE = 0.05
"""Nats by which its log-probabilities of the canary may differ from the trainer's."""
LOOK_S = 10.0
"""Seconds between two looks at whether it runs, while it is used, and at whether it is used."""
log = logging.getLogger("tuneloop.gateway")


class SharedSampler:
    """Samples as `resident.Sampler` does, from snapshots that are checkpoints, at the server `url`. Where another
    session has it load other weights in between, it refuses the request, and this loads its own again."""

    def __init__(self, url: str) -> None:
        self._client = Client(url, SILENT_S, patience_s=START_S)

    def sample(self, snapshot: Snapshot, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._load(snapshot)
        return self._client.generate(requests, sampling, lambda _: None)

    def score(self, snapshot: Snapshot, ids: Sequence[int]) -> list[float]:
        self._load(snapshot)
        return self._client.score(ids)

    def drop(self) -> None:
        """Do nothing: this process has no weights."""

    def _load(self, snapshot: Snapshot) -> None:
        def prove(engine: Engine) -> None:
            prove_weights(engine, snapshot.base, TOLERANCE)

        self._client.prove = prove  # where the server is lost, or had other weights in between
        self._client.load(snapshot.base)
        prove(self._client)


class SamplerUse:
    """When the namespaces last used their samplers. `scale` is given a namespace, and the replicas that its sampler is
    to have: 1 once it is used, 0 after `idle_s` seconds."""

    def __init__(self, scale: Callable[[str, int], None], namespaces: Iterable[str], idle_s: float) -> None:
        self._scale, self._idle_s, self._lock = scale, idle_s, threading.Lock()
        self._used = dict.fromkeys(namespaces, time.monotonic())  # a gateway before this one may have started them
        self._started: dict[str, float] = {}
        threading.Thread(target=self._watch, name="sampler", daemon=True).start()

    def note(self, namespace: str) -> None:
        """Note that the sampler of a namespace is used, and start it unless it runs. Raises as `scale`."""
        with self._lock:
            self._used[namespace] = now = time.monotonic()
            if now - self._started.get(namespace, -LOOK_S) >= LOOK_S:
                self._scale(namespace, 1)
                self._started[namespace] = now

    def _watch(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._idle_s / 4))
            with self._lock:
                for namespace in [n for n, used in self._used.items() if time.monotonic() - used > self._idle_s]:
                    try:
                        self._scale(namespace, 0)
                        self._started.pop(namespace, None)
                        del self._used[namespace]
                    except (Refused, Retryable) as error:
                        log.warning("the sampler of %s is not given back: %s", namespace, error)
                        self._used[namespace] = time.monotonic()
