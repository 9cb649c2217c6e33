"""What `rollout` and `evaluate` share: from prompts and a policy to completions that provably came from it."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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
"""The columns of prompts that are read, as `data_prep` writes them."""

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
"""Flags of all stages that sample, listed after a stage's own flags."""


class SamplingOptions(EpisodeOptions):
    """The parameters of a stage that samples. Each stage adds its own fields, and lists all in order in `flags`."""

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
        description="mean absolute log-probability difference, in nats, between engine and trainer on the canary; "
        "none: from the noise that the checkpoint states",
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
    """Return the parameters that affect the output: the fleet's URL does not, being an address like `endpoint`."""
    return {
        "engine_args": {
            name: value for name, value in params.engine_args.items() if name != "fleet"
        }
    }


def sampling_stage(
    kind: str, role: Role, **results: type
) -> Callable[[Callable[..., Results]], Component]:
    """Make a stage of a function that samples with an engine, and commits an artifact of the kind `kind`."""
    return component(
        kind, image="rollout", accelerator=True, role=role, results=results, identity=input_identity
    )


@dataclass(frozen=True)
class Job:
    """Completions to make: one request for each row of prompts, with `n` seeds; episodes if there is an environment.
    With `rounds` they grow in rounds, and `rows` begin with those of unfinished groups. Rows whose prompts leave too
    little room are replaced, in place, by `spares`."""

    rows: list[JsonObject]
    groups: list[str]
    n: int
    options: SamplingOptions
    rounds: Rounds | None = None
    spares: Spares = field(default_factory=Spares)


def generate_completions(
    stage: Stage, policy: Artifact, job: Job, engine: Engine
) -> tuple[Any, list[Request], Sequence[Sequence[Completion]]]:
    """Run `job` on `engine` once it is proved to serve `policy`; leave facts and timings in the stage. Return the
    policy's tokenizer, the requests, and for each its completions. Raises UserError: a prompt cannot be encoded or
    leaves too little room in the context; StaleWeights: the engine serves other weights."""
    model = policy.part("model")
    options = job.options
    tokenizer = load_tokenizer(model)
    make_request = functools.partial(_request, stage, tokenizer, job, read_vocabulary_size(model))
    requests = [make_request(index) for index in range(len(job.rows))]
    proofs: list[Proof] = []

    def prove(one: Engine) -> None:
        proofs.append(prove_weights(one, policy, options.canary_tolerance))

    if isinstance(engine, Remote):
        engine.check = stage.check_stop
    with stage.timed("load"):
        engine.load(policy)
    replace_long_prompts(
        stage,
        job.rows,
        job.groups,
        requests,
        job.spares,
        make_request,
        fixed=len(job.rounds.begun) if job.rounds else 0,
        room=engine.context - options.max_tokens,
        problem=f"tokens of prompt and {options.max_tokens} of completion exceed the context of {engine.context}; "
        "shorten or drop the prompt, lower max_tokens, or raise the engine's max_model_len if the model allows it",
    )
    with stage.timed("canary"):
        engine.call_each(prove) if isinstance(engine, Replicas) else prove(engine)
    if isinstance(engine, Remote):  # a proof holds for one process only
        engine.prove = prove
    sampling = Sampling(options.temperature, options.max_tokens, stop_ids(tokenizer, model))
    bar = stage.progress(len(requests), "prompts")

    def done(count: int) -> None:
        stage.check_stop()
        bar.update(count)

    seed = functools.partial(stage.seed, "sample")
    bound = getattr(engine, "max_staleness", 0)
    with stage.timed("generate"):
        completions: Sequence[Sequence[Completion]]
        if job.rounds:
            check = functools.partial(measure_staleness, policy, bound=bound)
            completions = job.rounds.grow_completions(engine, requests, sampling, seed, check, done)
            bound += job.rounds.oldest
        elif options.environment is None:
            completions = engine.generate(requests, sampling, done)
        else:
            completions = play_episodes(
                options, engine, job.rows, requests, sampling, tokenizer, seed, done
            )
    stage.facts["staleness"] = measure_staleness(policy, completions, bound)
    for name in ("pulled", "replicas", "determinism"):  # only some engines have them
        if said := getattr(engine, name, None):
            stage.notes[name] = said
    if refitted := getattr(engine, "refitted", None):
        stage.notes["refitted"] = asdict(refitted)
    tokens = sum(sum(get_sampled_mask(c)) for group in completions for c in group)
    tokens -= job.rounds.begun_tokens if job.rounds else 0
    stage.timings["generated_tokens_per_s"] = tokens / stage.timings["generate"]
    weakest = min(proofs, key=lambda proof: (proof.is_by_tensors, -proof.mean))
    given = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    stage.facts.update(
        version=VersionFacts.read(policy).version,
        digest=policy.manifest.digest,
        engine=engine.name,
        sampling={**given, "n": job.n, "top_p": 1.0, "top_k": -1},
        canary=weakest.distances,
        proof=weakest.describe(policy),
    )
    return tokenizer, requests, completions


def open_engine(options: SamplingOptions) -> contextlib.closing[Engine]:
    """Open the engine that `options` name, for a ``with`` block. Raises UserError: it, or an argument, is unknown."""
    create = plugins.load_variant("engines", options.engine, "open_engine")
    return contextlib.closing(create(options.endpoint, options.engine_args, options.timeout_s))


def _request(stage: Stage, tokenizer: Any, job: Job, vocabulary_size: int, index: int) -> Request:
    """Make the request of row `index`. Raises UserError: its prompt cannot be encoded, or has a token that the model
    has no embedding for."""
    row = job.rows[index]
    group = job.groups[index]
    begun = job.rounds and job.rounds.begun.get(group)
    place = f"prompts row {name_row(row)}"
    ids = begun.prompt_ids if begun else encode_prompt_row(tokenizer, row)
    surplus = max(ids)
    if surplus >= vocabulary_size:
        token = tokenizer.convert_ids_to_tokens(surplus)
        remedy = (
            f"the model has embeddings for {vocabulary_size} ids, and this token has {surplus}; "
            "drop the row"
        )
        raise UserError(place, token, remedy)
    seeds = [stage.seed("sample", request_id(group, sample)) for sample in range(job.n)]
    return Request(group, ids, seeds)


def measure_staleness(
    policy: Artifact, completions: Sequence[Sequence[Completion]], bound: int
) -> dict[str, float]:
    """Measure how many versions the tokens are older than the policy: ``max``, ``mean``, and the `bound`. Raises
    StaleWeights: some are older than the bound, or newer than the policy."""
    want = VersionFacts.read(policy).version
    each = [v for group in completions for c in group for v in get_versions(c)]
    if not each or not want - bound <= min(each) <= max(each) <= want:
        raise StaleWeights(
            f"completions were made by versions {sorted(set(each))} instead of {want}: the weights changed during the "
            "batch; let one loop at a time use the server"
        )
    return {"max": want - min(each), "mean": want - sum(each) / len(each), "bound": bound}
