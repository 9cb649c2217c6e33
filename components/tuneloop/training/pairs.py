"""Pairs of completions, tokenized, and the log-probability of each under some policy.

`preference`, `reward_model` and `reference_logprobs` read pairs so; documents 2i and 2i + 1 are the
chosen and the rejected one of pair i, also in what `score_documents` returns.
`training/held_out.py` and `stages/model_reward.py` use `score_documents` for documents that are no
pairs.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import xxhash

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.formats.sequences import LazySequence
from tuneloop.formats.token_files import Corpus, Document, build_document
from tuneloop.training import checkpoint
from tuneloop.training.corpora import read_corpus
from tuneloop.training.lengths import fit_corpus
from tuneloop.training.options import TrainerOptions
from tuneloop.training.protocols import ScoringPolicy

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.batching import Batch
    from tuneloop.training.fsdp.policy import Policy

    Score = Callable[[Any, Batch], Tensor]

Split = Literal["preference", "preference_eval"]
SPLITS: tuple[Split, ...] = ("preference", "preference_eval")
PLANNED = 8192
"""Documents whose micro-batches are planned together, after which ranks exchange their scores: it
bounds what `score_documents` holds, for splits that are mapped from files.
"""


class Pairs(LazySequence[list[Document]]):
    """Pairs by index: a prompt with the chosen completion, then with the rejected one, in the order
    of `documents`.
    """

    def __init__(self, documents: Corpus) -> None:
        self.documents = documents
        self.ids = documents.names.combine_chunks()[::2]
        super().__init__(len(self.ids), lambda index: documents[2 * index : 2 * index + 2])


class Mismatched(LazySequence[Document]):
    """Each prompt with the completions of the previous pair: unrelated samples, from which KTO
    estimates KL.

    `reference_logprobs` and `preference` have to make them of the same pairs and with the same
    `limit`: a pair that one of them drops changes the document of the next pair, too. So the one
    stores `digest_pairs` of them, and the other compares it.

    Args:
        documents: of pairs that fit `limit`.
        limit: tokens of a document; the completion is cut off there, as a longer one may come to
            stand behind this prompt.
    """

    def __init__(self, documents: Sequence[Document], limit: int) -> None:
        def mix(index: int) -> Document:
            document = documents[index]
            # The document two before is of the previous pair, and of the same side.
            previous = documents[index - 2]
            prompt = document.ids[: document.targets.index(True)]
            completion = previous.ids[previous.targets.index(True) :]
            return build_document(prompt, completion[: limit - len(prompt)])

        super().__init__(len(documents), mix)


def digest_pairs(documents: Sequence[Document]) -> pa.StringArray:
    """Compute the xxh3-64 of every two documents: tells whether two stages saw the same tokens.

    `reference_logprobs` stores them and `preference` compares them: digests that are computed
    otherwise make `preference` refuse what was stored before.
    """
    digests: list[str] = []
    for start in range(0, len(documents), 2):
        digest = xxhash.xxh3_64()
        for document in documents[start : start + 2]:
            digest.update(bytes(document.ids))
            digest.update(bytes(document.targets))
        digests.append(digest.hexdigest())
    return pa.array(digests, pa.string())


def read_pairs(prompts: Artifact, policy: Artifact, split: Split) -> Pairs:
    """Open the pairs of a split, as `read_corpus` does; none where there are no held-out pairs."""
    return Pairs(read_corpus(prompts, policy, split, required=split == "preference"))


def fit_pairs(
    stage: Stage,
    pairs: Pairs,
    prompts: Artifact,
    policy: "Policy",
    options: TrainerOptions,
) -> Pairs:
    """Return the pairs both of whose documents fit; see `fit_corpus`."""
    documents = fit_corpus(
        stage,
        pairs.documents,
        prompts,
        policy,
        options.max_length,
        together=2,
        is_delegated=options.is_delegated,
    )
    return Pairs(documents)


def sum_logprobs(policy: "Policy", documents: "Sequence[Document] | Batch") -> "Tensor":
    """Sum the log-probabilities of each document's targets in one forward pass: float32
    ``[documents]``.

    `stages/reference_logprobs.py` stores these sums for `stages/preference.py`: another reduction
    makes stored ones wrong.
    """
    import torch

    batch = policy.collate(documents) if isinstance(documents, Sequence) else documents
    values, _ = policy.logprobs(batch)
    # The targets of all documents lie end to end; each is added to the sum of its document.
    owner = torch.repeat_interleave(batch.counts).to(values.device)
    return torch.zeros(len(batch.counts), device=values.device).index_add(0, owner, values)


def score_documents(
    stage: Stage | None,
    policy: ScoringPolicy,
    documents: Sequence[Document],
    limit: int,
    score: "Score" = sum_logprobs,
) -> "array[float]":
    """Compute `score` of any number of documents, at most `limit` at once, on every rank.

    On SIGTERM `stage` ends; it is None within an optimizer step, which must be completed, so that a
    resume point can follow.
    """
    scores = array("d")
    for start in range(0, len(documents), PLANNED):
        part = documents[start : start + PLANNED]
        scores_by_index: dict[int, float] = {}
        # Each rank scores a part, and merges it with the others' below.
        plan = policy.plan([len(document.ids) for document in part], limit)
        with policy.frozen():
            for micro, batch in zip(plan, policy.collate_ahead(part, plan)):
                if stage is not None:
                    checkpoint.check_stop(stage, policy)
                scores_by_index.update(zip(micro, score(policy, batch).tolist()))
        merged = policy.ranks.merge(scores_by_index)
        scores.extend(merged[index] for index in range(len(part)))
    return scores


def compute_accuracy(
    stage: Stage,
    policy: ScoringPolicy,
    pairs: Pairs,
    limit: int,
    score: "Score" = sum_logprobs,
) -> float:
    """Compute the share of pairs whose chosen completion has a higher `score` than the rejected
    one.
    """
    scores = score_documents(stage, policy, pairs.documents, limit, score)
    right = sum(chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2]))
    return right / len(pairs)
