"""The vLLM server that the sessions of a namespace share.

It is started when one of them first samples, and scaled to zero when none has sampled for a while.
A session is one client's training at the gateway, with weights of its own. Before it samples for a
session, the server loads that session's weights. `prove_weights` then compares what it computes
with what the trainer recorded for a fixed text (the canary of the checkpoint).

`SharedSampler` is used in each worker, by its session; `SamplerUse` in the gateway, which alone may
scale the Deployment.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway.resident import Snapshot
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Engine, Sampling
from tuneloop.inference.engines._client import Client
from tuneloop.inference.proof import prove_weights
from tuneloop.inference.refusals import Refused

START_S = 900.0
"""Seconds that a request waits for the server (quota, a node, its image), and for it to load
weights."""
KEEP_S = 10.0
"""Seconds for which weights that one session has loaded are reserved for its request: a load of
another session waits so long, or until they have been sampled from. At most 60 (`load` of
`inference/http_api.py`). docs/sharing.md states it. It does not stop an idle server; `SamplerUse`
does."""
LOOK_S = 10.0
"""Seconds between two attempts to start a used server, and the most seconds between two checks
whether a server is still used."""
log = logging.getLogger("tuneloop.extensions.gateway")
Result = TypeVar("Result")


class SharedSampler:
    """Samples as `resident.Sampler` does, at the server `url`.

    A snapshot is a session's weights at one step. Here each is a checkpoint in the store
    (`Snapshot.base`), as the server fetches it from there.

    The server refuses a request if another session has loaded other weights since; the client then
    loads the snapshot's weights again, and verifies them.
    """

    def __init__(self, url: str, check: Callable[[], None]) -> None:
        """Use the server at `url`; `check` is called while a request waits, and an error of it ends
        the request.
        """
        self._client = Client(url, START_S, patience_s=START_S)
        self._client.check = check
        self._client.keep_s = KEEP_S

    def sample(
        self,
        snapshot: Snapshot,
        requests: Sequence[Request],
        sampling: Sampling,
    ) -> list[list[Completion]]:
        def generate() -> list[list[Completion]]:
            return self._client.generate(requests, sampling, lambda _: None)

        return self._ask(snapshot, generate)

    def score(self, snapshot: Snapshot, ids: Sequence[int]) -> list[float]:
        return self._ask(snapshot, lambda: self._client.score(ids))

    def drop(self) -> None:
        """Do nothing: this process has no weights."""

    def _ask(self, snapshot: Snapshot, request: Callable[[], Result]) -> Result:
        def prove(engine: Engine) -> None:
            prove_weights(engine, snapshot.base)

        # The client loads and proves again by itself, when the server was lost or has other weights.
        self._client.prove = prove
        try:
            self._client.load(snapshot.base)
            prove(self._client)
            return request()
        except UserError as error:
            problem = f"the sampler that sessions share cannot sample {snapshot.base.url}"
            raise Refused(400, f"{problem}: {error}") from error


@dataclass
class _Use:
    """A namespace's use of its sampler.

    Attributes:
        used: when it was last used, by `time.monotonic`.
        up: whether it may be running, so that it has to be scaled to 0 when it is idle.
        tried: when it was last attempted to start it.
        failure: the error of that attempt.
    """

    used: float = field(default_factory=time.monotonic)
    up: bool = True
    tried: float = -LOOK_S
    failure: Exception | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class SamplerUse:
    """The samplers of namespaces, which run while they are used."""

    def __init__(
        self,
        scale: Callable[[str, int], None],
        namespaces: Iterable[str],
        idle_s: float,
    ) -> None:
        """Scale samplers by `scale`, which gets a namespace and the number of replicas: 1 when its
        sampler is used, 0 after `idle_s` seconds.
        """
        self._scale = scale
        self._idle_s = idle_s
        # An earlier process of the gateway may have started them.
        self._uses = {namespace: _Use() for namespace in namespaces}
        threading.Thread(target=self._watch, name="sampler", daemon=True).start()

    def start(self, namespace: str) -> None:
        """Record that the sampler of a namespace is used, and scale it to 1 if that was not done in
        the last `LOOK_S` seconds; if it runs, that changes nothing.

        Raises as `scale`; for `LOOK_S` seconds after a failure, the same error is raised without
        another attempt.
        """
        use = self._uses.setdefault(namespace, _Use())
        with use.lock:
            use.used = time.monotonic()
            use.up = True
            if use.used - use.tried >= LOOK_S:
                use.tried = use.used
                use.failure = None
                try:
                    self._scale(namespace, 1)
                except Exception as error:
                    use.failure = error
            if use.failure:
                raise use.failure

    def renew(self, namespace: str) -> None:
        """Record that a request still waits for the sampler of a namespace: `app.py: forward` calls
        it whenever a caller asks for the result.
        """
        self._uses.setdefault(namespace, _Use()).used = time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._idle_s / 4))
            for namespace, use in list(self._uses.items()):
                with use.lock:
                    if use.up and time.monotonic() - use.used > self._idle_s:
                        self._stop(namespace, use)

    def _stop(self, namespace: str, use: _Use) -> None:
        try:
            self._scale(namespace, 0)
            # The next request starts it at once.
            use.tried = -LOOK_S
            use.up = False
        except Exception as error:
            log.warning("the sampler of %s could not be scaled to 0: %s", namespace, error)
            # It counts as used, so the next attempt is after another pause.
            use.used = time.monotonic()
