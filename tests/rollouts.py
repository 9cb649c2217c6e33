"""Rollouts with scores, made without an engine, for tests of what shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.formats.rollouts import FILE, SCHEMA

SCORED = pa.schema(
    [*SCHEMA, ("outcome", pa.string()), ("score", pa.float32()), ("breakdown", pa.string())]
)
SAMPLES = 4
"""Completions of a prompt."""


def commit_scored_rollouts(
    run: Path,
    iteration: int,
    texts: list[str],
    ids: list[list[int]],
    policy: Artifact,
    *,
    prompt: str = "",
    group: int = 64,
) -> None:
    """Commit rollouts of a policy and their scores; of each group the first and the last are right, one has no score.

    Args:
        ids: of each completion; its second token is from a tool.
        prompt: what stands before the number of each prompt.
        group: rows in a row group.
    """
    rows: list[dict[str, Any]] = []
    for place, (text, tokens) in enumerate(zip(texts, ids)):
        number, sample = divmod(place, SAMPLES)
        unsure, right = sample == 2, sample in (0, 3)
        rows.append(
            {
                **dict.fromkeys(SCORED.names, ""),
                **{
                    "request_id": f"g{number}-s{sample}",
                    "group": f"g{number}",
                    "id": f"p{number}",
                    "prompt_ids": [1],
                },
                **{
                    "prompt": f"{prompt}{number}",
                    "completion": text,
                    "answer": f"answer {number}",
                    "finish_reason": "stop",
                },
                **{"completion_ids": tokens, "logprobs": [-0.5 * i for i in range(len(tokens))]},
                **{
                    "loss_mask": [i != 1 for i in range(len(tokens))],
                    "policy_versions": [iteration] * len(tokens),
                },
                **{
                    "outcome": "unverifiable" if unsure else "score",
                    "score": None if unsure else float(right),
                },
                **{
                    "breakdown": json.dumps({"exact": "no number" if unsure else float(right)}),
                    "metadata": "{}",
                },
            }
        )
    facts = {"version": iteration, "sampling": {"temperature": 1.0}}
    at, table = f"{run}/iterations/{iteration}", pa.Table.from_pylist(rows, SCORED)
    draft = Draft(f"{at}/rollout")
    pq.write_table(table.select(SCHEMA.names), draft.path / FILE, row_group_size=group)
    about: dict[str, Any] = {
        "facts": facts,
        "timings": {"total": 2.0},
        "provenance": {"started": 10.0 * iteration},
    }
    made = draft.commit(
        stage="rollout", role="sampler", kind="rollouts", inputs={"policy": policy.ref}, **about
    )
    draft = Draft(f"{at}/reward")
    pq.write_table(table, draft.path / "rewards.parquet", row_group_size=group)
    inputs, results = (
        {"rollouts": f"{at}/rollout@{made.digest}"},
        {"mean_reward": 0.5 + iteration / 10_000},
    )
    draft.commit(
        stage="reward", role="scorer", kind="rewards", inputs=inputs, results=results, **about
    )
