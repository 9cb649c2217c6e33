"""Sample completions from the policy, with the log-probabilities that training needs."""

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
    most = info.data.get("max_tokens")
    if size and info.data.get("environment") is not None:
        raise ValueError(
            "an environment's state cannot continue in another iteration: unset one of the two"
        )
    if size and most and most % size:
        raise ValueError(f"must divide max_tokens ({most})")
    return size


def _check_oversampling(asked: int | None, info: ValidationInfo) -> int | None:
    wanted, n, carrying = (
        info.data.get(name) for name in ("prompts_per_iteration", "n", "carry_after")
    )
    if carrying and not asked:
        raise ValueError(
            "goes with carry_after: set it to the groups under way, at least prompts_per_iteration"
        )
    if asked and wanted and asked < wanted:
        raise ValueError(
            f"must be at least prompts_per_iteration ({wanted}), the groups that the update takes"
        )
    if asked and n == 1 and not carrying:
        remedy = "set n to 2 or more, or leave this out"
        raise ValueError(f"no group would be kept, as a single reward does not differ: {remedy}")
    return asked


class RolloutOptions(SamplingOptions):
    """Options of sampling: never top-p or top-k, whose log-probabilities would bias the importance ratios."""

    flags: ClassVar[tuple[str, ...]] = (
        *("engine", "endpoint", "iteration", "prompts_per_iteration", "n", "temperature"),
        *(
            *generate.SHARED_FLAGS,
            "carry_after",
            "oversampled_prompts",
        ),  # checked against the flags before them
    )

    iteration: int = Field(0, ge=0, description="which batch of prompts")
    prompts_per_iteration: int = Field(16, ge=1, description="prompts in a batch")
    n: int = Field(8, ge=1, le=100, description="completions a prompt")
    carry_after: Annotated[int | None, AfterValidator(_check_rounds)] = Field(
        None,
        ge=1,
        description="tokens that all completions grow by in a round; once prompts_per_iteration groups have ended, the "
        "others continue in the next iteration, with the tokens that they have",
    )
    oversampled_prompts: Annotated[int | None, AfterValidator(_check_oversampling)] = Field(
        None,
        ge=1,
        description="sample so many prompts; the update uses the first prompts_per_iteration whose rewards differ, "
        "or with carry_after the first that have ended",
        validate_default=True,
    )
    temperature: float = Field(1.0, ge=0.01, description="temperature of sampling")


@generate.sampling_stage("rollouts", "sampler", completions=int, mean_length=float)
def rollout(stage: Stage, policy: Input, prompts: Input, *, options: RolloutOptions) -> Results:
    """Generate `n` completions for each prompt of the iteration's batch; with an environment, `n` episodes.

    The batch is a function of (seed, iteration): prompts come from a permutation of ``train.parquet`` for each epoch.
    A prompt that leaves too little room for a completion is skipped, and another takes its place, a function of (seed,
    iteration), too (``data.too_long``).
    With `oversampled_prompts` it has that many, and ``facts.groups`` tells the update how many of their groups to keep.
    The batch counts only if the engine proves that it serves `policy`: by the digest that it echoes, by the canary's
    log-probabilities, and by the version on every completion.

    With `carry_after` there are `oversampled_prompts` unfinished groups: first those that `policy` carries from the
    previous iteration, then new ones. The batch is the first `prompts_per_iteration` groups to end. The others are
    written to ``carried.parquet``, for the checkpoint that is trained on this batch; ``facts.carried`` counts both.

    Raises:
        UserError: data or options that cannot work.
        Retryable: the server is down, closes the connection, or does not answer.
        StaleWeights: the engine serves other weights.
    """
    train = rollouts.open_rows(prompts, "train.parquet", generate.COLUMNS, "--prompts", "data_prep")
    total, iteration, wanted = (
        train.metadata.num_rows,
        options.iteration,
        options.prompts_per_iteration,
    )
    size, told = options.oversampled_prompts or wanted, dict[str, float]()
    rounds, drawn = _open_rounds(stage, policy, options)
    begun = rounds.unfinished if rounds else {}
    places = draw_indices(
        total, drawn, size - len(begun), partial(derive_seed, options.seed, "prompts")
    )
    columns = list_columns(generate.COLUMNS, train.schema_arrow.names)
    chosen = [
        *(dict(group.row) for group in begun.values()),
        *rollouts.read_rows(train, places, columns),
    ]
    seed = derive_seed(options.seed, "spares", iteration)
    spares = Spares(
        list_spares(train, columns, seed, {row["id"] for row in chosen}),
        PromptFacts.read(prompts).length_policy,
    )
    groups = [*begun, *(f"i{iteration:06d}-p{p:05d}" for p in range(len(places)))]
    if len({*groups}) < len(groups):
        raise UserError(
            "--iteration",
            iteration,
            "has begun groups that the policy carries; use a later iteration",
        )
    with generate.open_engine(options) as engine:
        job = generate.Job(chosen, groups, options.n, options, rounds, spares)
        tokenizer, requests, completions = generate.generate_completions(stage, policy, job, engine)
    batch = every = [*zip(chosen, requests, completions)]
    if rounds:
        batch, left = (
            [every[i] for i in some]
            for some in rounds.divide_groups(completions, options.max_tokens)
        )
        about = {"drawn": drawn + len(places), "options": _shared_options(options)}
        _write(stage.out / CARRIED, tokenizer, left, {METADATA: json.dumps(about, sort_keys=True)})
        bound = int(stage.facts["staleness"]["bound"])
        stage.facts["staleness"] = generate.measure_staleness(
            policy, [said for *_, said in batch], bound
        )
        stage.facts["carried"] = {"taken": len(begun), "left": len(left)}
        told = {"carried": len(left), "staleness": stage.facts["staleness"]["mean"]}
    elif options.oversampled_prompts:
        stage.facts["groups"] = {"asked": size, "wanted": wanted}
    warn_of_blind_spot(stage, policy, iteration)
    _write(stage.out / rollouts.FILE, tokenizer, batch)
    made = [said for *_, group in batch for said in group]
    mean = sum(len(said.ids) for said in made) / len(made)
    cut = sum(said.finish_reason == "length" for said in made) / len(made)
    stage.metric(
        iteration, completions=len(made), mean_length=mean, cut=cut, **told, **stage.facts["canary"]
    )
    return {"completions": len(made), "mean_length": mean}


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
    train: pq.ParquetFile, columns: Sequence[str], seed: int, chosen: Set[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `train` in a random order of `seed`, without those whose ids are `chosen`."""
    total = train.metadata.num_rows
    for index in range(total):
        (row,) = rollouts.read_rows(train, [permute_index(index, total, seed)], columns)
        if row["id"] not in chosen:
            yield row


Group = tuple[Mapping[str, Any], rollouts.Request, Sequence[rollouts.Completion]]
"""A row of prompts, its request, and its completions."""


def _open_rounds(
    stage: Stage, policy: Artifact, options: RolloutOptions
) -> tuple[Rounds | None, int]:
    """Return the rounds of this iteration with the groups to continue, and how many prompts were drawn before."""
    size, wanted, groups = (
        options.carry_after,
        options.prompts_per_iteration,
        options.oversampled_prompts,
    )
    begun, about = read_carried(policy)
    if begun and about["options"] != (
        asked := _shared_options(options)
    ):  # a fork with other settings
        stage.log(
            f"{len(begun)} carried groups are dropped: they were sampled with {about['options']}, not {asked}"
        )
        begun = {}
    if not (size and groups):
        return None, options.iteration * (groups or wanted)
    oldest = bound_staleness(options.max_tokens // size, groups, wanted)
    return Rounds(size, wanted, oldest, begun), about.get("drawn", options.iteration * wanted)


def _shared_options(options: RolloutOptions) -> dict[str, Any]:
    """Return the options that must be equal for all groups of a batch, carried or new."""
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
    path: Path, tokenizer: Any, groups: Iterable[Group], about: Mapping[str, str] | None = None
) -> None:
    rows = (rollouts.make_rows(tokenizer, *each) for each in groups)
    rollouts.write_rollouts(path, itertools.chain.from_iterable(rows), about)


if __name__ == "__main__":
    rollout.main()
