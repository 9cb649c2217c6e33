"""Groups that an iteration leaves to the next: `rollout` writes them, `reward` and `policy_update`
pass them on. So the checkpoint that the next `rollout` samples with has them, and a loop needs no
other state.

`config/loop.py` computes from the same settings how old carried tokens can be (`max_staleness`). A
stage that is put between `rollout` and `policy_update` has to call `pass_carried` as `model_reward`
does, or the groups are lost. Tests: `tests/unit/stages/test_carry.py`.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.rollouts import Completion, Ids

CARRIED = "carried.parquet"
"""The file of the carried groups; its columns are those of ``rollouts.parquet``."""
METADATA = "tuneloop"
"""Key of the Parquet schema's metadata: JSON with ``drawn``, the prompts taken so far, and
``options`` of sampling. `stages/rollout.py` writes both, and drops carried groups whose options are
others (`_shared_options`)."""


@dataclass(frozen=True)
class OpenGroup:
    """A group with completions that may go on; `row` is the prompt's own."""

    row: JsonMapping
    prompt_ids: Ids
    completions: list[Completion]


def read_carried(policy: Artifact) -> tuple[dict[str, OpenGroup], JsonObject]:
    """Read the groups that a checkpoint carries, by name and in order, and their metadata; both may
    be empty.

    Each completion is made anew from its columns: a field that is added to `Completion` has to be a
    column of `formats/rollouts.py: SCHEMA`, and an argument here. Episodes are never carried, so
    their fields are not read (`stages/rollout.py` refuses an environment together with rounds).
    """
    if CARRIED not in policy.manifest.files:
        return {}, {}
    table = pq.read_table(policy.part(CARRIED))
    groups: dict[str, OpenGroup] = {}
    for row in table.to_pylist():
        versions = row["policy_versions"]
        completion = Completion(
            ids=row["completion_ids"],
            logprobs=row["logprobs"],
            finish_reason=row["finish_reason"],
            start_version=versions[0],
            end_version=versions[-1],
            versions=versions,
        )
        # A prompt's row calls the column otherwise.
        prompt_row = row | {"reward": row["reward_spec"]}
        group = groups.setdefault(row["group"], OpenGroup(prompt_row, row["prompt_ids"], []))
        group.completions.append(completion)
    return groups, json.loads(table.schema.metadata[METADATA.encode()])


def pass_carried(source: Artifact, out: Path) -> None:
    """Copy the carried groups of an artifact, where it has them, into the directory of another."""
    if CARRIED in source.manifest.files:
        shutil.copyfile(source.part(CARRIED), out / CARRIED)
