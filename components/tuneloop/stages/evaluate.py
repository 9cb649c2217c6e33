"""Measure a policy on held-out prompts."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import Retryable, UserError
from tuneloop.formats.rollouts import build_reward_inputs
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
from tuneloop.rewards.scoring import KINDS, may_pass, score_all

SAMPLES = pa.schema(
    {
        "id": pa.string(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "answer": pa.string(),
        "score": pa.float32(),
        "outcome": pa.string(),
    }
)


@component(
    "metrics",
    image="rollout",
    accelerator=True,
    role="evaluator",
    results={"mean_reward": float},
    identity=input_identity,
)
def evaluate(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    engine: EngineName = "vllm",
    endpoint: Endpoint = None,
    iteration: Annotated[int, Field(ge=0, description="the iteration of the loop that asks")] = 0,
    limit: Annotated[int, Field(ge=1, description="prompts, at most")] = 256,
    temperature: Annotated[float, Field(ge=0, description="0: the likeliest token, always")] = 0.0,
    max_tokens: MaxTokens = 64,
    environment: EnvironmentName = None,
    environment_args: EnvironmentArgs = {},  # noqa: B006
    max_turns: MaxTurns = 8,
    keep_reasoning: KeepReasoning = False,
    seed: int = 0,
    canary_tolerance: CanaryTolerance = 0.05,
    engine_args: EngineArgs = {},  # noqa: B006
    timeout_s: TimeoutS = 600.0,
    reward_timeout_s: Annotated[float, Field(gt=0, description="seconds that one call of a reward may take")] = 5.0,
) -> Results:
    """Generate one completion for each of the first `limit` held-out prompts, and score it by the prompt's rewards.

    The mean is over what could be scored; ``facts.outcomes`` counts the rest by kind.

    Raises:
        UserError, StaleWeights: as `rollout`.
        UserError: nothing could be scored, and none of it for want of time or by a crash.
        Retryable: as `rollout`, or nothing could be scored.
    """
    held_out = Prompts(prompts, "eval")
    rows = held_out.rows(range(min(limit, len(held_out))))
    groups = [f"i{iteration:06d}-e{i:05d}" for i in range(len(rows))]
    play = Play.of(environment, environment_args, max_turns, keep_reasoning)
    job = Job(rows, groups, 1, temperature, max_tokens, play)
    served = open_engine(engine, endpoint, engine_args, timeout_s)
    try:
        tokenizer, _, completions = generate_completions(stage, policy, job, served, canary_tolerance)
    finally:
        served.close()
    heard = [build_reward_inputs(tokenizer, row, group[0]) for row, group in zip(rows, completions)]
    judged = [{**row, "reward_spec": row["reward"], **said} for row, said in zip(rows, heard)]
    with stage.timed("score"):
        outcomes = score_all(judged, timeout_s=reward_timeout_s, progress=lambda _: stage.check_stop())
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    counts = {kind: sum(outcome.outcome == kind for outcome in outcomes) for kind in KINDS}
    if not scores:
        story = f"none of {len(rows)} completions could be scored: {counts}"
        if any(map(may_pass, outcomes)):
            raise Retryable(f"evaluate: {story}; see the rewards")
        raise UserError(
            "rewards", rows[0]["reward"], f"{story}; they must fit the data, and the environment be rollout's"
        )
    samples = [{**row, "score": o.score, "outcome": o.outcome} for row, o in zip(judged, outcomes)]
    pq.write_table(pa.Table.from_pylist(samples, schema=SAMPLES), stage.out / "samples.parquet")
    mean = sum(scores) / len(scores)
    stage.facts["outcomes"] = counts
    stage.metric(iteration, mean_reward=mean, scored=len(scores) / len(rows))
    return {"mean_reward": mean}


if __name__ == "__main__":
    evaluate.main()
