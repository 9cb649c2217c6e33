"""The file that `rollout` writes and `reward`, `policy_update` and people read: its columns, and how rows are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.engines import Completion, Request
from tuneloop.episodes import mask, told

FILE = "rollouts.parquet"
ROWS = 1024
"""In a row group."""
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


def request_id(group: str, sample: int) -> str:
    """The name of one completion of a group; names sort as they were submitted."""
    return f"{group}-s{sample:02d}"


def make_rows(
    tokenizer: Any, row: Mapping[str, Any], request: Request, completions: Sequence[Completion]
) -> list[dict[str, Any]]:
    """Rows of one prompt's completions; `row` is the prompt's own, `request.id` names the group."""
    return [
        {
            "request_id": request_id(request.id, sample),
            "group": request.id,
            "id": row["id"],
            "prompt_ids": request.prompt_ids,
            "completion_ids": said.ids,
            "logprobs": said.logprobs,
            "loss_mask": mask(said),
            "policy_versions": said.versions or [said.start_version] * len(said.ids),
            "finish_reason": said.finish_reason,
            "prompt": row["prompt"],
            "answer": row["answer"],
            "reward_spec": row["reward"],
            **told(tokenizer, row, said),
        }
        for sample, said in enumerate(completions)
    ]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``rollouts.parquet`` into a directory; a row group's rows are in memory at once."""
    rows = iter(rows)
    with pq.ParquetWriter(path / FILE, SCHEMA) as out:
        while part := list(itertools.islice(rows, ROWS)):
            out.write_table(pa.Table.from_pylist(part, schema=SCHEMA))
