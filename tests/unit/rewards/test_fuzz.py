"""No text of a policy keeps a judge from a score: every answer gets one, and no stage ends."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.rewards.adversarial import generate_completions
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.plugins import list_shipped_variants
from tuneloop.rewards.scoring import Outcome, score_all
from tuneloop.stages.reward import reward

GYM_ENTRY = {"question": "6 + 36 =", "answer": "42", "metadata": {}}
CHECK = "def check(candidate):\n    assert candidate(20, 22) == 42 and candidate(1, 2) < 4\n"
TOOL = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "pattern": "^(a+)+$"}},
    },
}
CALL = json.dumps([{"name": "add", "arguments": {"a": 20, "b": 22}}])
SCHEMA = {"type": "object", "properties": {"sum": {"const": 42}}, "required": ["sum"]}
JUDGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exact": ("exact", "42", {}),
    "numeric, a number": ("numeric", "42", {}),
    "numeric, an interval": ("numeric", r"(-\infty, \frac{1}{2}]", {}),
    "numeric, an equation": ("numeric", "y = 2x + 3", {}),
    "numeric, words": ("numeric", r"\text{Tuesday}", {}),
    "choice": ("choice", "B", {"choices": ["41", "42", "43"]}),
    "tool_calls": ("tool_calls", CALL, {"tools": [TOOL]}),
    "tool_calls, any": ("tool_calls", "", {"tools": [TOOL]}),
    "tool_calls, BFCL": ("tool_calls", '[{"add": {"a": [20], "b": ["", {"c": [1]}]}}]', {}),
    "json_schema": ("json_schema", '{"sum": 42}', {"schema": SCHEMA, "json_schema": {"equal": True}}),
    "format": ("format", "", {"format": {"pattern": r"<think>.*</think>\s*\d+"}}),
    "length_penalty": ("length_penalty", "", {"length_penalty": {"max_length": 400, "buffer": 100}}),
    "reasoning_gym": (
        "reasoning_gym",
        "42",
        {"reasoning_gym": {"task": "chain_sum", "config": {}, "entry": GYM_ENTRY}},
    ),
    "environment": ("environment", "", {"environment": {"reward": 0.5}}),
    "code, calls": ("code", "", {"tests": [{"call": "add(1, 2)", "returns": 3}], "code": {"seconds": 1}}),
    "code, a check": (
        "code",
        "",
        {"test": CHECK, "entry_point": "add", "prompt": "def add(a, b):\n", "code": {"seconds": 1}},
    ),
    "code, output": ("code", "", {"stdin_tests": [{"input": "20", "output": "42"}], "code": {"seconds": 1}}),
}  # fmt: skip
MOST = int(os.environ.get("FUZZ_ANSWERS", "0"))
"""Answers for each judge; 0: 10,000, and 200 for those that run programs.
`make fuzz-judges` has 10,000 for all."""
TIMEOUT_S = 20
"""Seconds of computing after which a completion has ended its judge, which is a score, too."""


def test_every_reward_is_fuzzed() -> None:
    assert {name for name, *_ in JUDGES.values()} == set(list_shipped_variants("rewards"))


def build_rows(judge: str, completions: list[str]) -> list[dict[str, str]]:
    name, answer, metadata = JUDGES[judge]
    common = {
        "answer": answer,
        "metadata": json.dumps(metadata),
        "reward_spec": json.dumps({name: 1.0}),
        "group": "g",
    }
    return [{**common, "completion": completion} for completion in completions]


def check_outcomes(judge: str, completions: list[str], outcomes: list[Outcome]) -> None:
    """Each has a score; a program that tried to leave its sandbox has that outcome instead."""
    allowed = {"score", "escape"} if judge.startswith("code") else {"score"}
    dodged = [
        (completion[:200], outcome)
        for completion, outcome in zip(completions, outcomes)
        if outcome.outcome not in allowed
    ]
    assert not dodged, f"{len(dodged)} of {len(completions)}: {dodged[:3]}"
    print(judge, Counter(outcome.outcome for outcome in outcomes))


@pytest.mark.parametrize("judge", JUDGES)
def test_some_answers_all_get_a_score(judge: str) -> None:
    count = 40 if judge.startswith("code") else 300
    completions = list(itertools.islice(generate_completions(44), count))
    outcomes = score_all(build_rows(judge, completions), timeout_s=TIMEOUT_S, memory=1 << 30)
    check_outcomes(judge, completions, outcomes)


@pytest.mark.slow
@pytest.mark.local
@pytest.mark.parametrize("judge", JUDGES)
def test_many_answers_all_get_a_score_and_end_no_stage(judge: str, tmp_path: Path) -> None:
    """Through the stage, whose budget for failures is none; Parquet holds no half of a surrogate
    pair, so these are judged apart."""
    count = MOST or (200 if judge.startswith("code") else 10_000)
    completions = list(itertools.islice(generate_completions(45), count))
    storable = [text for text in completions if not any("\ud800" <= c <= "\udfff" for c in text)]
    others = [text for text in completions if any("\ud800" <= c <= "\udfff" for c in text)]
    assert len(storable) > 0.9 * count and len(others) > 0.01 * count
    draft = Draft(str(tmp_path / "rollouts"))
    tokens = {
        "request_id": "r",
        "prompt_ids": [1],
        "completion_ids": [2],
        "logprobs": [-1.0],
        "loss_mask": [True],
        "policy_versions": [3],
        "finish_reason": "stop",
    }
    rows = [{**tokens, **row} for row in build_rows(judge, storable)]
    pq.write_table(pa.Table.from_pylist(rows), draft.path / "rollouts.parquet")
    draft.commit(stage="rollout", facts={"version": 3})
    reward(
        out=str(tmp_path / "scored"),
        rollouts=str(tmp_path / "rollouts"),
        timeout_s=TIMEOUT_S,
        error_budget=0.0,
        escape_score=0.0,
        workers=2,
    )
    facts = Artifact(str(tmp_path / "scored")).manifest.facts["reward"]
    allowed = {"score", "escape"} if judge.startswith("code") else {"score"}
    assert sum(facts["outcomes"][kind] for kind in allowed) == len(storable), facts["outcomes"]
    outcomes = score_all(build_rows(judge, others), timeout_s=TIMEOUT_S, workers=2)
    check_outcomes(judge, others, outcomes)
