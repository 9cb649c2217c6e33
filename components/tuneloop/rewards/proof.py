"""Prove gold answers: each has to earn full marks from its own rewards, as a model would state it.

A row's solution, where its data set has one, is scored by all rewards together. A reward that has
``write_answers(answer, metadata) -> list[str]`` writes besides how a model may state the answer
(a box, "The answer is …", a tool call), and gives full marks to each. Without a solution of
its own a row is proved by these alone: what the data set states need not be a completion.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.outcomes import Outcome, Row
from tuneloop.rewards.registry import compute_full_marks, find_reward, parse_spec
from tuneloop.rewards.scoring import score_all

SHOWN = 60
"""Characters of an answer and of a completion that a message shows."""


class _Trial(NamedTuple):
    """A completion that has to earn full marks, of the row `row_index`."""

    row_index: int
    completion: str
    rewards: Mapping[str, float]


def prove_answers(
    rows: Sequence[Row],
    rewards: Mapping[str, float],
    timeout_s: float,
    progress: Callable[[int], None] | None = None,
) -> list[str | None]:
    """Return for each row what is wrong with its gold answer; None if nothing is.

    Args:
        rows: each with `answer`, `solution` and `metadata` (JSON).
        rewards: reward → weight; at least one.
        timeout_s: seconds that one call of a reward may take.
        progress: see `score_all`.
    """
    troubles: list[str | None] = [None] * len(rows)
    trials: list[_Trial] = []
    for index, row in enumerate(rows):
        try:
            trials += _list_trials(index, row, rewards)
        except Exception as error:
            # The reward cannot write down this answer, so it could not read it either.
            troubles[index] = f"{_show(row['answer'])}: {type(error).__name__}: {error}"[:300]
    judged = [_build_row(trial, rows[trial.row_index]) for trial in trials]
    outcomes = score_all(judged, timeout_s=timeout_s, punish=False, progress=progress)
    for trial, outcome in zip(trials, outcomes):
        if troubles[trial.row_index] is None:
            troubles[trial.row_index] = _describe_failure(trial, outcome, rows[trial.row_index])
    return troubles


def _list_trials(index: int, row: Row, rewards: Mapping[str, float]) -> list[_Trial]:
    """List the completions that prove the answer of a row."""
    metadata: JsonObject = json.loads(row["metadata"] or "{}")
    trials: list[_Trial] = []
    unwritten: dict[str, float] = {}
    for name, weight in rewards.items():
        write_answers = find_reward(name).write_answers
        if write_answers is None:
            unwritten[name] = weight
            continue
        completions = write_answers(row["answer"], metadata)
        trials += [_Trial(index, completion, {name: weight}) for completion in completions]
    has_solution = row["solution"] is not None and row["solution"] != row["answer"]
    proved_by_solution = rewards if has_solution else unwritten
    if proved_by_solution:
        trials.append(_Trial(index, row["solution"], proved_by_solution))
    return trials


def _build_row(trial: _Trial, row: Row) -> Row:
    return {
        "completion": trial.completion,
        "answer": row["answer"],
        "metadata": row["metadata"],
        "reward_spec": json.dumps(trial.rewards, sort_keys=True),
    }


def _describe_failure(trial: _Trial, outcome: Outcome, row: Row) -> str | None:
    """Describe why a completion has no full marks; None if it has."""
    full_marks = compute_full_marks(parse_spec(json.dumps(trial.rewards)))
    if outcome.score is not None and math.isclose(outcome.score, full_marks):
        return None
    result = outcome.score if outcome.outcome == "score" else outcome.outcome
    # The bare answer needs no second mention.
    how = "" if trial.completion == row["answer"] else f" as {trial.completion[:SHOWN]!r}"
    return f"{_show(row['answer'])}{how} scored {result} {outcome.breakdown}"


def _show(answer: str) -> str:
    return f"answer {answer[:SHOWN]!r}"
