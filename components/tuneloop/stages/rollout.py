"""Sample completions from the policy, with the log-probabilities that training needs.

What samples is chosen by `inference/generate.py`. The trainer trusts these columns: ids,
log-probabilities and versions of each token.

Tests: `tests/unit/stages/test_rollout.py`, `test_carry.py`, `test_too_long.py`.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pyarrow.parquet as pq
from pydantic import AfterValidator, Field, ValidationInfo

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.seeds import derive_seed, draw_indices, permute_index
from tuneloop.formats import rollouts
from tuneloop.formats.carried import CARRIED, METADATA, read_carried
from tuneloop.formats.facts import PromptFacts, VersionFacts
from tuneloop.formats.rows import list_columns
from tuneloop.inference import generate
from tuneloop.inference.generate import SamplingOptions
from tuneloop.inference.prompt_room import Spares
from tuneloop.inference.proof import describe_blind_spot, read_canary
from tuneloop.inference.rounds import Rounds, bound_staleness


def _check_rounds(size: int | None, info: ValidationInfo) -> int | None:
    max_tokens = info.data.get("max_tokens")
    if size and info.data.get("environment") is not None:
        raise ValueError(
            "an environment's state cannot continue in another iteration: unset one of the two"
        )
    if size and max_tokens and max_tokens % size:
        raise ValueError(f"must divide max_tokens ({max_tokens})")
    return size


def _check_oversampling(size: int | None, info: ValidationInfo) -> int | None:
    """Check how many groups are sampled at a time, beside the fields that come before it."""
    batch_size = info.data.get("prompts_per_iteration")
    is_carrying = bool(info.data.get("carry_after"))
    if is_carrying and not size:
        raise ValueError(
            "goes with carry_after: set it to the groups under way, at least prompts_per_iteration"
        )
    if size and batch_size and size < batch_size:
        raise ValueError(
            f"must be at least prompts_per_iteration ({batch_size}), the groups that the update "
            "takes"
        )
    # With carry_after the groups are chosen by their ends, whatever their rewards.
    if size and info.data.get("n") == 1 and not is_carrying:
        remedy = "set n to 2 or more, or leave this out"
        raise ValueError(f"no group would be kept, as a single reward does not differ: {remedy}")
    return size


class RolloutOptions(SamplingOptions):
    """Options of sampling: never top-p or top-k, whose log-probabilities would bias the importance
    ratios.

    An option by which carried completions would differ from new ones belongs into
    `_shared_options`, too, and one that an evaluation is to follow into `config/loop.py:
    INHERITED`.
    """

    flags: ClassVar[tuple[str, ...]] = (
        "engine",
        "endpoint",
        "iteration",
        "prompts_per_iteration",
        "n",
        "temperature",
        *generate.SHARED_FLAGS,
        # These are checked against the flags before them.
        "carry_after",
        "oversampled_prompts",
    )

    iteration: int = Field(0, ge=0, description="which batch of prompts")
    prompts_per_iteration: int = Field(16, ge=1, description="prompts in a batch")
    n: int = Field(8, ge=1, le=100, description="completions a prompt")
    carry_after: Annotated[int | None, AfterValidator(_check_rounds)] = Field(
        None,
        ge=1,
        description="tokens that all completions grow by in a round; once prompts_per_iteration "
        "groups have ended, the others continue in the next iteration, with the tokens that they "
        "have",
    )
    oversampled_prompts: Annotated[int | None, AfterValidator(_check_oversampling)] = Field(
        None,
        ge=1,
        description="sample so many prompts; the update uses the first prompts_per_iteration whose "
        "rewards differ, or with carry_after the first that have ended",
        validate_default=True,
    )
    temperature: float = Field(1.0, ge=0.01, description="temperature of sampling")


@generate.sampling_stage("rollouts", "sampler", completions=int, mean_length=float)
def rollout(stage: Stage, policy: Input, prompts: Input, *, options: RolloutOptions) -> Results:
    """Generate `n` completions for each prompt of the iteration's batch; with an environment, `n`
    episodes.

    The batch is a function of (seed, iteration): prompts come from a permutation of
    ``train.parquet`` for each epoch. A prompt that leaves too little room for a completion is
    skipped, and another takes its place, a function of (seed, iteration), too (``data.too_long``).
    With `oversampled_prompts` it has that many, and ``facts.groups`` tells the update how many of
    their groups to keep. The batch counts only if the engine proves that it serves `policy`: by the
    digest that it echoes, by the canary's log-probabilities, and by the version on every
    completion.

    With `carry_after` there are `oversampled_prompts` unfinished groups: first those that `policy`
    carries from the previous iteration, then new ones. The batch is the first
    `prompts_per_iteration` groups to end. The others are written to ``carried.parquet``, for the
    checkpoint that is trained on this batch; ``facts.carried`` counts both.

    Raises:
        UserError: data or options that cannot work.
        Retryable: the server is down, closes the connection, or does not answer.
        StaleWeights: the engine serves other weights.
    """
    train = rollouts.open_rows(prompts, "train.parquet", generate.COLUMNS, "--prompts", "data_prep")
    columns = list_columns(generate.COLUMNS, train.schema_arrow.names)
    size = options.oversampled_prompts or options.prompts_per_iteration
    rounds, drawn = _open_rounds(stage, policy, options)
    begun_groups = rounds.unfinished if rounds else {}
    indices = draw_indices(
        train.metadata.num_rows,
        drawn,
        size - len(begun_groups),
        partial(derive_seed, options.seed, "prompts"),
    )
    # Groups that have begun come first: they have waited longest for their end.
    rows = [dict(group.row) for group in begun_groups.values()]
    rows += rollouts.read_rows(train, indices, columns)
    # The names are part of seeds and of request ids; `evaluate` has an e for the p.
    new_names = [f"i{options.iteration:06d}-p{number:05d}" for number in range(len(indices))]
    names = [*begun_groups, *new_names]
    if len(set(names)) < len(names):
        remedy = "has begun groups that the policy carries; use a later iteration"
        raise UserError("--iteration", options.iteration, remedy)
    # A prompt that is too long has the same substitute in every attempt.
    seed = derive_seed(options.seed, "spares", options.iteration)
    spares = Spares(
        list_spares(train, columns, seed, {row["id"] for row in rows}),
        PromptFacts.read(prompts).length_policy,
    )
    with generate.open_engine(options) as engine:
        job = generate.Job(rows, names, options.n, options, rounds, spares)
        tokenizer, requests, completions = generate.generate_completions(stage, policy, job, engine)
    groups: list[Group] = [*zip(rows, requests, completions)]
    more_metrics: dict[str, float] = {}
    if rounds:
        ended, unended = rounds.divide_groups(completions, options.max_tokens)
        carried = [groups[index] for index in unended]
        groups = [groups[index] for index in ended]
        # The next iteration draws on from here, and refuses groups of other options.
        state = {"drawn": drawn + len(indices), "options": _shared_options(options)}
        metadata = {METADATA: json.dumps(state, sort_keys=True)}
        _write(stage.out / CARRIED, tokenizer, carried, metadata)
        note_carried(
            stage, policy, groups, begun_count=len(begun_groups), carried_count=len(carried)
        )
        more_metrics["carried"] = len(carried)
        more_metrics["staleness"] = stage.facts["staleness"]["mean"]
    elif options.oversampled_prompts:
        stage.facts["groups"] = {"asked": size, "wanted": options.prompts_per_iteration}
    warn_of_blind_spot(stage, policy, options.iteration)
    _write(stage.out / rollouts.FILE, tokenizer, groups)
    sampled = [completion for *_, group in groups for completion in group]
    mean_length = record_metrics(stage, options.iteration, sampled, more_metrics)
    return {"completions": len(sampled), "mean_length": mean_length}


# `rollouts.make_rows` takes its three parts in this order.
Group = tuple[Mapping[str, Any], rollouts.Request, Sequence[rollouts.Completion]]
"""A row of prompts, its request, and its completions."""


def record_metrics(
    stage: Stage,
    iteration: int,
    sampled: Sequence[rollouts.Completion],
    more_metrics: Mapping[str, float],
) -> float:
    """Record the metrics of an iteration's completions, and return their mean length in tokens.

    `runs/alarms.py` looks for ``mean_length``; `ui/static/dom.js` has titles for these and for the
    figures of the canary.
    """
    mean_length = sum(len(completion.ids) for completion in sampled) / len(sampled)
    truncated = sum(completion.finish_reason == "length" for completion in sampled)
    stage.metric(
        iteration,
        completions=len(sampled),
        mean_length=mean_length,
        cut=truncated / len(sampled),
        **more_metrics,
        # How well the engine has proved that it serves this policy.
        **stage.facts["canary"],
    )
    return mean_length


def note_carried(
    stage: Stage,
    policy: Artifact,
    batch: Sequence[Group],
    *,
    begun_count: int,
    carried_count: int,
) -> None:
    """Record how many groups were carried here and on, and the staleness of the `batch` alone."""
    # What was generated includes the groups that go on, whose tokens are not learned from yet.
    bound = int(stage.facts["staleness"]["bound"])
    completions = [group for *_, group in batch]
    stage.facts["staleness"] = generate.measure_staleness(policy, completions, bound)
    stage.facts["carried"] = {"taken": begun_count, "left": carried_count}


def warn_of_blind_spot(stage: Stage, policy: Artifact, iteration: int) -> None:
    """Warn, once in a run, where the engine cannot prove that it does not serve the version before.

    The checkpoint names the version from which on this is expected. Where it expects none, and the
    engine is noisier than that, the first version of the loop that has one before it is taken.
    """
    statement = stage.facts["proof"]
    if statement["tells_versions_apart"]:
        return
    since = read_canary(policy).indistinct_since
    version = VersionFacts.read(policy).version
    if since == version or (since is None and iteration == 1):
        stage.log(describe_blind_spot(policy, statement, stage.facts["engine"]))


def list_spares(
    train: pq.ParquetFile, columns: Sequence[str], seed: int, excluded: Set[str]
) -> Iterator[JsonObject]:
    """Yield the rows of `train` in a random order of `seed`, without those whose ids are
    `excluded`.
    """
    total = train.metadata.num_rows
    # One by one, since few are needed, if any.
    for number in range(total):
        (row,) = rollouts.read_rows(train, [permute_index(number, total, seed)], columns)
        if row["id"] not in excluded:
            yield row


def _open_rounds(
    stage: Stage, policy: Artifact, options: RolloutOptions
) -> tuple[Rounds | None, int]:
    """Return the rounds of this iteration with the groups to continue, and how many prompts were
    drawn before.
    """
    batch_size = options.prompts_per_iteration
    begun_groups, state = read_carried(policy)
    shared_options = _shared_options(options)
    # A fork may sample in another way than the run that it begins from.
    if begun_groups and state["options"] != shared_options:
        stage.log(
            f"{len(begun_groups)} carried groups are dropped: they were sampled with "
            f"{state['options']}, not {shared_options}"
        )
        begun_groups = {}
    if not (options.carry_after and options.oversampled_prompts):
        return None, options.iteration * (options.oversampled_prompts or batch_size)
    # `config/loop.py: LoopPipelineConfig.max_staleness` allows the trainer the same age.
    rounds_per_completion = options.max_tokens // options.carry_after
    oldest = bound_staleness(rounds_per_completion, options.oversampled_prompts, batch_size)
    rounds = Rounds(options.carry_after, batch_size, oldest, begun_groups)
    # A policy that no loop has trained yet carries no state: count as if each iteration before
    # had drawn one batch.
    return rounds, state.get("drawn", options.iteration * batch_size)


def _shared_options(options: RolloutOptions) -> JsonObject:
    """Return the options that must be equal for all groups of a batch, carried or new.

    They are written beside carried groups. With one more here, groups that an earlier release
    carried are dropped, as they lack it.
    """
    shared = {
        "prompts_per_iteration",
        "n",
        "carry_after",
        "oversampled_prompts",
        "temperature",
        "max_tokens",
    }
    return options.model_dump(include=shared)


def _write(
    path: Path, tokenizer: Any, groups: Iterable[Group], metadata: Mapping[str, str] | None = None
) -> None:
    """Write groups of completions as Parquet, whose schema has this `metadata`."""
    rows = (rollouts.make_rows(tokenizer, *group) for group in groups)
    rollouts.write_rollouts(path, itertools.chain.from_iterable(rows), metadata)


if __name__ == "__main__":
    rollout.main()
