"""Scored rollouts, read and checked for `policy_update`.

Every rank holds all of them. As arrays a token takes some 25 bytes; as Python objects it would take
hundreds.

`policy_update` reads them once, on each rank. `training/mini_batches.py` then sets advantages and
which samples are used, and `training/policy_gradient.py` their log-probabilities. Tests:
`tests/unit/stages/test_policy_update.py`.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.facts import CheckpointFacts, RewardFacts
from tuneloop.formats.rollouts import REWARDS_FILE, ROWS, open_rows
from tuneloop.formats.token_files import Document

TOKENS = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "policy_versions")
COLUMNS = ("request_id", "group", *TOKENS, "finish_reason", "outcome", "score")
"""The columns that are read (`formats/rollouts.py: SCHEMA` and `JUDGEMENTS`); those of `TOKENS`
have one value a token. Each is required: rewards of an earlier release without one are refused.
"""


@dataclass(slots=True)
class Sample:
    """One rollout; arrays hold one float32 value a target token, in order.

    `read_samples` sets the fields without a default, `mini_batches.set_advantages` sets
    `advantages`, `counted` and `used`, and `policy_gradient.Objective.score` sets `old` and
    `reference`.

    Attributes:
        document: the tokens; those that the policy sampled are its targets.
        group: 0 … G-1.
        score: None unless it was scored.
        length: number of tokens that the policy sampled, without an environment's replies between
            its turns.
        truncated: whether sampling ended at the token limit.
        age: how many versions older than the policy its oldest token is.
        engine: log-probabilities under which it was sampled.
        advantages: what `PolicyGradient.advantages` gives.
        counted: whether it counts in the mean of the loss.
        used: whether it goes through the model.
        old: log-probabilities by the trainer before the first step, where there are several steps.
        reference: log-probabilities of the reference policy, where there is one.
    """

    id: str
    document: Document
    group: int
    score: float | None
    length: int
    truncated: bool
    age: int
    engine: "array[float]"
    advantages: "array[float]" = field(default_factory=lambda: array("f"))
    counted: bool = False
    used: bool = False
    old: "array[float]" = field(default_factory=lambda: array("f"))
    reference: "array[float]" = field(default_factory=lambda: array("f"))


def check_sampling(policy: Artifact, rewards: Artifact, max_staleness: int) -> float:
    """Check that rollouts can be learned from, and return their temperature.

    Raises:
        UserError: they are greedy, too old, or sampled by another policy.
    """
    facts = RewardFacts.read(rewards, "--rewards")
    version = CheckpointFacts.read(policy, "--policy").version
    age = version - facts.version
    if facts.digest != policy.manifest.digest and not 0 < age <= max_staleness:
        sampled = f"{rewards.url}, sampled by version {facts.version} ({facts.digest})"
        remedy = (
            f"--policy is version {version} ({policy.manifest.digest}); sample with it, or raise "
            "max_staleness"
        )
        raise UserError("--rewards", sampled, remedy)
    temperature = facts.sampling.temperature
    if temperature <= 0:
        remedy = "greedy rollouts have no distribution to train on; use 1.0"
        raise UserError("sampling.temperature", temperature, remedy)
    return temperature


def read_samples(rewards: Artifact, version: int, max_staleness: int) -> list[Sample]:
    """Read scored rollouts.

    Raises UserError: none, a missing column, a token's version out of bounds, wrong values.
    """
    # Groups are numbered as they come.
    groups: dict[str, int] = {}
    rows = _iterate_rows(open_rows(rewards, REWARDS_FILE, COLUMNS, "--rewards", "the stage reward"))
    return [
        _make_sample(row, groups.setdefault(row["group"], len(groups)), version, max_staleness)
        for row in rows
    ]


def select_groups(samples: Sequence[Sample], limit: int) -> tuple[list[Sample], dict[str, int]]:
    """Select the first `limit` groups whose scores differ: the dynamic sampling of DAPO (arXiv
    2503.14476, eq. 11).

    They are the first in the order of requests; those that ended first would favour short
    completions.

    Returns:
        Their samples, with groups renumbered; and how many groups were `asked` for, `kept`,
        `rejected` because their scores are equal or fewer than two, and `unused`.
    """
    scores_by_group: dict[int, set[float]] = {sample.group: set() for sample in samples}
    for sample in samples:
        if sample.score is not None:
            scores_by_group[sample.group].add(sample.score)
    # Equal rewards have no advantage over their mean: such a group would teach nothing.
    eligible = [group for group, scores in scores_by_group.items() if len(scores) > 1]
    number_by_group = {group: number for number, group in enumerate(eligible[:limit])}
    selected = [
        replace(sample, group=number_by_group[sample.group])
        for sample in samples
        if sample.group in number_by_group
    ]
    counts = {
        "asked": len(scores_by_group),
        "kept": len(number_by_group),
        "rejected": len(scores_by_group) - len(eligible),
        "unused": len(eligible) - len(number_by_group),
    }
    return selected, counts


def check_ids(samples: Sequence[Sample], vocab_size: int) -> None:
    """Check that all ids are in the vocabulary of the trained model.

    Raises:
        UserError: another tokenizer, or another model's engine, made them.
    """
    for sample in samples:
        ids = np.asarray(sample.document.ids)
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            raise UserError(
                f"ids of {sample.id}",
                int(wrong[0]),
                f"must be from 0 to {vocab_size - 1}; sample again",
            )


def _iterate_rows(table: pq.ParquetFile) -> Iterator[JsonObject]:
    """Yield rows whose `TOKENS` are NumPy arrays: as a Python object, a token would take some
    hundred bytes.
    """
    scalars = [name for name in COLUMNS if name not in TOKENS]
    for batch in table.iter_batches(ROWS, columns=list(COLUMNS)):
        for index, row in enumerate(batch.select(scalars).to_pylist()):
            for name in TOKENS:
                row[name] = batch[name][index].values.to_numpy(zero_copy_only=False)
            yield row


def _make_sample(row: JsonObject, group: int, version: int, max_staleness: int) -> Sample:
    """Make the sample of a row. Raises UserError at a value that cannot be trained on."""
    name = row["request_id"]
    prompt = row["prompt_ids"]
    mask = row["loss_mask"]
    versions = row["policy_versions"]
    _check_lengths(row)
    ids = np.concatenate([prompt, row["completion_ids"]])
    # A document holds int32, in which a larger id would become another one without an error.
    if ids.dtype.kind != "i" or not np.array_equal(ids, ids.astype(np.int32)):
        raise UserError(
            f"ids of {name}",
            f"{ids.dtype} up to {ids.max()}",
            "must be int32, as rollout writes them",
        )
    engine = row["logprobs"][mask.astype(bool)]
    is_finite = np.isfinite(engine)
    if not is_finite.all():
        remedy = "must be finite; sample with an engine that returns them"
        raise UserError(f"logprobs of {name}", float(engine[~is_finite][0]), remedy)
    # A request may span several versions of a served model, so each token has its own.
    wrong = versions[(versions < version - max_staleness) | (versions > version)]
    if len(wrong):
        remedy = f"the policy is version {version} and max_staleness {max_staleness}; sample again"
        raise UserError(f"policy_versions of {name}", int(wrong[0]), remedy)
    # An escape has a score only where the run punishes it (`escape_score` of the stage reward). The
    # score of any other kind of outcome (`rewards/outcomes.py: Kind`) is dropped here.
    score = row["score"] if row["outcome"] in ("score", "escape") else None
    if row["outcome"] == "score" and (score is None or not math.isfinite(score)):
        remedy = "must be a finite number where outcome is score; run reward again"
        raise UserError(f"score of {name}", score, remedy)
    targets = array("b", bytes(len(prompt)) + mask.astype(np.uint8).tobytes())
    # Arrays take a few bytes a token, where a list would hold an object for each.
    return Sample(
        id=name,
        document=Document(array("i", ids.astype(np.int32).tobytes()), targets),
        group=group,
        score=score,
        length=int(mask.sum()),
        truncated=row["finish_reason"] == "length",
        age=version - int(versions.min(initial=version)),
        engine=array("f", engine.astype(np.float32).tobytes()),
    )


def _check_lengths(row: JsonObject) -> None:
    """Check that each column of tokens has one value for each sampled token. Raises UserError."""
    length = len(row["completion_ids"])
    for column in ("logprobs", "loss_mask", "policy_versions"):
        count = len(row[column])
        if count != length:
            remedy = f"must be {length}, one a token"
            raise UserError(f"{column} of {row['request_id']}", count, remedy)
