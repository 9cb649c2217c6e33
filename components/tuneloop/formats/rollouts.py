"""The file that `rollout` writes and `reward`, `policy_update` and people read: its columns, and
how rows are made.

Its columns are an interface: trainers, rewards, the page and notebooks of users read them by name,
from artifacts of earlier releases, too. A new column is added and may be absent; none is renamed.

Each reader lists the columns that it takes: `training/samples.py: COLUMNS`, `stages/reward.py`,
`ui/samples.py` with `ui/static/samples.js`, `kfp/previews.py: COLUMNS`,
`extensions/provenance/questions.py`. Tests: `tests/unit/stages/test_rollout.py`,
`tests/unit/stages/test_carry.py`.
"""

import bisect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.tokens import decode_ids

FILE = "rollouts.parquet"
"""What `rollout` writes: `SCHEMA`."""
REWARDS_FILE = "rewards.parquet"
"""What `reward` and `model_reward` write: the same rows with the columns of
`JUDGEMENTS`. `policy_update` reads it."""
SAMPLES_FILE = "samples.parquet"
"""What evaluations write: `SAMPLES`."""
ROWS = 1024
"""Rows in a row group."""
# pyarrow writes exactly these columns: a value that `make_rows` adds without a column here is
# dropped without a word, and a column that it does not fill is null. `read_carried` of
# `formats/carried.py` reads them back. docs/stages.md describes them.
SCHEMA = pa.schema(
    {
        "request_id": pa.string(),
        "group": pa.string(),
        "id": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.bool_()),
        "policy_versions": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "answer": pa.string(),
        "reward_spec": pa.string(),
        "metadata": pa.string(),
    }
)
JUDGEMENTS = pa.schema({"outcome": pa.string(), "score": pa.float32(), "breakdown": pa.string()})
"""Columns that a scorer adds: what judging gave (`tuneloop.rewards.outcomes.Outcome`), the score, null
without one, and as JSON what each reward gave. `stages/reward.py` and `stages/model_reward.py`
write their values in this order."""
TEXTS = ("id", "prompt", "completion", "answer")
"""The first columns of `SAMPLES`, in the order in which `extensions/evaluation/evaluate_lm_eval.py` fills them."""
SAMPLES = pa.schema(
    {
        "id": pa.string(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "answer": pa.string(),
        "score": pa.float32(),
        "outcome": pa.string(),
    }
)
"""Columns of the completions that an evaluation scored; the page and `deploy_model` read them.
`stages/evaluate.py`, `extensions/evaluation/evaluate_lm_eval.py` and `inference/held_out.py` write them: a value
without a column here is dropped without a word."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = list[TokenId]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A seed that torch's generators accept."""
FinishReason = Literal["stop", "length", "abort"]
"""Why sampling ended: at a stop token; at the limit of tokens, which `Sample.truncated` and
`Rounds` ask for; or by the engine, after which its clients sample again. An engine's other words,
as vLLM's `error` and `repetition`, are an `abort`. The protocol of servers has the same words
(`extensions/fleets/conformance.py`)."""


@dataclass(frozen=True)
class Request:
    """One prompt and as many completions as there are seeds, each with a random stream of its
    own."""

    id: str
    prompt_ids: Ids
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=4096)]


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Completion:
    """A completion of the policy. Third-party engines return it, too, so the type of each value is
    checked.

    A field that is added needs a default, as servers of third parties do not send it, and an
    unknown field is an error for clients of an earlier version (`inference/engines/_client.py`).
    `inference/rounds.py: _join` and `formats/carried.py: read_carried` make completions anew from
    the fields that they know, and `inference/multi_turn.py` an `Episode`: they drop any other.

    Attributes:
        ids: with the stop token, where there is one.
        logprobs: natural logarithms, one for each of `ids`, of the sampled distribution
            (temperature applied; at temperature 0 of the distribution at temperature 1).
        start_version, end_version: of the weights that made the first and the last token.
        versions: of each token, where they differ; else empty.
        prompt_logprobs: at temperature 1, of each id of the prompt but the first, where they were
            asked for.
    """

    ids: Ids
    logprobs: list[float]
    finish_reason: FinishReason
    start_version: int
    end_version: int
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Episode(Completion):
    """A completion of several turns. Its `ids` are all after the first prompt. Those of replies
    have a log-probability of 0 and the version of the turn before.

    Attributes:
        mask: whether each id was sampled.
        last: the ids of the last turn.
        facts: `turns`, the environment's `reward`, and `escape` where the policy tried to get out.
    """

    mask: list[bool] = field(default_factory=list)
    last: Ids = field(default_factory=list)
    facts: JsonObject = field(default_factory=dict)


def request_id(group: str, sample: int) -> str:
    """Name one completion of a group; names sort as they were submitted."""
    return f"{group}-s{sample:02d}"


def make_rows(
    tokenizer: Any, row: JsonMapping, request: Request, completions: Sequence[Completion]
) -> list[JsonObject]:
    """Make the rows of one prompt's completions, as `SCHEMA` has them; `row` is the prompt's own,
    and `request.id` names the group."""
    # The prompt's row has everything that later stages need, so that they need not read the data.
    rows: list[JsonObject] = []
    for sample, completion in enumerate(completions):
        values = {
            "request_id": request_id(request.id, sample),
            "group": request.id,
            "id": row["id"],
            "prompt_ids": request.prompt_ids,
            "completion_ids": completion.ids,
            "logprobs": completion.logprobs,
            "loss_mask": get_sampled_mask(completion),
            "policy_versions": get_versions(completion),
            "finish_reason": completion.finish_reason,
            "prompt": row["prompt"],
            "answer": row["answer"],
            "reward_spec": row["reward"],
        }
        rows.append(values | build_reward_inputs(tokenizer, row, completion))
    return rows


def open_rows(
    artifact: Artifact, file: str, columns: Iterable[str], flag: str, maker: str
) -> pq.ParquetFile:
    """Open a Parquet file of input `flag`, made by `maker`. Raises UserError: no file, no such
    column, no rows."""
    table = pq.ParquetFile(artifact.part(file, flag, f"give it what {maker} made"))
    address = f"{artifact.url}/{file}"
    for column in columns:
        if column not in table.schema_arrow.names:
            raise UserError(flag, column, f"is not a column of {address}; run {maker} again")
    if not table.metadata.num_rows:
        raise UserError(flag, address, f"has no rows; run {maker} with more data")
    return table


def read_rows(
    file: pq.ParquetFile, indices: Sequence[int], columns: Sequence[str] = ()
) -> list[JsonObject]:
    """Read rows of a Parquet file by their indices, all columns or these, in the order of
    `indices`; at most a row group is in memory."""
    groups = range(file.metadata.num_row_groups)
    sizes = [file.metadata.row_group(group).num_rows for group in groups]
    ends = list(itertools.accumulate(sizes))
    # Each row group is unpacked once, however its rows are spread over `indices`.
    indices_by_group: dict[int, list[int]] = {}
    for index in indices:
        indices_by_group.setdefault(bisect.bisect_right(ends, index), []).append(index)
    rows_by_index: dict[int, JsonObject] = {}
    for group, members in indices_by_group.items():
        start = ends[group] - sizes[group]
        table = file.read_row_group(group, columns=list(columns) or None)
        rows = table.take([index - start for index in members]).to_pylist()
        rows_by_index.update(zip(members, rows))
    return [rows_by_index[index] for index in indices]


def write_rollouts(
    path: Path, rows: Iterable[JsonMapping], metadata: Mapping[str, str] | None = None
) -> None:
    """Write rollouts to a Parquet file, with `metadata` in its schema; a row group's rows are in
    memory at once."""
    rows = iter(rows)
    with pq.ParquetWriter(path, SCHEMA.with_metadata(metadata)) as out:
        while part := list(itertools.islice(rows, ROWS)):
            out.write_table(pa.Table.from_pylist(part, schema=SCHEMA))


def build_reward_inputs(tokenizer: Any, row: JsonMapping, completion: Completion) -> dict[str, str]:
    """Build what rewards read of a completion: the last turn's text, and metadata with the
    episode.

    The key ``environment`` of the metadata has `turns`, `reward` and `transcript`: docs/training.md
    promises them to rewards, and `rewards/environment.py` reads ``reward``.
    """
    text = decode_ids(tokenizer, completion.ids)
    if not isinstance(completion, Episode):
        return {"completion": text, "metadata": row["metadata"]}
    # Rewards judge what the policy said last. What led there is in the metadata.
    metadata = json.loads(row["metadata"] or "{}")
    metadata["environment"] = completion.facts | {"transcript": text}
    return {
        "completion": decode_ids(tokenizer, completion.last),
        "metadata": json.dumps(metadata, sort_keys=True),
    }


def get_versions(completion: Completion) -> list[int]:
    """Return for each id of a completion the version that made it."""
    # Engines that never load weights during a generation leave them out.
    return completion.versions or [completion.start_version] * len(completion.ids)


def get_sampled_mask(completion: Completion) -> list[bool]:
    """Return for each id of a completion whether the policy sampled it."""
    return completion.mask if isinstance(completion, Episode) else [True] * len(completion.ids)
