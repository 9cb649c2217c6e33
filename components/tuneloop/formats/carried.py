"""Groups that an iteration leaves to the next: `rollout` writes them, `reward` and `policy_update` pass them on. So the
checkpoint that the next `rollout` samples with has them, and a loop needs no other state."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.formats.rollouts import Completion, Ids

CARRIED = "carried.parquet"
"""The file of the carried groups; its columns are those of ``rollouts.parquet``."""
ABOUT = "tuneloop"
"""Key of the Parquet schema's metadata: JSON with ``drawn``, the prompts taken so far, and ``options`` of sampling."""


@dataclass(frozen=True)
class Begun:
    """A group with completions that may go on; `row` is the prompt's own."""

    row: Mapping[str, Any]
    prompt_ids: Ids
    completions: list[Completion]


def read_carried(policy: Artifact) -> tuple[dict[str, Begun], dict[str, Any]]:
    """Read the groups that a checkpoint carries, by name and in order, and their metadata; both may be empty."""
    if CARRIED not in policy.manifest.files:
        return {}, {}
    table = pq.read_table(policy.part(CARRIED))
    groups: dict[str, Begun] = {}
    for row in table.to_pylist():
        own = {**row, "reward": row["reward_spec"]}
        versions = row["policy_versions"]
        said = Completion(
            row["completion_ids"],
            row["logprobs"],
            row["finish_reason"],
            versions[0],
            versions[-1],
            versions,
        )
        groups.setdefault(row["group"], Begun(own, row["prompt_ids"], [])).completions.append(said)
    return groups, json.loads(table.schema.metadata[ABOUT.encode()])


def pass_carried(source: Artifact, out: Path) -> None:
    """Copy the carried groups of an artifact, where it has them, into the directory of another."""
    if CARRIED in source.manifest.files:
        shutil.copyfile(source.part(CARRIED), out / CARRIED)
