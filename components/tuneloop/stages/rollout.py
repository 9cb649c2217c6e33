"""Sample completions from the policy, with the log-probabilities that training needs."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Annotated

from pydantic import AfterValidator, Field

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.seeds import derive_seed
from tuneloop.formats import rollouts
from tuneloop.inference.generate import (
    CanaryTolerance,
    Endpoint,
    EngineArgs,
    EngineName,
    Job,
    MaxTokens,
    Prompts,
    TimeoutS,
    generate_completions,
    input_identity,
    open_engine,
)
from tuneloop.inference.multi_turn import EnvironmentArgs, EnvironmentName, KeepReasoning, MaxTurns, Play


def _uncut(off: float) -> AfterValidator:
    def check(value: float) -> float:
        if value != off:
            raise ValueError(
                f"must stay {off}: log-probabilities of a cut distribution bias the policy's importance ratios; "
                "use temperature instead"
            )
        return value

    return AfterValidator(check)


@component(
    "rollouts",
    image="rollout",
    accelerator=True,
    role="sampler",
    results={"completions": int, "mean_length": float},
    identity=input_identity,
)
def rollout(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    engine: EngineName = "vllm",
    endpoint: Endpoint = None,
    iteration: Annotated[int, Field(ge=0, description="which batch of prompts")] = 0,
    prompts_per_iteration: Annotated[int, Field(ge=1, description="prompts in a batch")] = 16,
    n: Annotated[int, Field(ge=1, le=100, description="completions a prompt")] = 8,
    temperature: Annotated[float, Field(ge=0.01, description="of the sampled distribution")] = 1.0,
    top_p: Annotated[float, _uncut(1.0), Field(description="must stay 1")] = 1.0,
    top_k: Annotated[int, _uncut(-1), Field(description="must stay -1")] = -1,
    max_tokens: MaxTokens = 64,
    environment: EnvironmentName = None,
    environment_args: EnvironmentArgs = {},  # noqa: B006
    max_turns: MaxTurns = 8,
    keep_reasoning: KeepReasoning = False,
    seed: int = 0,
    canary_tolerance: CanaryTolerance = 0.05,
    engine_args: EngineArgs = {},  # noqa: B006
    timeout_s: TimeoutS = 600.0,
) -> Results:
    """Generate `n` completions for each prompt of the iteration's batch; with an environment, `n` episodes.

    The batch is a function of (seed, iteration): prompts come from a permutation of ``train.parquet`` for each epoch.
    It counts only if the engine proves that it serves `policy`: by the digest it echoes, by the canary's
    log-probabilities, and by the version on every completion.

    Raises:
        UserError: data or options that can not work.
        Retryable: the server is away, breaks off or keeps silent.
        StaleWeights: the engine serves other weights.
    """
    train = Prompts(prompts, "train")
    chosen = train.rows(select_prompt_indices(len(train), prompts_per_iteration, seed, iteration))
    groups = [f"i{iteration:06d}-p{p:05d}" for p in range(len(chosen))]
    play = Play.of(environment, environment_args, max_turns, keep_reasoning)
    job = Job(chosen, groups, n, temperature, max_tokens, play)
    served = open_engine(engine, endpoint, engine_args, timeout_s)
    try:
        tokenizer, requests, completions = generate_completions(stage, policy, job, served, canary_tolerance)
    finally:
        served.close()
    rows = (rollouts.make_rows(tokenizer, *each) for each in zip(chosen, requests, completions))
    rollouts.write_rollouts(stage.out, itertools.chain.from_iterable(rows))
    made = [said for group in completions for said in group]
    mean = sum(len(said.ids) for said in made) / len(made)
    cut = sum(said.finish_reason == "length" for said in made) / len(made)
    stage.metric(iteration, completions=len(made), mean_length=mean, cut=cut, **stage.facts["canary"])
    return {"completions": len(made), "mean_length": mean}


def select_prompt_indices(total: int, size: int, seed: int, iteration: int) -> list[int]:
    """Select the indices of an iteration's prompts: its slice of one permutation of `total` per epoch.

    >>> sorted(select_prompt_indices(6, 3, 0, 0) + select_prompt_indices(6, 3, 0, 1))
    [0, 1, 2, 3, 4, 5]
    """
    orders: dict[int, array[int]] = {}
    indices = []
    for place in range(iteration * size, (iteration + 1) * size):
        epoch, position = divmod(place, total)
        if epoch not in orders:
            orders[epoch] = array("q", range(total))
            random.Random(derive_seed(seed, "prompts", epoch)).shuffle(orders[epoch])
        indices.append(orders[epoch][position])
    return indices


if __name__ == "__main__":
    rollout.main()
