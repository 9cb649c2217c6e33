"""Judge rollouts: a weighted sum of named rewards, with typed outcomes and an error budget.

Rewards themselves are in `tuneloop.rewards`; the rows say which of them judge (column
``reward_spec``). `rewards/scoring.py` calls them, `rewards/error_budget.py` decides how many may
fail.

`evaluate` scores as this stage does, and TRL's GRPO by `training/backends/trl.py: score`. A column
that rewards get in addition is read here, in both of these, in `rewards/judging.py: judge_row` and
in `extensions/provenance/questions.py` (`COLUMNS`), and has to be made for the rows of
`rewards/proof.py` and `local/probe.py`. `questions.py` also reads each parameter that changes
scores.
"""

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core import plugins
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.carried import pass_carried
from tuneloop.formats.rollouts import FILE, JUDGEMENTS, REWARDS_FILE, ROWS, open_rows
from tuneloop.rewards.scoring import KINDS, Outcome, compute_full_marks, parse_spec
from tuneloop.rewards.stage_scoring import (
    DEFAULT_MEMORY_MB,
    EscapeScore,
    JudgeMemory,
    PunishFailures,
    ScoringStage,
)

RewardWeights = Annotated[
    dict[Annotated[str, plugins.validate_variant("rewards")], float] | None,
    Field(description="reward → weight; default: each row's own"),
]


@component("rewards", image="base", role="scorer", results={"mean_reward": float})
def reward(
    stage: Stage,
    rollouts: Input,
    *,
    reward_weights: RewardWeights = None,
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one call of a reward may take")
    ] = 5.0,
    escape_score: EscapeScore = None,
    error_budget: Annotated[
        float, Field(ge=0, le=1, description="share of rollouts that may go unscored")
    ] = 0.05,
    punish: PunishFailures = True,
    memory_mb: JudgeMemory = DEFAULT_MEMORY_MB,
    workers: Annotated[int, Field(ge=1, description="processes")] = 1,
) -> Results:
    """Score every rollout; one that could not be judged gets an outcome without a score, never a
    score of zero.

    ``facts.reward`` holds `mean` and `std` (population) over the scores, `solved` (share of scores
    that are full marks), `outcomes` (counts), `breakdown` (mean of each reward before weighting)
    and `zero_variance` (share of groups whose scores are all equal: they teach nothing).

    Raises:
        Retryable: there are more failures than the budget, but not without timeouts, crashes and
            I/O errors, which may not occur in another attempt.
        UserError: more failures than the budget would occur again: the reward raises an error or
            returns a bad value, or the outcomes are `unverifiable` or `escape`. The data, the
            rewards or the policy must change.
    """
    # Neither ids nor log-probabilities: rewards read texts.
    columns = ["group", "completion", "answer", "reward_spec", "metadata"]
    sampled = open_rows(rollouts, FILE, columns, "--rollouts", "the stage rollout")
    rows = sampled.read(columns).to_pylist()
    if reward_weights is not None:
        spec = json.dumps(reward_weights, sort_keys=True)
        rows = [row | {"reward_spec": spec} for row in rows]
    bar = stage.progress(sum(len(parse_spec(row["reward_spec"])) for row in rows), "rewards")

    scoring = ScoringStage.open(stage)
    with stage.timed("score"):
        outcomes = scoring.score(
            rows,
            timeout_s=timeout_s,
            memory=memory_mb << 20,
            punish=punish,
            escape_score=escape_score,
            workers=workers,
            progress=bar.update,
        )
    scoring.check_budget(outcomes, error_budget)
    crashes = sum(any(key.endswith(".crash") for key in o.breakdown) for o in outcomes)
    if crashes:
        stage.log(
            f"{crashes} of {len(outcomes)} rollouts crashed a reward and got its least score: "
            "read what they say"
        )
    _write(sampled, outcomes, stage.out / REWARDS_FILE)
    pass_carried(rollouts, stage.out)
    summary = summarize_rewards(rows, outcomes)
    # The facts of the rollouts are passed on as they are: the update needs them (`RewardFacts`).
    stage.facts.update(rollouts.manifest.facts)
    stage.facts["reward"] = summary
    # `mean` is no curve, as the result is one already (`runs/run_record.py: NO_CURVES`).
    stage.metric(
        rollouts.manifest.version or 0,
        mean=float(summary["mean"]),
        std=float(summary["std"]),
        solved=float(summary["solved"]),
        zero_variance=float(summary["zero_variance"]),
    )
    stage.log(
        f"mean {summary['mean']:.4f}, solved {summary['solved']:.1%}, {dict(summary['outcomes'])}"
    )
    return {"mean_reward": summary["mean"]}


def _write(file: pq.ParquetFile, outcomes: Sequence[Outcome], scored: Path) -> None:
    """Write the rollouts with their outcomes, one row group after another."""
    # The rollouts may be larger than the memory, so that one row group is read at a time.
    remaining = iter(outcomes)
    schema = pa.schema(list(file.schema_arrow) + list(JUDGEMENTS))
    with pq.ParquetWriter(scored, schema) as writer:
        for batch in file.iter_batches(ROWS):
            part = list(itertools.islice(remaining, batch.num_rows))
            breakdowns = [json.dumps(o.breakdown, sort_keys=True) for o in part]
            # In the order of `JUDGEMENTS`.
            columns = [[o.outcome for o in part], [o.score for o in part], breakdowns]
            arrays = [pa.array(values, field.type) for values, field in zip(columns, JUDGEMENTS)]
            writer.write_batch(pa.record_batch(batch.columns + arrays, schema=schema))


def summarize_rewards(rows: Sequence[JsonObject], outcomes: Sequence[Outcome]) -> JsonObject:
    """Summarize the output of `reward`; rows without a score count in `outcomes` alone.

    One row at least must have a score. `formats/facts.py: ScoreFacts` reads `outcomes`, by which
    reports tell over how many completions a mean was taken.
    """
    scores: list[float] = []
    solved: list[bool] = []
    groups: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for row, outcome in zip(rows, outcomes):
        if outcome.score is None:
            continue
        scores.append(outcome.score)
        # Sums of weighted scores are rounded.
        solved.append(outcome.score >= compute_full_marks(parse_spec(row["reward_spec"])) - 1e-9)
        groups[row["group"]].append(outcome.score)
        for name, value in outcome.breakdown.items():
            # A text says why a reward has failed.
            if not isinstance(value, str):
                parts[name].append(value)
    counts = Counter(outcome.outcome for outcome in outcomes)
    return {
        "mean": fmean(scores),
        "std": pstdev(scores),
        "solved": fmean(solved),
        "outcomes": {kind: counts[kind] for kind in KINDS},
        # A mean of NAME.part is over the rows that the reward NAME judged.
        "breakdown": {
            name: fsum(values) / len(parts.get(name.rpartition(".")[0]) or values)
            for name, values in sorted(parts.items())
        },
        "zero_variance": fmean(max(group) == min(group) for group in groups.values()),
    }


if __name__ == "__main__":
    reward.main()
