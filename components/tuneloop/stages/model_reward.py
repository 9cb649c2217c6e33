"""Score rollouts with a reward model, in place of `reward` or in addition to its scores.

It takes rollouts, or what `reward` made of them, and writes the same columns, so that
`policy_update` reads either (`JUDGEMENTS` of `formats/rollouts.py`). Like `reward`, it passes on
the facts of the rollouts and the groups that they carry. Tests:
`tests/unit/stages/test_preference.py`.
"""

import json
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.carried import pass_carried
from tuneloop.formats.rollouts import FILE, JUDGEMENTS, REWARDS_FILE
from tuneloop.formats.token_files import Document
from tuneloop.training import checkpoint
from tuneloop.training.options import ScoringOptions
from tuneloop.training.pairs import score_documents


@component(
    "rewards", image="trainer", accelerator=True, role="scorer", results={"mean_reward": float}
)
def model_reward(
    stage: Stage,
    rollouts: Input,
    scorer: Input,
    *,
    weight: Annotated[float, Field(description="weight of the model's score in the sum")] = 1.0,
    per_device_eval_batch_size: Annotated[
        int, Field(ge=1, description="rollouts in a micro-batch")
    ] = 64,
    options: ScoringOptions,
) -> Results:
    """Score the very tokens that were sampled with a reward model, which must have the policy's
    tokenizer.

    Rollouts without scores get the model's; to scores of `reward` it adds ``weight * score``, and a
    rollout that `reward` left without a score keeps none. ``breakdown`` holds the model's own score
    as ``model``.

    Raises:
        UserError: no rollouts, or tokens that the model does not know.
        Interrupted: on SIGTERM. Nothing is kept.
    """
    from tuneloop.training.scorer import Scorer

    table = read_rollouts(rollouts)
    prompts = table["prompt_ids"].to_pylist()
    sequences = [
        prompt + completion
        for prompt, completion in zip(prompts, table["completion_ids"].to_pylist())
    ]
    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("load"):
        # One more: the score is read at a token that is appended (`Scorer.collate`).
        max_length = max(map(len, sequences)) + 1
        directory = scorer.part("model")
        model = Scorer(directory, ranks, max_length=max_length, **options.model_options)
    # Another tokenizer's ids would be scored as other words; some can be told by their size.
    if max(max(ids) for ids in sequences) >= model.vocab_size:
        raise UserError(
            "--scorer",
            scorer.url,
            "has a smaller vocabulary; train it from a model with this tokenizer",
        )
    with stage.timed("score"):
        # No token is a target: `Scorer.collate` adds the one at whose position the score is read.
        documents = [Document(ids, [False] * len(ids)) for ids in sequences]
        model_scores = score_documents(
            stage, model, documents, per_device_eval_batch_size, Scorer.scores
        ).tolist()
    table = add_model_scores(table, model_scores, weight)
    scores = [score for score in table["score"].to_pylist() if score is not None]
    if not scores:
        remedy = "has no rollout with a score; the stage reward says why"
        raise UserError("--rollouts", rollouts.url, remedy)
    mean = sum(scores) / len(scores)
    if stage.leader:
        pq.write_table(table, stage.out / REWARDS_FILE)
        pass_carried(rollouts, stage.out)
    # The facts of the rollouts are passed on as they are: the update needs them.
    stage.facts.update(rollouts.manifest.facts)
    stage.facts["model_reward"] = {
        "mean": mean,
        "model": sum(model_scores) / len(model_scores),
        "weight": weight,
        "scored": len(scores),
    }
    stage.facts["scorer"] = scorer.manifest.digest
    stage.metric(rollouts.manifest.version or 0, mean=mean)
    return {"mean_reward": mean}


def read_rollouts(rollouts: Artifact) -> pa.Table:
    """Read rollouts, scored or not. Raises UserError: there are none."""
    # The output of `reward` has the columns of rollouts, too.
    for name in (REWARDS_FILE, FILE):
        if name not in rollouts.manifest.files:
            continue
        table = pq.read_table(rollouts.part(name))
        if table.num_rows:
            return table
    raise UserError(
        "--rollouts",
        rollouts.url,
        "holds no rollouts; give it what the stage rollout or reward made",
    )


def add_model_scores(table: pa.Table, model_scores: list[float], weight: float) -> pa.Table:
    """Return `table` with the model's scores added to `outcome`, `score` and `breakdown`."""
    judgements: list[JsonObject] = [
        {"outcome": "score", "score": 0.0, "breakdown": "{}"} for _ in range(table.num_rows)
    ]
    if "score" in table.column_names:
        judgements = table.select(JUDGEMENTS.names).to_pylist()
        table = table.drop_columns(JUDGEMENTS.names)
    sums: list[float | None] = []
    breakdowns: list[str] = []
    for judgement, model_score in zip(judgements, model_scores):
        score = judgement["score"]
        sums.append(None if score is None else score + weight * model_score)
        breakdown = json.loads(judgement["breakdown"]) | {"model": model_score}
        breakdowns.append(json.dumps(breakdown, sort_keys=True))
    outcomes = [judgement["outcome"] for judgement in judgements]
    # In the order of `JUDGEMENTS`: a column that is added there and not here is lost.
    for field, values in zip(JUDGEMENTS, (outcomes, sums, breakdowns)):
        table = table.append_column(field, pa.array(values, field.type))
    return table


if __name__ == "__main__":
    model_reward.main()
