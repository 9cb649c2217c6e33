"""Several rollout servers of one run, as one engine.

A prompt belongs to one server, by its place in the first batch: its completions and later turns of its episodes find
its tokens in that server's prefix cache. Seeds belong to requests, not to servers. A lost server is not used again
until the engine is closed; the others get its unfinished requests. Only the last remaining server is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Retryable
from tuneloop.core.http import POLL_S
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Done, Engine, Sampling
from tuneloop.inference.engines._client import Client, Finished


class Replicas:
    """`Remote` over servers that are all brought to the same version. `replicas`: URL → the ``requests`` that a replica
    finished and, if it was ``lost``, why. `pulled`: `Client.pulled` of the replica that served the version last."""

    name = "vllm"

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients
        self.live = list(clients)
        self.context = 0
        self.version = -1
        self.digest = ""
        self.replicas: dict[str, JsonObject] = {
            client.endpoint: {"requests": 0} for client in clients
        }
        self.pulled: JsonObject = {}
        self.check: Callable[[], None] = lambda: None
        self.prove: Callable[[Engine], None] = lambda _: None
        self._places: dict[str, int] = {}
        for client in clients:
            client.check = lambda: self.check()
            client.prove = lambda one: self.prove(one)

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        self.call_each(lambda client: client.load(policy, force=force))
        self.version, self.digest = self.live[0].version, self.live[0].digest
        self.context = min(client.context for client in self.live)
        self.pulled = max(
            (client.pulled for client in self.live),
            key=lambda about: float(about.get("served_at", 0)),
        )

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        results: Finished = {}
        while left := {i: request for i, request in enumerate(requests) if i not in results}:
            self._share_out(left, sampling, results, done)
        return [results[i] for i in range(len(requests))]

    def score(self, ids: Sequence[int]) -> list[float]:
        """Score as `Engine.score` does, by every replica; the first answer counts."""
        scored: list[list[float]] = []
        self.call_each(lambda client: scored.append(client.score(ids)))
        return scored[0]

    def close(self) -> None:
        """Do nothing: connections live only as long as a call."""

    def call_each(
        self, work: Callable[[Client], object], poll: Callable[[], None] = lambda: None
    ) -> None:
        """Call `work` on all replicas at the same time; a replica that is lost meanwhile is left out from then on. An
        error of `poll` ends the wait. Raises Retryable if all are lost and the last one did not come back."""
        pending = list(self.live)
        while pending:
            for client in pending:
                client.fail_fast = len(self.live) > 1
            with ThreadPoolExecutor(len(pending)) as pool:
                futures = {client: pool.submit(work, client) for client in pending}
                while wait(futures.values(), POLL_S).not_done:
                    poll()
            poll()
            pending = []
            for client, future in futures.items():
                try:
                    future.result()
                except Retryable as error:
                    if isinstance(error, Interrupted) or not client.fail_fast:
                        raise
                    if len(self.live) > 1:
                        self.live.remove(client)
                        self.replicas[client.endpoint]["lost"] = str(error.__cause__ or error)
                    else:
                        pending = [client]  # wait for the last replica

    def _share_out(
        self, requests: Mapping[int, Request], sampling: Sampling, results: Finished, done: Done
    ) -> None:
        """Generate `requests` on the replicas that are not lost, and add what they finish to `results`."""
        shares: dict[Client, dict[int, Request]] = {client: {} for client in self.live}
        made: dict[Client, Finished] = {client: {} for client in self.live}
        for i, request in requests.items():
            shares[self._find_replica(request)][i] = request
        self.call_each(
            lambda client: client.generate_into(
                shares[client], sampling, made[client], lambda _: None
            ),
            lambda: done(len(results) + sum(map(len, made.values()))),
        )
        for client, finished in made.items():
            self.replicas[client.endpoint]["requests"] += len(finished)
            results |= finished

    def _find_replica(self, request: Request) -> Client:
        group = request.id.rpartition("-s")[0]  # of a later turn
        place = self._places.setdefault(
            group if group in self._places else request.id, len(self._places)
        )
        turn, index = divmod(place, len(self.clients))
        own = self.clients[index]
        return own if own in self.live else self.live[turn % len(self.live)]
