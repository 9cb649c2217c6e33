"""What a rollout server asks of the engine that it serves, and the client of such servers.

An engine that serves has two sides. ``open_served_engine(args)`` of its module makes what a server
(`tuneloop.inference.server`) computes with, a `ServedEngine`. ``open_engine(endpoint, args,
timeout_s)`` makes what a stage samples with, for which `open_client` is enough.

Servers use `ServedEngine`, stages `Engine` (`inference/engines/__init__.py`): one class may be
both, as vLLM's is. ``docs/extending.md`` has a whole third party's engine with servers, which
`tests/local/test_served.py` runs.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.rollouts import Completion
from tuneloop.inference.engines import Engine, Sampling, TensorProof
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines._replicas import Replicas
from tuneloop.inference.engines._tensors import Readback

PROBE = 16
"""After each change, one column in so many is read back from the layers that an engine packs, as
reading all columns takes long (`inference/http_api.py`, `inference/follower.py`,
`inference/engines/vllm.py`). ``POST /verify`` reads all. ``docs/weights.md`` says sixteen.
"""


@dataclass(frozen=True)
class Tokens:
    """The newest tokens of a request that is streamed, and the version that made them.

    `inference/http_api.py` sends its fields as they are; `Piece` of `inference/engines/endpoint.py`
    reads them.
    """

    ids: list[int]
    logprobs: list[float]
    version: int


Answer = Completion | Tokens
"""What a step yields for a request: its completion at the end, or new tokens that it streams."""


class ServedEngine(Protocol):
    """The engine in a server, which continues requests of several callers at once.

    `tuneloop.inference.engine_loop` calls it from one thread; only `count_requests` and the
    attributes are read by others. A class that extends this one inherits what an engine without
    streaming, sleep and prefix cache answers. `Vllm` of `inference/engines/vllm.py` does not extend
    it: a method that is added here with a default has to be added there, too. A method without a
    default breaks every third party's engine.

    Attributes:
        name: stands in the manifests of what was sampled.
        context: maximum tokens of a prompt with its completion; 0 while no weights are loaded.
        version: of the weights that are served; -1 while there are none.
        digest: of their checkpoint; empty while there are none.
        deterministic: it takes one batch at a time: `begin_batch` is called when no request runs.
        determinism: of a deterministic engine with weights, what decides the bits; else empty.
        files: the model directory that was loaded last.
        tensor_proof: what reading back said after the last change. The server sets it, the engine
            unsets it when its weights change or go.
    """

    name: str
    context: int = 0
    version: int = -1
    digest: str = ""
    deterministic: bool = False
    determinism: JsonObject
    files: Path | None = None
    tensor_proof: TensorProof | None = None

    @property
    def is_suspended(self) -> bool:
        """Whether its processes are stopped while it sleeps, so that nothing can be loaded."""
        return False

    @abstractmethod
    def change(self, model: Path, version: int, digest: str) -> None:
        """Start on the weights in a model directory, or change to them.

        Running requests go on with the new weights, where the server is told to keep them.

        Raises:
            UserError: the model can never be served here; what was served still is.
        """

    @abstractmethod
    def poison(self) -> None:
        """Serve nothing until the next change succeeds: unset version, digest and tensor proof."""

    def begin_batch(self) -> None:
        """Prepare for the requests that come next; only a deterministic engine has to."""

    @abstractmethod
    def submit(
        self,
        key: str,
        prompt_ids: Sequence[int],
        seed: int,
        sampling: Sampling,
        *,
        prompt_logprobs: bool = False,
        stream: bool = False,
    ) -> None:
        """Queue one completion.

        Args:
            key: the caller's name of it.
            prompt_ids: of the prompt.
            seed: of its random stream.
            sampling: of the completion.
            prompt_logprobs: score the prompt, too; its completion says `prompt_logprobs`.
            stream: yield tokens as they are made; an engine that cannot yields the completion
                alone.

        Raises:
            ValueError: the prompt is empty, too long, or has an id that is not in the vocabulary.
        """

    @abstractmethod
    def step(self) -> Iterator[tuple[str, Answer]]:
        """Compute a part of what is queued; yield the keys and answers of what that finished."""
        ...

    @abstractmethod
    def abort(self, keys: Sequence[str]) -> None:
        """Drop the requests queued under these keys; unknown keys are ignored."""

    @abstractmethod
    def count_requests(self) -> tuple[int, int]:
        """Count the running and the queued requests; any thread may call this."""
        ...

    def flush(self) -> None:
        """Drop cached keys and values, if any are kept."""

    def sleep(self, level: int) -> None:
        """Release the device's memory; no request is running.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.

        Raises:
            UserError: the engine or its device cannot.
        """
        raise UserError("sleep", level, f"the engine {self.name} cannot sleep; stop its server")

    def wake_up(self) -> None:
        """Undo `sleep`. Raises as `sleep`."""
        raise UserError("wake_up", self.name, "is an engine that cannot sleep")

    @abstractmethod
    def compare_files(self, model: Path, every: int = 1) -> Readback:
        """Compare the tensors that the engine holds with the files of a model directory.

        Args:
            model: the directory.
            every: one in so many columns is enough, where reading all of a tensor takes long. Callers
                pass it: `Vllm` has another default.
        """
        ...

    @abstractmethod
    def summarize(self, comparison: Readback, digest: str) -> TensorProof:
        """Add the digest of the files that were compared, and the dtype of the engine."""
        ...


def open_served_engine(kind: str, args: JsonMapping) -> ServedEngine:
    """Open the engine of a server.

    Args:
        kind: of the engine, as a setting's ``engine.kind``.
        args: the engine's own options.

    Raises:
        UserError: it is unknown or does not serve, or an option is refused.
    """
    # A dotted path has no module that describes itself, so that it is never served.
    module = plugins.find_module("engines", kind)
    if module is None or not hasattr(module, "open_served_engine"):
        remedy = "is no engine that serves: no module of this name has open_served_engine"
        raise UserError("--engine", kind, remedy)
    engine: ServedEngine = module.open_served_engine(args)
    return engine


def open_client(
    endpoint: str,
    timeout_s: float,
    *,
    sleeps: bool = False,
    deterministic: bool = False,
) -> Engine:
    """Open the client of a server, or of several that share the prompts of a call.

    Args:
        endpoint: URLs of servers, separated by commas.
        timeout_s: seconds without a byte after which a server counts as dead.
        sleeps: whether a single server leases its device: the client wakes it and puts it to sleep.
            Several servers never sleep, whatever this says.
        deterministic: require a deterministic server.

    Raises:
        UserError: several servers are to be deterministic, or a URL is none.
    """
    if "," not in endpoint:
        return Client(endpoint, timeout_s, sleeps=sleeps, deterministic=deterministic)
    # Where a request is computed would decide its bits.
    if deterministic:
        remedy = (
            "several servers divide a batch by which of them are up: "
            "deterministic needs a single one"
        )
        raise UserError("--endpoint", endpoint, remedy)
    return Replicas([Client(url.strip(), timeout_s) for url in endpoint.split(",")])
