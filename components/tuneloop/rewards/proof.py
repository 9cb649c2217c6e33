"""Prove gold answers: each has to earn full marks from its own rewards, as a model would state it.

A row's solution, if its data set has one, is scored by all rewards together. Besides, a reward that
has ``write_answers(answer, metadata) -> list[str]`` writes how a model may state the answer (a box,
"The answer is …", a tool call), and has to give full marks to each of these texts. In a row without
a solution, only the rewards without this function score the bare answer: to the others it need not
be a completion.

`data_prep` calls it for each table of rows (`data/tables.py: examine_answers`), here or in a
process of Ray. A row that fails counts in ``data.wrong_answers``. It is tested through the stage,
by `tests/unit/stages/test_data_prep.py`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.outcomes import Outcome, Row
from tuneloop.rewards.registry import compute_full_marks, find_reward, parse_spec
from tuneloop.rewards.scoring import score_all

SHOWN = 60
"""Characters of an answer and of a completion that a message shows."""


def prove_answers(
    rows: Sequence[Row],
    rewards: Mapping[str, float],
    timeout_s: float,
    progress: Callable[[int], None] | None = None,
) -> list[str | None]:
    """Return for each row what is wrong with its gold answer; None if nothing is.

    Args:
        rows: each with `answer`, `solution` (equal to the answer where there is none) and
            `metadata` (JSON).
        rewards: reward → weight; at least one.
        timeout_s: seconds that one call of a reward may take.
        progress: see `score_all`.
    """
    troubles: list[str | None] = [None] * len(rows)
    trials: list[Row] = []
    row_numbers: list[int] = []
    for number, row in enumerate(rows):
        try:
            trials_of_row = _list_trials(row, rewards)
        except Exception as error:
            # The reward cannot write down this answer, so it could not read it either.
            troubles[number] = f"{_show(row['answer'])}: {type(error).__name__}: {error}"[:300]
            continue
        trials += trials_of_row
        row_numbers += [number] * len(trials_of_row)
    outcomes = score_all(trials, timeout_s=timeout_s, punish=False, progress=progress)
    for number, trial, outcome in zip(row_numbers, trials, outcomes):
        if troubles[number] is None:
            troubles[number] = _describe_failure(trial, outcome)
    return troubles


def _list_trials(row: Row, rewards: Mapping[str, float]) -> list[Row]:
    """List completions that prove the answer of a row, as rows that `score_all` takes."""
    metadata: JsonObject = json.loads(row["metadata"] or "{}")
    completions: list[tuple[str, Mapping[str, float]]] = []
    unwritten: dict[str, float] = {}
    for name, weight in rewards.items():
        write_answers = find_reward(name).write_answers
        if write_answers is None:
            unwritten[name] = weight
            continue
        spec = {name: weight}
        completions += [(text, spec) for text in write_answers(row["answer"], metadata)]
    has_solution = row["solution"] is not None and row["solution"] != row["answer"]
    proved_by_solution = rewards if has_solution else unwritten
    if proved_by_solution:
        completions.append((row["solution"], proved_by_solution))
    return [
        {
            "completion": completion,
            "answer": row["answer"],
            "metadata": row["metadata"],
            "reward_spec": json.dumps(spec, sort_keys=True),
        }
        for completion, spec in completions
    ]


def _describe_failure(trial: Row, outcome: Outcome) -> str | None:
    """Describe why a completion has no full marks; None if it has."""
    full_marks = compute_full_marks(parse_spec(trial["reward_spec"]))
    if outcome.score is not None and math.isclose(outcome.score, full_marks):
        return None
    result = outcome.score if outcome.outcome == "score" else outcome.outcome
    # The bare answer needs no second mention.
    is_bare = trial["completion"] == trial["answer"]
    statement = "" if is_bare else f" as {trial['completion'][:SHOWN]!r}"
    return f"{_show(trial['answer'])}{statement} scored {result} {outcome.breakdown}"


def _show(answer: str) -> str:
    return f"answer {answer[:SHOWN]!r}"
