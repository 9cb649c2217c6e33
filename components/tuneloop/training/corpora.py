"""Rows of data as documents: tokenized once by the stage `tokenize_data`, or in the stage that
reads them.

`read_corpus` is what stages call; `tokenize_data` calls `tokenize_split` and writes what it yields.
Both must give the same ids for a row. A setting of the data that changes ids is a fact of
`data_prep` and a field of `formats/facts.py: PromptFacts`; `stages/tokenize_data.py` has to pass
the fact on.

Tests: `tests/unit/stages/test_tokenize_data.py`, and `tests/golden/test_layouts_and_templates.py`,
which encodes every layout under every chat template.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact, File, hash_canonical_json
from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.wording import format_count
from tuneloop.formats.chat_forms import Reasoning
from tuneloop.formats.conversations import Encoded, History
from tuneloop.formats.facts import PromptFacts
from tuneloop.formats.rows import list_columns, name_row
from tuneloop.formats.token_files import Corpus, Document
from tuneloop.formats.tokens import (
    encode_answer,
    encode_completion,
    encode_conversation,
    encode_prompt,
    load_tokenizer,
    stop_ids,
)

SIDES = {
    "sft": ("completion",),
    "sft_eval": ("completion",),
    "preference": ("chosen", "rejected"),
    "preference_eval": ("chosen", "rejected"),
}
"""Split with fixed rows → the columns that follow the prompt; each gives one document, in this
order, on which `training/pairs.py` relies. Splits and columns are those of
`data/tables.py: SCHEMAS`.
"""
CONFIG = "model/config.json"
GENERATION_CONFIG = "model/generation_config.json"


def read_corpus(prompts: Artifact, policy: Artifact, split: str, required: bool = True) -> Corpus:
    """Open the documents of a split, mapped into memory.

    They are those of `tokenize_data`, or else of the split's rows, tokenized now.

    Args:
        prompts: the output of `data_prep` or `tokenize_data`.
        policy: the checkpoint whose tokenizer encodes the rows.
        split: a key of `SIDES`.
        required: whether a missing split is an error; else it has no documents.

    Raises:
        UserError: the split is missing, lacks a column, or was tokenized otherwise than `policy`
            does it.
    """
    if f"{split}.arrow" in prompts.manifest.files:
        if PromptFacts.read(prompts).tokenizer != digest_tokenizer(policy):
            remedy = (
                "was tokenized by another tokenizer than --policy has; run tokenize_data with that "
                "policy"
            )
            raise UserError("--prompts", prompts.url, remedy)
        return Corpus(str(prompts.part(f"{split}.arrow")))
    if f"{split}.parquet" in prompts.manifest.files:
        return Corpus.from_documents(tokenize_split(prompts, policy, split))
    if required:
        remedy = f"holds no {split}.parquet; set data_prep's {split}"
        raise UserError("--prompts", prompts.url, remedy)
    return Corpus.from_documents(())


def tokenize_split(
    prompts: Artifact,
    policy: Artifact,
    split: str,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Document]]:
    """Yield (row id, document) of a split.

    A conversation whose turns the chat template cannot show together gives several documents.

    Args:
        check_stop: is called between parts of the split; it raises if the stage is to stop.

    Raises:
        UserError: no such column or tokenizer, or a row that cannot be encoded.
    """
    table = pq.ParquetFile(prompts.part(f"{split}.parquet"))
    names = table.schema_arrow.names
    columns = ["id", "prompt", "chat", *SIDES[split]]
    for column in columns:
        if column not in names:
            raise UserError(
                "--prompts",
                column,
                f"is not a column of {split}.parquet; make the data again",
            )
    encoder = open_encoder(prompts, policy)
    # A split may be larger than the memory, so it is read in parts.
    for batch in table.iter_batches(1024, columns=list_columns(columns, names)):
        check_stop()
        for row in batch.to_pylist():
            for document in encoder.encode_row(row, SIDES[split]):
                yield row["id"], document


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows with the tokenizer of a policy, as the settings of the data say."""

    tokenizer: Any
    stops: Sequence[int]
    history: History
    reasoning: Reasoning

    def encode_row(self, row: JsonMapping, sides: Sequence[str]) -> list[Document]:
        """Encode the text after the prompt as the target; in a conversation, all turns of the
        assistant. Raises UserError: the row, by its name in the user's file, and what its chat
        template cannot do."""
        try:
            if row[sides[0]] is None:
                encoded = encode_conversation(
                    self.tokenizer,
                    row["prompt"],
                    row.get("tools"),
                    stops=self.stops,
                    history=self.history,
                    reasoning=self.reasoning,
                )
            else:
                encoded = [self._encode_pair(row, row[side]) for side in sides]
        except UserError as error:
            raise UserError(f"{name_row(row)}: {error.field}", error.value, error.remedy) from error
        return [
            Document(array("i", ids), array("b", targets), row=row.get("row"))
            for ids, targets in encoded
        ]

    def _encode_pair(self, row: JsonMapping, completion: str) -> Encoded:
        """Encode a prompt with its completion: in a chat as its last turn."""
        if row["chat"]:
            return encode_answer(
                self.tokenizer,
                row["prompt"],
                completion,
                row.get("tools"),
                stops=self.stops,
                reasoning=self.reasoning,
            )
        prompt = encode_prompt(self.tokenizer, row["prompt"], row["chat"])
        target = encode_completion(self.tokenizer, completion)
        # The parts are encoded apart, as for sampling: no token spans the border. Only the
        # completion is learned.
        return prompt + target, [False] * len(prompt) + [True] * len(target)


def open_encoder(prompts: Artifact, policy: Artifact) -> RowEncoder:
    """Open the tokenizer of `policy` to encode rows of `prompts`. Raises UserError: it cannot be
    loaded."""
    # Only the files that `Artifact.part` names are fetched from a remote store.
    for name in find_tokenizer_files(policy):
        policy.part(name)
    if GENERATION_CONFIG in policy.manifest.files:
        policy.part(GENERATION_CONFIG)
    model = policy.part(CONFIG).parent
    tokenizer = load_tokenizer(model)
    facts = PromptFacts.read(prompts)
    return RowEncoder(
        tokenizer,
        stop_ids(tokenizer, model),
        facts.history,
        facts.reasoning,
    )


def report_split_conversations(stage: Stage, corpus: Corpus) -> None:
    """Say how many conversations gave several documents, as their chat template shows a turn
    otherwise once another follows; leave the counts in ``facts.conversations_split``."""
    counts = pc.value_counts(corpus.names).field("counts").to_numpy()
    split = counts[counts > 1]
    if not len(split):
        return
    stage.facts["conversations_split"] = {"conversations": len(split), "rows": int(split.sum())}
    stage.log(
        f"{format_count(len(split), 'conversation')} became {format_count(int(split.sum()), 'row')}: "
        "the chat template changes earlier "
        "turns once others follow (docs/templates.md), so that turns are learned one by one"
    )


def digest_tokenizer(policy: Artifact) -> str:
    """Compute the SHA-256 over names and SHA-256 of the files that `find_tokenizer_files` finds,
    and over the stop ids of the generation's configuration: these end the targets.

    Artifacts of `tokenize_data` have it: where it is computed otherwise, they are refused."""
    files: JsonObject = {}
    for name, file in find_tokenizer_files(policy).items():
        files[name] = file.sha256
    if GENERATION_CONFIG in policy.manifest.files:
        config = json.loads(policy.part(GENERATION_CONFIG).read_text())
        files["stops"] = config.get("eos_token_id")
    return hash_canonical_json(files)


def find_tokenizer_files(policy: Artifact) -> dict[str, File]:
    """Find a checkpoint's tokenizer and chat template, which training keeps. Raises UserError: it
    is no checkpoint."""
    files = policy.manifest.files
    if CONFIG not in files:
        raise UserError("checkpoint", policy.url, f"holds no {CONFIG}; give it a checkpoint")
    # Training writes the weights anew, and both configurations may change.
    rewritten = re.compile(r"model/(config\.json|generation_config\.json|.*\.(safetensors|bin).*)")
    return {
        name: file
        for name, file in files.items()
        if name.startswith("model/") and not rewritten.fullmatch(name)
    }
