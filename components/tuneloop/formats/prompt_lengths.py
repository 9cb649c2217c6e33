"""All prompts of a run, rendered and counted once, before anything is trained.

`base_model` calls it, as the first stage that has the run's tokenizer. The stages that sample leave
out the same prompts (`inference/prompt_room.py`): a rule that changes here changes there.
Tests: `tests/unit/stages/test_too_long.py`.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.core.json_types import JsonObject
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import PromptFacts
from tuneloop.formats.rows import list_columns, name_row, split_numbers
from tuneloop.formats.tokens import encode_prompt_row
from tuneloop.formats.too_long import SHOWN

REQUIRED = ("id", "prompt", "chat")
"""The columns of data that encoding a prompt takes, besides the optional ones
(`formats/rows.py`)."""


def check_prompts(
    stage: Stage,
    tokenizer: Any,
    prompts: Artifact,
    completion_tokens: Mapping[str, int],
    context: int,
) -> None:
    """Encode every prompt of some splits, and count those that leave no room for a completion.

    Later stages skip the ones that do not fit; here it is known how many they are. Counts, the
    longest prompt and the first rows are left in ``facts.prompts``.

    Args:
        prompts: of data_prep; it also says how many prompts may be dropped.
        completion_tokens: split → the tokens of a completion; a split that the data lacks is passed
            over.
        context: tokens of a prompt and its completion.

    Raises UserError: a prompt that the chat template cannot render, or more that do not fit than
    the data allows to drop.
    """
    rule = PromptFacts.read(prompts).length_policy
    counts: JsonObject = {}
    for split, tokens in completion_tokens.items():
        if f"{split}.parquet" not in prompts.manifest.files:
            continue
        lengths = measure_prompts(stage, tokenizer, prompts, split)
        room = context - tokens
        too_long = [
            (split_numbers(row), f"{row} ({format_count(length, 'token')})")
            for row, length in lengths
            if length > room
        ]
        # Rows come in a shuffled order; a user looks for them in that of the file.
        long = [description for _, description in sorted(too_long)]
        problem = (
            f"with {tokens} of a completion they exceed the context of {context}; "
            "lower max_tokens, raise engine.args.max_model_len if the model allows it"
        )
        rule.check_share(len(long), len(lengths), long, problem)
        longest = max((length for _, length in lengths), default=0)
        counts[split] = {"longest": longest, "too_long": len(long), "first": long[:SHOWN]}
        if long:
            examples = "; ".join(long[:3])
            share = f"{len(long)} of {format_count(len(lengths), 'prompt')} ({split})"
            stage.log(f"{share} are too long and are skipped: {examples}")
    stage.facts["prompts"] = counts


def measure_prompts(
    stage: Stage, tokenizer: Any, prompts: Artifact, split: str
) -> list[tuple[str, int]]:
    """Encode the prompts of a split; return each row's name and number of tokens. Raises UserError
    that names the row of a prompt that cannot be encoded."""
    file = pq.ParquetFile(prompts.part(f"{split}.parquet"))
    columns = list_columns(REQUIRED, file.schema_arrow.names)
    bar = stage.progress(file.metadata.num_rows, f"{split} prompts")
    lengths: list[tuple[str, int]] = []
    for batch in file.iter_batches(1024, columns=columns):
        for row in batch.to_pylist():
            ids = encode_prompt_row(tokenizer, row)
            lengths.append((name_row(row), len(ids)))
        # A large data set takes minutes: a stage that is stopped does not wait for its end.
        stage.check_stop()
        bar.update(len(lengths))
    return lengths
