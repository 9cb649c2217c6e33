"""Engines, which turn prompt ids into completion ids.

A variant is a module with ``open_engine(endpoint, args, timeout_s) -> Engine``, which `rollout` and `evaluate` call. An
engine serves one set of weights at a time and says which. A module that ships with tuneloop also has
``check_engine_args(args, prefix)``, called before anything runs, and so imports no library at its head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact
from tuneloop.formats.rollouts import Completion, Request, TokenId


@dataclass(frozen=True)
class Sampling:
    """Sampling in vLLM's terms, without top-p or top-k. Temperature 0 is greedy; completions include the stop token."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=4096)] = ()


Done = Callable[[int], None]
"""Called with the number of requests finished so far; what it raises ends the generation."""


class Engine(Protocol):
    """Generates and scores with the checkpoint of `version` and `digest`; they are -1 and "" while none is loaded."""

    name: str
    context: int
    version: int
    digest: str

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Serve the weights of a checkpoint artifact; nothing is done if its digest is served, unless `force`."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        """Generate completions, in the order of `requests` and their seeds."""

    def score(self, ids: Sequence[int]) -> list[float]:
        """Compute the log-probability at temperature 1 of each id but the first, given those before it."""

    def close(self) -> None:
        """Release memory and connections."""


@runtime_checkable
class Remote(Engine, Protocol):
    """An engine in another process, which may die and be restarted while it is used. `check` is called during a wait
    for that process; an error that it raises ends the wait. `prove` is called with the engine once a restarted process
    serves the policy, and raises an error if it does not."""

    check: Callable[[], None]
    prove: Callable[[Engine], None]


@dataclass(frozen=True)
class TensorProof:
    """What reading back said of an engine.

    Attributes:
        digest: of the files that the engine's tensors were compared with (`digest_model`).
        dtype: of the engine. The files' tensors were cast to it, if theirs is another.
        tensors: in the files.
        identical: equal bit for bit, but for the sign of a zero in packed layers.
        unread: kept by the engine in a form that cannot be compared.
        different: the others.
        example: the name of one that differs, or empty.
    """

    digest: str
    dtype: str
    tensors: int
    identical: int
    unread: int = 0
    different: int = 0
    example: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every tensor was compared and found equal."""
        return self.tensors == self.identical > 0


@runtime_checkable
class Readable(Engine, Protocol):
    """An engine whose tensors can be compared with a checkpoint's."""

    def read_back(self, policy: Artifact) -> TensorProof | None:
        """Compare the tensors that the engine holds with those of a checkpoint; None if it cannot."""


def check_args(name: str, args: Mapping[str, Any], prefix: str) -> None:
    """Raise UserError for an argument that a shipped engine refuses; its field is `prefix` and the argument's name."""
    if name in plugins.list_shipped_variants("engines"):
        plugins.load_variant("engines", name, "check_engine_args")(args, prefix)
