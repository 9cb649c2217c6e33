"""The file that `rollout` writes and `reward`, `policy_update` and people read: its columns, and how rows are made."""

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
from tuneloop.formats.tokens import decode_ids

FILE = "rollouts.parquet"
ROWS = 1024
"""Rows in a row group."""
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("request_id", "group", "id"), pa.string()),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.bool_()),
        "policy_versions": pa.list_(pa.int32()),
        **dict.fromkeys(
            ("finish_reason", "prompt", "completion", "answer", "reward_spec", "metadata"),
            pa.string(),
        ),
    }
)
TEXTS = ("id", "prompt", "completion", "answer")
SAMPLES = pa.schema(
    {**dict.fromkeys(TEXTS, pa.string()), "score": pa.float32(), "outcome": pa.string()}
)
"""Columns of ``samples.parquet``, which has the completions that an evaluation scored."""


def request_id(group: str, sample: int) -> str:
    """Name one completion of a group; names sort as they were submitted."""
    return f"{group}-s{sample:02d}"


def make_rows(
    tokenizer: Any, row: Mapping[str, Any], request: "Request", completions: "Sequence[Completion]"
) -> list[dict[str, Any]]:
    """Make the rows of one prompt's completions; `row` is the prompt's own, `request.id` names the group."""
    return [
        {
            "request_id": request_id(request.id, sample),
            "group": request.id,
            "id": row["id"],
            "prompt_ids": request.prompt_ids,
            "completion_ids": said.ids,
            "logprobs": said.logprobs,
            "loss_mask": get_sampled_mask(said),
            "policy_versions": get_versions(said),
            "finish_reason": said.finish_reason,
            "prompt": row["prompt"],
            "answer": row["answer"],
            "reward_spec": row["reward"],
            **build_reward_inputs(tokenizer, row, said),
        }
        for sample, said in enumerate(completions)
    ]


def open_rows(
    artifact: Artifact, file: str, columns: Iterable[str], flag: str, maker: str
) -> pq.ParquetFile:
    """Open a Parquet file of input `flag`, made by `maker`. Raises UserError: no file, no such column, no rows."""
    table = pq.ParquetFile(artifact.part(file, flag, f"give it what {maker} made"))
    for column in columns:
        if column not in table.schema_arrow.names:
            raise UserError(
                flag, column, f"is not a column of {artifact.url}/{file}; run {maker} again"
            )
    if not table.metadata.num_rows:
        raise UserError(flag, f"{artifact.url}/{file}", f"has no rows; run {maker} with more data")
    return table


def read_rows(
    file: pq.ParquetFile, places: Sequence[int], columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Read the rows at `places` of a Parquet file, all columns or these; at most a row group is in memory."""
    sizes = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
    ends, groups = [*itertools.accumulate(sizes)], dict[int, list[int]]()
    for place in places:
        groups.setdefault(bisect.bisect_right(ends, place), []).append(place)
    by_place: dict[int, dict[str, Any]] = {}
    for k, wanted in groups.items():
        part = file.read_row_group(k, columns=[*columns] or None)
        by_place |= zip(
            wanted, part.take([place - ends[k] + sizes[k] for place in wanted]).to_pylist()
        )
    return [by_place[place] for place in places]


def write_rollouts(
    path: Path, rows: Iterable[Mapping[str, Any]], about: Mapping[str, str] | None = None
) -> None:
    """Write rollouts to a Parquet file, with metadata `about`; a row group's rows are in memory at once."""
    rows = iter(rows)
    with pq.ParquetWriter(path, SCHEMA.with_metadata(about)) as out:
        while part := list(itertools.islice(rows, ROWS)):
            out.write_table(pa.Table.from_pylist(part, schema=SCHEMA))


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = list[TokenId]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A seed that torch's generators accept."""


@dataclass(frozen=True)
class Request:
    """One prompt and as many completions as there are seeds, each with a random stream of its own."""

    id: str
    prompt_ids: Ids
    seeds: Annotated[list[Seed], Field(min_length=1, max_length=4096)]


FinishReason = Literal["stop", "length", "abort"]


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Completion:
    """A completion of the policy. Third-party engines return it, too, so the type of each value is checked.

    Attributes:
        ids: with the stop token, where there is one.
        logprobs: natural logarithms, one for each of `ids`, of the sampled distribution (temperature applied; at
            temperature 0 of the distribution at temperature 1).
        start_version, end_version: of the weights that made the first and the last token.
        versions: of each token, where they differ; else empty.
        prompt_logprobs: at temperature 1, of each id of the prompt but the first, where they were asked for.
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
    """A completion of several turns: `ids` are all after the first prompt, with a log-probability of 0 for those of
    replies, which have the version of the turn before. `mask`: whether each id was sampled; `last`: the ids of the last
    turn; `about`: `turns`, the environment's `reward`, and `escape` where the policy tried to get out."""

    mask: list[bool] = field(default_factory=list)
    last: Ids = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


def build_reward_inputs(tokenizer: Any, row: Mapping[str, Any], said: Completion) -> dict[str, str]:
    """Build what rewards read of a completion: the last turn's text, and metadata with the episode."""
    if not isinstance(said, Episode):
        return {"completion": decode_ids(tokenizer, said.ids), "metadata": row["metadata"]}
    about = {**said.about, "transcript": decode_ids(tokenizer, said.ids)}
    metadata = {**json.loads(row["metadata"] or "{}"), "environment": about}
    return {
        "completion": decode_ids(tokenizer, said.last),
        "metadata": json.dumps(metadata, sort_keys=True),
    }


def get_versions(said: Completion) -> list[int]:
    """Return for each id of a completion the version that made it."""
    return said.versions or [said.start_version] * len(said.ids)


def get_sampled_mask(said: Completion) -> list[bool]:
    """Return for each id of a completion whether the policy sampled it."""
    return said.mask if isinstance(said, Episode) else [True] * len(said.ids)
