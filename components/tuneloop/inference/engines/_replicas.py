"""Several rollout servers of one run, as one engine.

A prompt belongs to one server, by its place in the first batch: its completions and later turns of
its episodes find its tokens in that server's prefix cache. Seeds belong to requests, not to
servers. A lost server is not used again until the engine is closed; the others get its unfinished
requests. Only the last remaining server is waited for.

`inference/served.py` opens it where an endpoint has several URLs. `inference/generate.py` proves
each replica by itself, by `call_each`: one that is lost is proved no more.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Interrupted, Retryable
from tuneloop.core.http import POLL_S
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Done, Engine, EngineReport, Sampling
from tuneloop.inference.engines._client import Client, Finished


class Replicas:
    """`Remote` over servers that are all brought to the same version.

    Attributes:
        live: the clients of servers that are not lost.
        replicas: URL → the ``requests`` that it finished and, if it was ``lost``, why.
        pulled: `Client.pulled` of the replica that served the version last.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self.name = clients[0].name
        self.clients = clients
        self.live = list(clients)
        self.context = 0
        self.version = -1
        self.digest = ""
        self.replicas: dict[str, JsonObject] = {}
        self.pulled: JsonObject = {}
        self.check: Callable[[], None] = lambda: None
        self.prove: Callable[[Engine], None] = lambda _: None
        self._numbers: dict[str, int] = {}
        for client in clients:
            self.replicas[client.endpoint] = {"requests": 0}
            # The stage sets both hooks after the engine was opened.
            client.check = lambda: self.check()
            client.prove = lambda process: self.prove(process)

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        self.call_each(lambda client: client.load(policy, force=force))
        self.name = self.live[0].name
        self.version = self.live[0].version
        self.digest = self.live[0].digest
        self.context = min(client.context for client in self.live)
        pulls = [client.pulled for client in self.live]
        self.pulled = max(pulls, key=lambda pull: float(pull.get("served_at", 0)))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
    ) -> list[list[Completion]]:
        results: Finished = {}
        missing = dict(enumerate(requests))
        # What a lost replica has left is divided among the others.
        while missing:
            self._generate_shares(missing, sampling, results, done)
            for index in results:
                missing.pop(index, None)
        return [results[index] for index in range(len(requests))]

    def score(self, ids: Sequence[int]) -> list[float]:
        """Score as `Engine.score` does, by every replica; the first answer counts."""
        scores: list[list[float]] = []
        self.call_each(lambda client: scores.append(client.score(ids)))
        return scores[0]

    def report(self) -> EngineReport:
        return EngineReport(pulled=self.pulled, replicas=self.replicas)

    def close(self) -> None:
        """Do nothing: connections live only as long as a call."""

    def call_each(
        self,
        work: Callable[[Client], object],
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `work` on all replicas at the same time.

        A replica that is lost meanwhile is left out from then on. `poll` is called during the wait,
        and an error of it ends the wait.

        Raises:
            Retryable: all replicas are lost, and the last one did not come back.
        """
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
                    # An interrupt is no loss, and the last replica was waited for already.
                    if isinstance(error, Interrupted) or not client.fail_fast:
                        raise
                    if len(self.live) == 1:
                        # It was not waited for, as others were live when it was called.
                        pending = [client]
                        continue
                    self.live.remove(client)
                    cause = error.__cause__ or error
                    self.replicas[client.endpoint]["lost"] = str(cause)

    def _generate_shares(
        self,
        requests: Mapping[int, Request],
        sampling: Sampling,
        results: Finished,
        done: Done,
    ) -> None:
        """Generate `requests` on the live replicas, and add what they finish to `results`."""
        shares: dict[Client, dict[int, Request]] = {}
        parts: dict[Client, Finished] = {}
        for client in self.live:
            shares[client] = {}
            parts[client] = {}
        for index, request in requests.items():
            replica = self._find_replica(request)
            shares[replica][index] = request

        def generate_share(client: Client) -> None:
            client.generate_into(shares[client], sampling, parts[client], lambda _: None)

        # Clients run on threads of their own, so the counts are summed up here.
        def report_progress() -> None:
            finished = sum(len(part) for part in parts.values())
            done(len(results) + finished)

        self.call_each(generate_share, report_progress)
        for client, part in parts.items():
            self.replicas[client.endpoint]["requests"] += len(part)
            results.update(part)

    def _find_replica(self, request: Request) -> Client:
        """Find the live replica of a request: its own, or the one that stands in for it."""
        # A later turn of an episode has the name of its group and the number of its sample, as
        # `formats/rollouts.py: request_id` writes it.
        group = request.id.rpartition("-s")[0]
        name = group if group in self._numbers else request.id
        number = self._numbers.setdefault(name, len(self._numbers))
        cycle, index = divmod(number, len(self.clients))
        replica = self.clients[index]
        if replica in self.live:
            return replica
        # The prompts of a lost replica are spread over all others.
        return self.live[cycle % len(self.live)]
