"""The methods of a policy and of a trainer that training loops and measurements call.

`training/fsdp/policy.py: Policy` and `training/fsdp/trainer.py: Trainer` are the classes that
stages use. Another class with these methods can take their place in `pairs.score_documents`, with a
`score` of its own, and in `epochs.train_epochs`: neither calls anything else of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tuneloop.formats.token_files import Document

if TYPE_CHECKING:
    from tuneloop.training.batching import Batch
    from tuneloop.training.fsdp.ranks import Ranks


class ScoringPolicy(Protocol):
    """A policy that computes something of documents, in micro-batches, without gradient.

    Attributes:
        ranks: the processes that hold it.
    """

    ranks: "Ranks"

    def plan(self, lengths: Sequence[int], limit: int) -> list[list[int]]:
        """Plan this rank's micro-batches of examples with these tokens, as indices, at most `limit`
        in each.
        """

    def collate(self, documents: Sequence[Document]) -> "Batch":
        """Lay documents out for one forward pass."""

    def collate_ahead(
        self,
        documents: Sequence[Document],
        plan: Iterable[list[int]],
    ) -> "Iterator[Batch]":
        """Yield each micro-batch of a plan, the next one laid out meanwhile."""

    def frozen(self) -> AbstractContextManager[None]:
        """Turn gradients and dropout off while the block runs."""


class EpochTrainer(ScoringPolicy, Protocol):
    """A trainer that the loop over epochs can drive, interrupt and resume.

    Attributes:
        step: optimizer steps taken.
    """

    step: int

    def watched(self) -> AbstractContextManager[None]:
        """Measure the part of a step that is spent in collectives."""

    def efficiency(self, tokens_per_s: float) -> dict[str, float | None]:
        """Compute how well the devices are used, at tokens a second over all ranks."""

    def save(self, directory: Path) -> None:
        """Write what training changes; called by all ranks."""

    def rounded(self, dtype: str) -> AbstractContextManager[None]:
        """While the block runs, replace the parameters by what a checkpoint in `dtype` has of them;
        called by all ranks.
        """

    def load(self, directory: Path, step: int) -> None:
        """Continue from what `save` wrote after `step`, with any number of ranks."""
