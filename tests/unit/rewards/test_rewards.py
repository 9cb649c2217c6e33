"""Each reward on right, wrong and unjudgeable completions."""

import json
from typing import Any

import pytest

from tuneloop.rewards.scoring import Outcome, score_all


def judge(name: str, completion: str, answer: str = "", **metadata: Any) -> Outcome:
    row = {"completion": completion, "answer": answer, "reward_spec": json.dumps({name: 1.0})}
    return score_all([{**row, "metadata": json.dumps(metadata)}], timeout_s=20)[0]


@pytest.mark.parametrize(
    ("completion", "score"), [("42", 1.0), (" 42\n", 1.0), ("42.", 0.0), ("", 0.0), ("4 2", 0.0)]
)
def test_exact(completion: str, score: float) -> None:
    assert judge("exact", completion, "42").score == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so it is 0.5", "1/2", 1.0),
        (r"therefore $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        ("The answer is 1,234", "1234", 1.0),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        (r"$\{3, 1, 2\}$", r"\{1,2,3\}", 1.0),
        ("3 then 4 then 5", "4", 0.0),
        ("no number at all", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_numeric(completion: str, answer: str, score: float) -> None:
    assert judge("numeric", completion, answer).score == score


def test_numeric_without_a_gold_expression_can_not_judge() -> None:
    assert judge("numeric", "4", "").outcome == "unverifiable"


def test_numeric_is_stopped_by_the_parents_clock() -> None:
    row = {
        "completion": "$9^{9^{9^{9}}} + 1$",
        "answer": "$9^{9^{9^{9}}}$",
        "metadata": "",
        "reward_spec": '{"numeric": 1}',
    }
    slow, quick = score_all([row, {**row, "completion": "4", "answer": "4"}], timeout_s=2)
    assert slow.score in (None, 0.0)
    assert quick.score == 1.0


def test_format() -> None:
    pattern = {"pattern": r"<think>.*</think>\s*\d+"}
    assert judge("format", "<think>a\nb</think> 42 ", format=pattern).score == 1.0
    assert judge("format", "42", format=pattern).score == 0.0
    assert judge("format", "<think></think>42 and more", format=pattern).score == 0.0
    assert judge("format", "42").outcome == "unverifiable"
    assert judge("format", "42", format={"pattern": "("}).outcome == "infra_error"


@pytest.mark.parametrize(
    ("length", "score"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (99, -1.0)]
)
def test_length_penalty(length: int, score: float) -> None:
    assert (
        judge("length_penalty", "x" * length, length_penalty={"max_length": 10, "buffer": 4}).score
        == score
    )


def test_length_penalty_without_a_buffer_is_a_step() -> None:
    limits = {"max_length": 3, "buffer": 0}
    assert [judge("length_penalty", "x" * n, length_penalty=limits).score for n in (3, 4)] == [
        0.0,
        -1.0,
    ]
    assert judge("length_penalty", "x").outcome == "unverifiable"


def test_reasoning_gym_uses_the_tasks_own_verifier() -> None:
    entry = {"question": "?", "answer": "abc", "metadata": {}}
    about = {"task": "spell_backward", "config": {}, "entry": entry}
    assert judge("reasoning_gym", " abc\n", reasoning_gym=about).score == 1.0
    assert judge("reasoning_gym", "xyz", reasoning_gym=about).score == 0.0
    assert judge("reasoning_gym", "abc").outcome == "unverifiable"
    assert (
        judge("reasoning_gym", "abc", reasoning_gym={**about, "task": "none"}).outcome
        == "infra_error"
    )
