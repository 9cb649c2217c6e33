"""Engines: what turns prompt ids into completion ids.

A variant is a module with ``open_engine(endpoint, args, timeout_s) -> Engine``. `rollout` and `evaluate` open it by
``plugins.load_variant("engines", name, "open_engine")``. An engine serves one set of weights at a time and says
which. A module that ships with tuneloop also has ``check_engine_args(args, prefix)``, for before anything runs, and so
imports no library at its head.
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
    """How to sample; the names are vLLM's. The distribution is never cut (no top-p, no top-k). At temperature 0 it is
    the likeliest token; the stop token is part of the completion."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 16
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=4096)] = ()


Done = Callable[[int], None]
"""Called with the number of requests finished so far; what it raises ends the generation."""


class Engine(Protocol):
    """Generates and scores. `version`, `digest`: of the checkpoint whose weights are served; -1 and "" before the first
    `load`, and after one that failed half-way."""

    name: str
    context: int
    version: int
    digest: str

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Serve the weights of a checkpoint artifact; nothing happens where its digest is served already.

        `force` applies them again even so.
        """

    def generate(self, requests: Sequence[Request], sampling: Sampling, done: Done) -> list[list[Completion]]:
        """Generate completions, in the order of `requests` and their seeds."""

    def score(self, ids: Sequence[int]) -> list[float]:
        """Compute the log-probability at temperature 1 of each id but the first, given those before it."""

    def close(self) -> None:
        """Give back memory and connections."""


@runtime_checkable
class Remote(Engine, Protocol):
    """An engine in another process, which may die and be started anew while it is used.

    Attributes:
        check: called while that process is waited for; what it raises ends the wait.
        prove: called with the engine once a process that was started anew serves the policy; raises where it does not.
    """

    check: Callable[[], None]
    prove: Callable[[Engine], None]


def check_args(name: str, args: Mapping[str, Any], prefix: str) -> None:
    """Refuse arguments that the engine `name` cannot take; of one that is not tuneloop's nothing is known here. Raises
    UserError: with `prefix` and the argument's name as the field."""
    if name in plugins.list_shipped_variants("engines"):
        plugins.load_variant("engines", name, "check_engine_args")(args, prefix)
