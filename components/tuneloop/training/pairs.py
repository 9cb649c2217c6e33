"""Pairs of completions, tokenized, and the log-probability of each under some policy."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Corpus, Document, Places
from tuneloop.formats.tokens import encode_completion, encode_prompt, load_tokenizer
from tuneloop.training import checkpoint, epochs

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.fsdp.policy import Policy

Split = Literal["preference", "preference_eval"]
SPLITS: tuple[Split, ...] = ("preference", "preference_eval")
PLANNED = 8192
"""Documents whose micro-batches are planned together."""


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
        """Build the chosen and the rejected document."""
        return [build_document(self.prompt, self.chosen), build_document(self.prompt, self.rejected)]


def build_document(prompt: list[int], completion: list[int]) -> Document:
    """Build a document whose completion is the target."""
    return Document(array("i", prompt + completion), array("b", [0] * len(prompt) + [1] * len(completion)))


class Pairs(Places[Pair]):
    """Pairs by place; their tokens lie in temporary files (see `Corpus`).

    Args:
        pairs: read once.

    Attributes:
        ids: of the pairs.
        documents: two of each, the chosen one first.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        ids: list[str] = []

        def documents() -> Iterator[tuple[str, Document]]:
            for pair in pairs:
                ids.append(pair.id)
                yield from ((pair.id, document) for document in pair.documents())

        self.documents = Corpus(documents())
        self.ids = pa.array(ids, pa.string())

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, place: int) -> Pair:
        chosen, rejected = self.documents[2 * place], self.documents[2 * place + 1]
        start = chosen.targets.index(True)
        prompt = list(chosen.ids[:start])
        return Pair(self.ids[place].as_py(), prompt, list(chosen.ids[start:]), list(rejected.ids[start:]))

    def digests(self) -> pa.StringArray:
        """Compute `Pair.digest` of each pair."""
        return pa.array((pair.digest for pair in self), pa.string())


class Mismatched(Places[Document]):
    """Each prompt with the chosen, then the rejected completion of the pair before it: samples of neither side, to
    estimate KL from (KTO)."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    def at(self, place: int) -> Document:
        i, side = divmod(place, 2)
        other = self._pairs[i - 1]
        return build_document(self._pairs[i].prompt, other.rejected if side else other.chosen)


def read_pairs(prompts: Artifact, policy: Artifact, split: Split) -> Pairs:
    """Read the pairs of a split, tokenized as the policy has it, never all in memory at once; none where the split is
    not there.

    Raises:
        UserError: there is no training split.
    """
    if f"{split}.parquet" not in prompts.manifest.files:
        if split == "preference":
            raise UserError("--prompts", prompts.url, "holds no preference.parquet; set data_prep's preference")
        return Pairs([])
    tokenizer = load_tokenizer(checkpoint.model_dir(policy))
    batches = pq.ParquetFile(prompts.part(f"{split}.parquet")).iter_batches(1024)

    def encode(row: dict[str, Any]) -> Pair:
        sides = (encode_completion(tokenizer, row[side]) for side in ("chosen", "rejected"))
        return Pair(row["id"], encode_prompt(tokenizer, row["prompt"], row["chat"]), *sides)

    return Pairs(encode(row) for batch in batches for row in batch.to_pylist())


def check_fits(pairs: Iterable[Pairs], policy: "Policy", max_length: int) -> None:
    """Check all documents of `pairs` as `epochs.check_fits` does."""
    for each in pairs:
        for name, document in each.documents.extremes.items():
            epochs.check_fits({name: [document]}, policy, max_length)


def sum_logprobs(policy: "Policy", documents: Sequence[Document]) -> "Tensor":
    """Sum the log-probabilities of each document's targets in one forward pass: float32 ``[documents]``."""
    import torch

    values, _ = policy.logprobs(documents)
    counts = torch.tensor([d.target_count for d in documents], dtype=torch.int64, device=values.device)
    owner = torch.arange(len(documents), device=values.device).repeat_interleave(counts)
    return torch.zeros(len(documents), device=values.device).index_add(0, owner, values)


def score_documents(stage: Stage | None, policy: "Policy", documents: Sequence[Document], limit: int) -> "array[float]":
    """Compute `sum_logprobs` of any number of documents, at most `limit` at once, on every rank.

    Args:
        stage: left on SIGTERM; None: in an optimizer step, which ends first, so that a resume point can follow.
    """
    scores = array("d")
    for start in range(0, len(documents), PLANNED):
        part = documents[start : start + PLANNED]
        found: dict[int, list[float]] = {}
        with policy.frozen():
            for micro in policy.plan([len(document.ids) for document in part], limit):
                if stage is not None:
                    checkpoint.check_stop(stage, policy)
                found |= {i: [v] for i, v in zip(micro, sum_logprobs(policy, [part[i] for i in micro]).tolist())}
        merged = policy.ranks.merge(found)
        scores.extend(merged[i][0] for i in range(len(part)))
    return scores
