"""Measure a policy on held-out prompts.

It scores completions as the stage `reward` does, or their likeness to demonstrations where the data
has no answers (`inference/held_out.py`). `deploy_model`, promotions (`runs/promotions.py`) and the
gate of KFP judge by its `mean_reward` or its samples.

In a pipeline with a loop, settings of this stage follow those of `rollout` and `reward` that
`config/loop.py: INHERITED` names, so that a completion has the same score in training and in an
evaluation.
"""

from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.json_types import JsonObject
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import PromptFacts
from tuneloop.formats.rollouts import (
    SAMPLES,
    SAMPLES_FILE,
    build_reward_inputs,
    open_rows,
    read_rows,
)
from tuneloop.formats.rows import list_columns
from tuneloop.inference import generate
from tuneloop.inference.generate import SamplingOptions
from tuneloop.inference.held_out import has_rows, is_prompts, sample_demonstrations
from tuneloop.inference.prompt_room import Spares
from tuneloop.rewards.scoring import KINDS
from tuneloop.rewards.stage_scoring import (
    DEFAULT_MEMORY_MB,
    EscapeScore,
    JudgeMemory,
    PunishFailures,
    ScoringStage,
)


class EvaluateOptions(SamplingOptions):
    """What is measured.

    An option that `rollout` has, too, is a field of `SamplingOptions` and named in `SHARED_FLAGS`
    (`inference/generate.py`). A field that is not among `flags` is no parameter.
    """

    flags: ClassVar[tuple[str, ...]] = (
        "engine",
        "endpoint",
        "iteration",
        "limit",
        "temperature",
        *generate.SHARED_FLAGS,
        "reward_timeout_s",
        "escape_score",
        "error_budget",
        "punish",
        "memory_mb",
    )

    iteration: int = Field(0, ge=0, description="the iteration of the loop")
    limit: int = Field(256, ge=1, description="maximum number of prompts")
    temperature: float = Field(0.0, ge=0, description="0: the likeliest token, always")
    reward_timeout_s: float = Field(
        5.0, gt=0, description="seconds that one call of a reward may take"
    )
    escape_score: EscapeScore = None
    error_budget: float = Field(
        0.05, ge=0, le=1, description="share of completions that may go unscored"
    )
    punish: PunishFailures = True
    memory_mb: JudgeMemory = DEFAULT_MEMORY_MB


@generate.sampling_stage("metrics", "evaluator", mean_reward=float)
def evaluate(stage: Stage, policy: Input, prompts: Input, *, options: EvaluateOptions) -> Results:
    """Generate one completion for each of the first `limit` held-out prompts, and score it by the
    prompt's rewards.

    Prompts that leave too little room for a completion are skipped, and others take their place
    (``data.too_long``). The mean is over what could be scored; ``facts.outcomes`` counts the rest
    by kind. Where these are more than the budget, the stage ends without a mean. Data without
    held-out prompts has nothing to score: then the prompts of held-out demonstrations are completed
    for people to read, and there is no mean.

    Raises:
        UserError, StaleWeights: as `rollout`.
        UserError: more completions than the budget have no score, and not because of timeouts or
            crashes.
        Retryable: as `rollout`, or more than the budget have no score because of these.
    """
    if is_prompts(prompts) and not has_rows(prompts, "eval.parquet"):
        count = sample_demonstrations(stage, policy, prompts, options)
        stage.log(
            f"no held-out prompts to score; completed those of {format_count(count, 'demonstration')}"
        )
        return {"mean_reward": None}
    held_out = open_rows(prompts, "eval.parquet", generate.COLUMNS, "--prompts", "data_prep")
    columns = list_columns(generate.COLUMNS, held_out.schema_arrow.names)
    total = held_out.metadata.num_rows
    rows = read_rows(held_out, range(min(options.limit, total)), columns)
    # The prompts after the limit, one by one: few of them are needed, if any.
    spares = Spares(
        (row for index in range(len(rows), total) for row in read_rows(held_out, [index], columns)),
        PromptFacts.read(prompts).length_policy,
        total,
        required=False,
    )
    # Names are part of the seeds: those of `rollout` have a p where these have an e.
    groups = [f"i{options.iteration:06d}-e{i:05d}" for i in range(len(rows))]
    with generate.open_engine(options) as engine:
        job = generate.Job(rows, groups, 1, options, spares=spares)
        tokenizer, _, completions = generate.generate_completions(stage, policy, job, engine)
    # As rows of the stage `rollout`, so that both stages score alike.
    scored_rows: list[JsonObject] = []
    for row, group in zip(rows, completions):
        scored_row = dict(row)
        scored_row["reward_spec"] = row["reward"]
        scored_rows.append(scored_row | build_reward_inputs(tokenizer, row, group[0]))
    scoring = ScoringStage.open(stage)
    with stage.timed("score"):
        outcomes = scoring.score(
            scored_rows,
            timeout_s=options.reward_timeout_s,
            memory=options.memory_mb << 20,
            punish=options.punish,
            escape_score=options.escape_score,
        )
    scoring.check_budget(outcomes, options.error_budget)
    # Completions that could not be judged count in the budget, and not as zeros in the mean.
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    counts = {kind: sum(outcome.outcome == kind for outcome in outcomes) for kind in KINDS}
    samples = [
        row | {"score": outcome.score, "outcome": outcome.outcome}
        for row, outcome in zip(scored_rows, outcomes)
    ]
    pq.write_table(pa.Table.from_pylist(samples, schema=SAMPLES), stage.out / SAMPLES_FILE)
    mean = sum(scores) / len(scores)
    stage.facts["outcomes"] = counts
    stage.metric(options.iteration, mean_reward=mean, scored=len(scores) / len(rows))
    return {"mean_reward": mean}


if __name__ == "__main__":
    evaluate.main()
