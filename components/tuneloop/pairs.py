"""Pairs of completions, tokenized, and the log-probability of each under some policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow.parquet as pq
import xxhash

from tuneloop import checkpoint
from tuneloop.artifacts import Artifact
from tuneloop.component import Stage
from tuneloop.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.trainers._batch import Document
    from tuneloop.trainers.fsdp import Policy

Split = Literal["preference", "preference_eval"]
SPLITS: tuple[Split, ...] = ("preference", "preference_eval")


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a prompt and of two completions of it, ends of sequence included."""

    id: str
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def digest(self) -> str:
        """xxh3-64 of the ids: tells whether two stages saw the same tokens."""
        return xxhash.xxh3_64_hexdigest(repr((self.prompt, self.chosen, self.rejected)).encode())

    @property
    def length(self) -> int:
        """Tokens of both documents."""
        return 2 * len(self.prompt) + len(self.chosen) + len(self.rejected)

    def documents(self) -> list[Document]:
        """The chosen and the rejected one."""
        return [follow(self.prompt, self.chosen), follow(self.prompt, self.rejected)]


def follow(prompt: list[int], completion: list[int]) -> Document:
    """A document whose completion is the target."""
    from tuneloop.trainers._batch import Document

    return Document(prompt + completion, [False] * len(prompt) + [True] * len(completion))


def mismatched(pairs: Sequence[Pair]) -> list[list[Document]]:
    """Each prompt with the completions of the pair before it: samples of neither side, to estimate KL from (KTO)."""
    return [
        [follow(pair.prompt, other.chosen), follow(pair.prompt, other.rejected)]
        for pair, other in zip(pairs, [*pairs[-1:], *pairs[:-1]])
    ]


def read_pairs(prompts: Artifact, policy: Artifact, split: Split) -> list[Pair]:
    """The pairs of a split, tokenized as the policy has it; none where the split is not there.

    Raises:
        UserError: there is no training split.
    """
    from tuneloop.tokens import encode_completion, encode_prompt, load_tokenizer

    if f"{split}.parquet" not in prompts.manifest.files:
        if split == "preference":
            raise UserError("--prompts", prompts.url, "holds no preference.parquet; set data_prep's preference")
        return []
    tokenizer = load_tokenizer(checkpoint.model_dir(policy))
    return [
        Pair(
            row["id"],
            encode_prompt(tokenizer, row["prompt"], row["chat"]),
            encode_completion(tokenizer, row["chosen"]),
            encode_completion(tokenizer, row["rejected"]),
        )
        for row in pq.read_table(prompts.path / f"{split}.parquet").to_pylist()
    ]


def plan(policy: Policy, pairs: Sequence[Pair], limit: int) -> list[list[int]]:
    """This rank's micro-batches of whole pairs, as indices."""
    from tuneloop.trainers import _batch

    lengths = [pair.length for pair in pairs]
    return _batch.plan(lengths, limit, policy.ranks.world, policy.packed)[policy.ranks.rank]


def sums(policy: Policy, documents: Sequence[Document]) -> Tensor:
    """Float32 ``[documents]``: the log-probability of each one's targets, all together; one forward pass."""
    import torch

    values, _ = policy.logprobs(documents)
    counts = torch.tensor([d.target_count for d in documents], dtype=torch.int64, device=values.device)
    owner = torch.arange(len(documents), device=values.device).repeat_interleave(counts)
    return torch.zeros(len(documents), device=values.device).index_add(0, owner, values)


def score(stage: Stage | None, policy: Policy, documents: Sequence[Document], limit: int) -> list[float]:
    """`sums` of any number of documents, at most `limit` at once, on every rank.

    Args:
        stage: left on SIGTERM; None: in an optimizer step, which ends first, so that a resume point can follow.
    """
    found: dict[int, list[float]] = {}
    with policy.frozen():
        for micro in policy.plan(documents, limit):
            if stage is not None:
                checkpoint.check_stop(stage, policy)
            found |= {i: [v] for i, v in zip(micro, sums(policy, [documents[i] for i in micro]).tolist())}
    merged = policy.ranks.merge(found)
    return [merged[i][0] for i in range(len(documents))]
