"""A completion that an endpoint streams: the forms of what arrives, and what is known of it so far."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field

from tuneloop.core.seeds import derive_seed
from tuneloop.formats.rollouts import Completion, Ids
from tuneloop.inference.engines import Sampling


class Piece(BaseModel, strict=True):
    """Tokens of one completion."""

    index: int = Field(ge=0)
    ids: Ids
    logprobs: list[float]
    version: int


class Whole(BaseModel, strict=True):
    """Completions that have ended."""

    index: int = Field(ge=0)
    completions: list[dict[str, Any]] = Field(min_length=1)


@dataclass
class Partial:
    """What is known of one completion so far; `versions` has one a token."""

    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    done: Completion | None = None

    def extend(self, piece: Piece) -> None:
        """Take the tokens of a piece."""
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.ids)

    def find_end(self, sampling: Sampling) -> str:
        """Return the finish reason of a completion that needs no further token, else nothing."""
        if self.ids and self.ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.ids) >= sampling.max_tokens else ""

    def derive_next_seed(self) -> int:
        """Derive the seed of a request that goes on from here: the stream of the first would repeat itself."""
        return derive_seed(self.seed, "continue", len(self.ids)) if self.ids else self.seed
