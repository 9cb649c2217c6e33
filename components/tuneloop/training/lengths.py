"""Rows that are longer than a training step takes: dropped, cut off or refused, and counted, before
the first step.

The fact ``too_long`` has another form in each kind of artifact: here a list of counts, of rollouts
one mapping (`inference/prompt_room.py`), of data the setting itself (`formats/facts.py:
PromptFacts`). Tests: `tests/unit/stages/test_too_long.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import PromptFacts
from tuneloop.formats.rows import split_numbers
from tuneloop.formats.token_files import Corpus
from tuneloop.formats.too_long import SHOWN

if TYPE_CHECKING:
    from tuneloop.training.fsdp.policy import Policy


def fit_corpus(
    stage: Stage,
    corpus: Corpus,
    prompts: Artifact,
    policy: "Policy",
    max_length: int,
    *,
    together: int = 1,
    is_delegated: bool = False,
) -> Corpus:
    """Return the documents of a split that fit `max_length` and the context of `policy`.

    What becomes of longer ones is a setting of the data: `too_long`, and the share `drop_at_most`
    that may be dropped. Counts and the first rows are left in ``facts.too_long``.

    Args:
        max_length: tokens of a document in a step.
        together: documents that are kept or dropped together (pairs: 2).
        is_delegated: another backend trains; none may be longer.

    Raises:
        UserError: more rows are longer than may be dropped, or there are ids beyond the vocabulary.
    """
    check_vocabulary(corpus, policy)
    limit = min(max_length, policy.context)
    long = np.flatnonzero(corpus.lengths > limit).tolist()
    if not long:
        return corpus
    rule = PromptFacts.read(prompts).length_policy
    if is_delegated:
        # Another backend reads the rows itself, and cuts none off.
        rule = replace(rule, action="refuse")
    # Truncated rows keep their beginning. One that has no target there teaches nothing.
    lost = [
        index
        for index in long
        if rule.action != "truncate" or not any(corpus[index].targets[:limit])
    ]
    dropped = {index // together for index in lost}
    count = len(corpus) // together
    bound = f"context of {policy.context}"
    if max_length <= policy.context:
        bound = f"max_length {max_length}; raise it"
    rule.check_share(
        len(dropped), count, describe_longest(corpus, lost, limit), f"over the {bound}"
    )
    # Both documents of a pair go where one is dropped.
    indices = [index for index in range(count * together) if index // together not in dropped]
    examples = describe_longest(corpus, long, limit)
    cut = len({index // together for index in long} - dropped)
    counts = {
        "dropped": len(dropped),
        "cut": cut,
        "of": count,
        "limit": limit,
        "first": examples,
    }
    stage.facts.setdefault("too_long", []).append(counts)
    stage.log(
        f"longer than {format_count(limit, 'token')}: "
        f"{len(dropped)} of {format_count(count, 'row')} dropped, {cut} cut off "
        f"({'; '.join(examples[:3])})"
    )
    return corpus.select(indices, limit)


def describe_longest(corpus: Corpus, indices: Iterable[int], limit: int) -> list[str]:
    """Describe the first rows that have documents at `indices`, each by its longest one.

    A pair has two documents, and a conversation may have several. Rows are in the order of files
    and rows.
    """
    longest: dict[str, int] = {}
    for index in indices:
        name = corpus.name(index)
        if name not in longest or corpus.lengths[index] > corpus.lengths[longest[name]]:
            longest[name] = index
    names = sorted(longest, key=split_numbers)
    return [describe_long(corpus, longest[name], limit) for name in names[:SHOWN]]


def check_vocabulary(corpus: Corpus, policy: "Policy") -> None:
    """Raise UserError for a document with an id that `policy` has no embedding for."""
    if not len(corpus) or corpus.highest_ids.max() < policy.vocab_size:
        return
    index = int(corpus.highest_ids.argmax())
    remedy = (
        f"the tokenizer gives this id, and the model has embeddings for {policy.vocab_size} ids "
        "only; drop the row, or take the tokenizer and the chat template that belong to the model"
    )
    raise UserError(f"row {corpus.name(index)}: token", int(corpus.highest_ids[index]), remedy)


def describe_long(corpus: Corpus, index: int, limit: int) -> str:
    """Describe a document that is longer than `limit`: whether its prompt alone is, its row, and
    its length."""
    part = "completion" if any(corpus[index].targets[:limit]) else "prompt"
    return f"{part} of {corpus.name(index)} ({format_count(corpus.lengths[index], 'token')})"
