"""What `rollout` and `evaluate` share: completions of prompts that provably came from a policy.

The order is fixed: requests, `load`, proofs, and only then samples.

`generate_completions` sets facts of the stage. The stage reward passes them on, the trainer reads
them (`formats/facts.py: RewardFacts`), and so do `runs/delivery.py` (``staleness``) and
`runs/run_record.py` (``sampling``). A manifest's digest covers its facts, but not its notes and
timings: what differs from one attempt to the next belongs in notes or timings. The tests are
`tests/unit/stages/test_rollout.py` and `tests/unit/stages/test_evaluate.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact, Role
from tuneloop.core.component import UNTRACKED, Component, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.model_files import read_vocabulary_size
from tuneloop.formats.rollouts import (
    Completion,
    Request,
    get_sampled_mask,
    get_versions,
    request_id,
)
from tuneloop.formats.rows import name_row
from tuneloop.formats.tokens import encode_prompt_row, load_tokenizer, stop_ids
from tuneloop.inference.engines import Engine, Remote, Sampling
from tuneloop.inference.engines._replicas import Replicas
from tuneloop.inference.multi_turn import EpisodeOptions, play_episodes
from tuneloop.inference.prompt_room import Spares, replace_long_prompts
from tuneloop.inference.proof import Proof, StaleWeights, prove_weights
from tuneloop.inference.rounds import Rounds

COLUMNS = ("id", "prompt", "chat", "answer", "reward", "metadata")
"""The columns of prompts that are read, as `data_prep` writes them (`data/tables.py`).

Prompts without one of them are refused (`formats/rollouts.py: open_rows`), also those of earlier
releases: a column that is added goes into `OPTIONAL_COLUMNS` of `formats/rows.py`. Rows of
demonstrations get the same keys by hand, in `inference/held_out.py: _split_demonstration`.
"""

SHARED_FLAGS = (
    "max_tokens",
    "environment",
    "environment_args",
    "max_turns",
    "keep_reasoning",
    "seed",
    "canary_tolerance",
    "engine_args",
    "timeout_s",
)
"""Flags of all stages that sample, listed after a stage's own flags.

A field of `SamplingOptions` that is neither here nor in the `flags` of `stages/rollout.py` and
`stages/evaluate.py` cannot be set: it always has its default. `config/loop.py: INHERITED` lists
those of `evaluate` that follow `rollout`, `SET_BY_PIPELINE` of `config/pipeline.py` those that a
pipeline sets.
"""


class SamplingOptions(EpisodeOptions):
    """The parameters of a stage that samples.

    Each stage adds its own fields, and lists all in order in `flags`. One that changes what is
    sampled belongs in `stages/rollout.py: _shared_options`, too, or groups that are carried on are
    completed under another value. Descriptions and defaults stand in ``docs/components``
    (`make golden`).
    """

    engine: str = Field("vllm", description="vllm, transformers, or a dotted path")
    endpoint: str | None = Field(
        None,
        description="URL of a running `python -m tuneloop.inference.server`; none: in process",
        json_schema_extra=UNTRACKED,
    )
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(64, ge=1, description="maximum tokens of a completion")
    seed: int = 0
    canary_tolerance: float | None = Field(
        None,
        gt=0,
        description="mean absolute log-probability difference, in nats, between engine and trainer "
        "on the checkpoint's test text (the canary); none: from the noise that the checkpoint states",
    )
    engine_args: JsonObject = Field(
        {},
        description="the engine's own arguments (max_model_len, dtype, …) where it runs in process",
    )
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds of silence after which a server counts as dead",
        json_schema_extra=UNTRACKED,
    )


def input_identity(params: Any) -> JsonObject:
    """Return the parameters that affect the output.

    The fleet's URL does not: it is an address, as `endpoint` is. Any other of the engine's
    arguments does; one that is an address only has to be left out here.
    """
    args = dict(params.engine_args)
    args.pop("fleet", None)
    return {"engine_args": args}


def sampling_stage(
    kind: str, role: Role, **results: type
) -> Callable[[Callable[..., Results]], Component]:
    """Make a stage of a function that samples with an engine.

    Args:
        kind: of the artifact that the stage commits.
        role: of the stage in a loop.
        results: names of the stage's results, and their types.

    By its image ``rollout`` `argo/pod_fields.py` gives a stage the pod of a sampler.
    """
    return component(
        kind,
        image="rollout",
        accelerator=True,
        role=role,
        results=results,
        identity=input_identity,
    )


@dataclass(frozen=True)
class Job:
    """Completions to make: one request for each row of prompts.

    Attributes:
        rows: of prompts. With `rounds` they begin with those of unfinished groups.
            `generate_completions` changes `rows` and `groups` in place, where prompts do not fit
            (`inference/prompt_room.py`): callers read both afterwards.
        groups: the name of each row's group, by which its seeds are derived (`_make_request`):
            another name gives other completions.
        n: completions of a prompt.
        options: of the stage; it plays episodes if they name an environment.
        rounds: completions grow in these, if there are any.
        spares: replace, in place, rows whose prompts leave too little room for a completion.
    """

    rows: list[JsonObject]
    groups: list[str]
    n: int
    options: SamplingOptions
    rounds: Rounds | None = None
    spares: Spares = field(default_factory=Spares)


def generate_completions(
    stage: Stage,
    policy: Artifact,
    job: Job,
    engine: Engine,
) -> tuple[Any, list[Request], Sequence[Sequence[Completion]]]:
    """Run `job` on `engine` once it is proved to serve `policy`.

    Facts, notes and timings are left in the stage.

    Returns:
        The policy's tokenizer, the requests, and for each its completions.

    Raises:
        UserError: a prompt cannot be encoded, or leaves too little room in the context.
        StaleWeights: the engine serves other weights.
    """
    model = policy.part("model")
    options = job.options
    tokenizer = load_tokenizer(model)
    encode = functools.partial(_make_request, stage, tokenizer, job, read_vocabulary_size(model))
    requests = [encode(index) for index in range(len(job.rows))]
    # A wait for a server that was lost takes up to half an hour: SIGTERM has to end it.
    if isinstance(engine, Remote):
        engine.check = stage.check_stop
    with stage.timed("load"):
        engine.load(policy)
    context = engine.context
    replace_long_prompts(
        stage,
        job.rows,
        job.groups,
        requests,
        job.spares,
        encode,
        fixed=len(job.rounds.unfinished) if job.rounds else 0,
        room=context - options.max_tokens,
        problem=f"tokens of prompt and {options.max_tokens} of completion exceed the context of "
        f"{context}; shorten or drop the prompt, lower max_tokens, or raise the engine's "
        "max_model_len if the model allows it",
    )
    proofs = _prove_engine(stage, engine, policy, options.canary_tolerance)
    sampling = Sampling(options.temperature, options.max_tokens, stop_ids(tokenizer, model))
    bound = engine.report().max_staleness
    completions = _sample(stage, policy, job, engine, requests, sampling, tokenizer, bound)
    # Groups that earlier iterations began have tokens of earlier policies.
    bound += job.rounds.oldest if job.rounds else 0
    stage.facts["staleness"] = measure_staleness(policy, completions, bound)
    stage.notes.update(engine.report().list_notes())
    # Replies of an environment were not sampled, and earlier iterations counted their own tokens.
    tokens = sum(sum(get_sampled_mask(c)) for group in completions for c in group)
    tokens -= job.rounds.unfinished_tokens if job.rounds else 0
    stage.timings["generated_tokens_per_s"] = tokens / stage.timings["generate"]
    # Of the proofs of several replicas and restarts the weakest is stated.
    weakest = min(proofs, key=lambda proof: (proof.is_by_tensors, -proof.mean))
    stage.facts.update(
        version=VersionFacts.read(policy).version,
        digest=policy.manifest.digest,
        engine=engine.name,
        sampling={
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "n": job.n,
            "top_p": 1.0,
            "top_k": -1,
        },
        canary=weakest.distances,
        proof=weakest.describe(policy),
    )
    return tokenizer, requests, completions


def _prove_engine(
    stage: Stage,
    engine: Engine,
    policy: Artifact,
    tolerance: float | None,
) -> list[Proof]:
    """Prove that `engine` serves `policy`, each of its replicas.

    Returns:
        The proofs so far. The list grows while the engine is used, by one for each process that is
        restarted: a proof holds for one process only.
    """
    proofs: list[Proof] = []

    def prove(process: Engine) -> None:
        proofs.append(prove_weights(process, policy, tolerance))

    with stage.timed("canary"):
        if isinstance(engine, Replicas):
            engine.call_each(prove)
        else:
            prove(engine)
    if isinstance(engine, Remote):
        engine.prove = prove
    return proofs


def _sample(
    stage: Stage,
    policy: Artifact,
    job: Job,
    engine: Engine,
    requests: list[Request],
    sampling: Sampling,
    tokenizer: Any,
    bound: int,
) -> Sequence[Sequence[Completion]]:
    """Sample completions in rounds, in one call, or in turns with an environment.

    With rounds there is no environment: `stages/rollout.py` refuses both together.

    `bound`: versions that a new token may be older than the policy.
    """
    bar = stage.progress(len(requests), "prompts")

    def done(count: int) -> None:
        stage.check_stop()
        bar.update(count)

    seed_of_sample = functools.partial(stage.seed, "sample")
    with stage.timed("generate"):
        if job.rounds:
            # A round that mixes versions must not be carried on.
            check = functools.partial(measure_staleness, policy, bound=bound)
            return job.rounds.grow_completions(
                engine, requests, sampling, seed_of_sample, check, done
            )
        if job.options.environment is None:
            return engine.generate(requests, sampling, done)
        return play_episodes(
            job.options,
            engine,
            job.rows,
            requests,
            sampling,
            tokenizer,
            seed_of_sample,
            done,
        )


def open_engine(options: SamplingOptions) -> contextlib.closing[Engine]:
    """Open the engine that `options` name, for a ``with`` block.

    Raises:
        UserError: the engine, or an argument of it, is unknown.
    """
    create = plugins.load_variant("engines", options.engine, "open_engine")
    return contextlib.closing(create(options.endpoint, options.engine_args, options.timeout_s))


def _make_request(
    stage: Stage,
    tokenizer: Any,
    job: Job,
    vocabulary_size: int,
    index: int,
) -> Request:
    """Make the request of the row at `index`.

    Raises:
        UserError: its prompt cannot be encoded, or has a token that the model has no embedding for.
    """
    row = job.rows[index]
    group = job.groups[index]
    unfinished = job.rounds.unfinished.get(group) if job.rounds else None
    ids = unfinished.prompt_ids if unfinished else encode_prompt_row(tokenizer, row)
    # An engine on a GPU would read past the embedding's end.
    highest = max(ids)
    if highest >= vocabulary_size:
        token = tokenizer.convert_ids_to_tokens(highest)
        remedy = (
            f"the model has embeddings for {vocabulary_size} ids, and this token has {highest}; "
            "drop the row"
        )
        raise UserError(f"prompts row {name_row(row)}", token, remedy)
    seeds = [stage.seed("sample", request_id(group, sample)) for sample in range(job.n)]
    return Request(group, ids, seeds)


def measure_staleness(
    policy: Artifact,
    completions: Sequence[Sequence[Completion]],
    bound: int,
) -> dict[str, float]:
    """Measure how many versions the tokens are older than the policy.

    Returns:
        ``max``, ``mean``, and the `bound`.

    Raises:
        StaleWeights: some are older than the bound, or newer than the policy.
    """
    current = VersionFacts.read(policy).version
    versions: list[int] = []
    for group in completions:
        for completion in group:
            versions += get_versions(completion)
    oldest = min(versions, default=-1)
    newest = max(versions, default=-1)
    if not versions or not current - bound <= oldest <= newest <= current:
        raise StaleWeights(
            f"completions were made by versions {sorted(set(versions))} instead of {current}: the "
            "weights changed during the batch; let one loop at a time use the server"
        )
    return {
        "max": current - oldest,
        "mean": current - sum(versions) / len(versions),
        "bound": bound,
    }
