"""Rows of data as documents: tokenized once by the stage `tokenize_data`, or in the stage that reads them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact, File, hash_canonical_json
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Corpus, Document, build_document
from tuneloop.formats.tokens import (
    encode_completion,
    encode_conversation,
    encode_prompt,
    load_tokenizer,
)

SIDES = {
    "sft": ("completion",),
    "sft_eval": ("completion",),
    "preference": ("chosen", "rejected"),
    "preference_eval": ("chosen", "rejected"),
}
"""Split with fixed rows → the columns that follow the prompt; each gives one document."""
CONFIG = "model/config.json"


def read_corpus(prompts: Artifact, policy: Artifact, split: str, required: bool = True) -> Corpus:
    """Open the documents of a split, mapped into memory: those of `tokenize_data`, or else of its rows, tokenized now.
    Raises UserError: the split is missing, lacks a column, or was tokenized otherwise than `policy` does it."""
    if f"{split}.arrow" in prompts.manifest.files:
        if prompts.manifest.facts["tokenizer"] != digest_tokenizer(policy):
            remedy = "was tokenized by another tokenizer than --policy has; run tokenize_data with that policy"
            raise UserError("--prompts", prompts.url, remedy)
        return Corpus(str(prompts.part(f"{split}.arrow")))
    known = f"{split}.parquet" in prompts.manifest.files
    if required and not known:
        raise UserError(
            "--prompts", prompts.url, f"holds no {split}.parquet; set data_prep's {split}"
        )
    return Corpus.from_documents(tokenize_split(prompts, policy, split) if known else ())


def tokenize_split(
    prompts: Artifact, policy: Artifact, split: str, check_stop: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, Document]]:
    """Yield (row id, document) of a split. Raises UserError: no such column or tokenizer, or a row it cannot encode."""
    table = pq.ParquetFile(prompts.part(f"{split}.parquet"))
    for column in (columns := ["id", "prompt", "chat", *SIDES[split]]):
        if column not in table.schema_arrow.names:
            raise UserError(
                "--prompts", column, f"is not a column of {split}.parquet; make the data again"
            )
    for name in find_tokenizer_files(policy):
        policy.part(name)
    tokenizer = load_tokenizer(policy.part(CONFIG).parent)
    for batch in table.iter_batches(1024, columns=columns):
        check_stop()
        for row in batch.to_pylist():
            yield from (
                (row["id"], document) for document in _encode_row(tokenizer, row, SIDES[split])
            )


def _encode_row(tokenizer: Any, row: Mapping[str, Any], sides: Sequence[str]) -> list[Document]:
    """Encode the text after the prompt as the target; in a conversation, all turns of the assistant."""
    if row[sides[0]] is None:
        return [Document(*encode_conversation(tokenizer, row["prompt"]))]
    prompt = encode_prompt(tokenizer, row["prompt"], row["chat"])
    return [build_document(prompt, encode_completion(tokenizer, row[side])) for side in sides]


def digest_tokenizer(policy: Artifact) -> str:
    """Compute the SHA-256 over names and SHA-256 of the files that `find_tokenizer_files` finds."""
    return hash_canonical_json(
        {name: file.sha256 for name, file in find_tokenizer_files(policy).items()}
    )


def find_tokenizer_files(policy: Artifact) -> dict[str, File]:
    """Find a checkpoint's tokenizer and chat template, which training keeps. Raises UserError: it is no checkpoint."""
    if CONFIG not in (files := policy.manifest.files):
        raise UserError("checkpoint", policy.url, f"holds no {CONFIG}; give it a checkpoint")
    others = re.compile(r"model/(config\.json|generation_config\.json|.*\.(safetensors|bin).*)")
    return {
        name: file
        for name, file in files.items()
        if name.startswith("model/") and not others.fullmatch(name)
    }
