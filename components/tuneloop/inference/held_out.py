"""Completions of held-out demonstrations, for data that has no prompts with answers to score.

`evaluate` calls it in place of scoring. The loss on the same demonstrations is that of
`training/held_out.py`. The tests are in `tests/unit/stages/test_evaluate.py`.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data.sizes import SPLITS
from tuneloop.formats.rollouts import SAMPLES, SAMPLES_FILE, build_reward_inputs
from tuneloop.formats.rows import list_columns
from tuneloop.formats.too_long import LengthPolicy
from tuneloop.inference import generate
from tuneloop.inference.prompt_room import Spares

REFERENCES = {"sft_eval": "completion", "preference_eval": "chosen"}
"""Split of held-out demonstrations or pairs → the column with the text that is expected.

The first split that has rows is taken. The splits are those of `data/sizes.py: SPLITS`, the columns
those of `data/tables.py`.
"""
SAMPLED = 16
"""Demonstrations whose prompts are completed: people read them, and nothing is measured on them."""
COLUMNS = ("id", "prompt", "chat")
"""Columns that are read beside the reference; the optional ones of `formats/rows.py` are, too."""


def is_prompts(artifact: Artifact) -> bool:
    """Tell whether an artifact has any split of `data_prep`."""
    return any(f"{split}.parquet" in artifact.manifest.files for split in SPLITS)


def has_rows(prompts: Artifact, file: str) -> bool:
    """Tell whether an artifact of `data_prep` has this file, and rows in it."""
    if file not in prompts.manifest.files:
        return False
    return pq.ParquetFile(prompts.part(file)).metadata.num_rows > 0


def sample_demonstrations(
    stage: Stage,
    policy: Artifact,
    prompts: Artifact,
    options: "generate.SamplingOptions",
) -> int:
    """Complete the prompts of the first held-out demonstrations, or pairs.

    ``samples.parquet`` gets the samples. Each has the demonstration's text, or the chosen one of a
    pair, as its answer, and no score: the outcome is ``unverifiable``.

    Returns:
        The number of samples, 0 if the data has neither demonstrations nor pairs.

    Raises:
        UserError, StaleWeights: as `generate.generate_completions`.
    """
    rows = read_demonstrations(prompts)
    samples: list[JsonObject] = []
    if rows:
        groups = [f"i{0:06d}-e{number:05d}" for number in range(len(rows))]
        # Samples for people: a prompt that is too long has none.
        skipped = Spares(rule=LengthPolicy("drop"), required=False)
        with generate.open_engine(options) as engine:
            job = generate.Job(rows, groups, 1, options, spares=skipped)
            tokenizer, _, completions = generate.generate_completions(stage, policy, job, engine)
        # A row whose prompt is too long was removed from `rows`, too.
        for row, group in zip(rows, completions):
            sample = dict(row)
            sample |= build_reward_inputs(tokenizer, row, group[0])
            sample["score"] = None
            sample["outcome"] = "unverifiable"
            samples.append(sample)
    pq.write_table(pa.Table.from_pylist(samples, schema=SAMPLES), stage.out / SAMPLES_FILE)
    stage.facts["outcomes"] = {"unverifiable": len(samples)}
    return len(samples)


def read_demonstrations(prompts: Artifact) -> list[JsonObject]:
    """Read the first held-out demonstrations, or else pairs.

    Returns:
        Rows that `generate_completions` takes.
    """
    for split, reference in REFERENCES.items():
        file = f"{split}.parquet"
        if has_rows(prompts, file):
            table = pq.ParquetFile(prompts.part(file))
            columns = list_columns((*COLUMNS, reference), table.schema_arrow.names)
            # Only one batch is read, however many demonstrations there are.
            first = next(table.iter_batches(SAMPLED, columns=columns))
            return [_split_demonstration(row, row[reference]) for row in first.to_pylist()]
    return []


def _split_demonstration(row: JsonMapping, reference: str | None) -> JsonObject:
    """Split a demonstration into its prompt and its reference text.

    Of a whole conversation (no `reference`) the prompt is what comes before the assistant's last
    message.

    The row has the keys of `generate.COLUMNS`, which `generate_completions` and
    `build_reward_inputs` (`formats/rollouts.py`) read.
    """
    prompt = row["prompt"]
    if reference is None:
        messages = json.loads(prompt)
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        answer = messages[last]
        # An answer that calls tools may have no text.
        calls = json.dumps(answer.get("tool_calls"), ensure_ascii=False)
        reference = answer.get("content") or calls
        prompt = json.dumps(messages[:last], ensure_ascii=False)
    return {
        "id": row["id"],
        "prompt": prompt,
        "chat": row["chat"],
        "tools": row.get("tools"),
        "row": row.get("row"),
        "answer": reference,
        "reward": "{}",
        "metadata": "{}",
    }
