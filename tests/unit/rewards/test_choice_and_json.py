"""The rewards `choice` and `json_schema`."""

import json
from typing import Any

import pytest

from tuneloop.rewards import choice, json_schema
from tuneloop.rewards.scoring import Unverifiable

CAPITALS = {"choices": ["London", "Rome", "Paris", "Bern or Basel"]}


@pytest.mark.parametrize(
    "completion",
    [
        "C",
        "(C)",
        "C.",
        "C)",
        "c".upper() + ": Paris",
        "C. Paris",
        "Option C.",
        "option C",
        "Answer: C",
        "Answer C",
        "Choice C: Paris",
        "The answer is Option C.",
        "(C) Paris",
        "Paris",
        "paris.",
        r"\boxed{C}",
        r"\boxed{\text{(C)}}",
        r"\boxed{\text{C. Paris}}",
        r"\boxed{\text{Paris}}",
        r"It is not A: $\boxed{C}$.",
        "Answer: C",
        "**Answer:** C",
        "The answer is (C).",
        "The correct answer is option C.",
        "The answer is C. Paris",
        "The answer is Paris.",
        "A is in England.\nB is in Italy.\nAnswer: C",
        "Let me think.\n\nC",
        "<think>A? B?</think>C",
        "The answer is A. No: the answer is C.",
    ],
)
def test_a_choice_is_read(completion: str) -> None:
    assert choice.score(completion, "C", CAPITALS) == 1.0
    assert choice.score(completion, "(C)", CAPITALS) == 1.0
    assert choice.score(completion, "Paris", CAPITALS) == 1.0
    assert choice.score(completion, "B", CAPITALS) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "c",
        "A, B, C, D",
        "A B C D",
        "C or B",
        "C and D",
        "(B) or (C)",
        "(C) (B)",
        "C. Rome",
        "ABCD",
        r"\boxed{B} \boxed{C}",
        r"\boxed{B, C}",
        r"\boxed{C}, \boxed{B}",
        "<think>C</think> B",
        "The answer is C or B.",
        "It could be Paris, or Rome",
        "A capital of France is the answer to C",
        "Answer: E",
    ],
)
def test_what_chooses_two_or_none_is_wrong(completion: str) -> None:
    assert choice.score(completion, "C", CAPITALS) == 0.0


def test_a_choice_whose_text_has_a_separator_or_without_texts() -> None:
    assert choice.score("D. Bern or Basel", "D", CAPITALS) == 1.0
    assert choice.score("Bern or Basel", "D", CAPITALS) == 1.0
    assert choice.score("The answer is (B).", "B", {}) == 1.0
    assert choice.score("A lot of text about it", "A", {}) == 0.0
    for completion in choice.write_answers("Rome", CAPITALS):
        assert choice.score(completion, "Rome", CAPITALS) == 1.0


@pytest.mark.parametrize(
    ("answer", "metadata", "reason"),
    [
        ("Oslo", CAPITALS, "the answer 'Oslo' is no letter of a choice, and no choice"),
        ("E", CAPITALS, "the answer 'E' is no letter"),
        ("", CAPITALS, "the answer '' is no letter"),
        ("A", {"choices": [1, 2]}, "metadata['choices'] is no list of texts"),
    ],
)
def test_a_choice_that_can_not_be_judged_is_explained(
    answer: str, metadata: Any, reason: str
) -> None:
    with pytest.raises(Unverifiable) as caught:
        choice.score("A", answer, metadata)
    assert reason in str(caught.value)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/text"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"text": {"type": "string", "pattern": "^[A-Z]"}},
}
ANN = '{"name": "Ann", "age": 7}'


@pytest.mark.parametrize(
    ("completion", "parts"),
    [
        (ANN, (1, 1)),
        (f"```json\n{ANN}\n```", (1, 1)),
        (f"Here it is:\n```\n{ANN}\n```\nDone.", (1, 1)),
        (f"<think>{{}}</think>\n{ANN}<|im_end|>", (1, 1)),
        ('{"name": "Ann", "age": 7.0}', (1, 1)),
        ('{"name": "ann"}', (1, 0)),
        ('{"name": "Ann", "age": true}', (1, 0)),
        ('{"name": "Ann", "age": -1}', (1, 0)),
        ('{"name": "Ann", "size": 1}', (1, 0)),
        ("[]", (1, 0)),
        ("", (0, 0)),
        ("Ann", (0, 0)),
        (ANN + ANN, (0, 0)),
        ('{"name": "Ann", "name": "Bob"}', (0, 0)),
        ('{"name": "Ann", "age": NaN}', (0, 0)),
        ('{"name": "Ann",}', (0, 0)),
        ("[" * 100_000, (0, 0)),
        ('{"name": "Ann", "age": ' + "9" * 10_000 + "}", (0, 0)),
    ],
)
def test_json_is_validated(completion: str, parts: tuple[float, float]) -> None:
    expected = (float(parts == (1, 1)), dict(zip(("parsed", "valid"), parts)))
    assert json_schema.score(completion, "", {"schema": SCHEMA}) == expected
    assert json_schema.score(completion, "", {"schema": json.dumps(SCHEMA)}) == expected


def test_json_may_have_to_be_the_answer() -> None:
    metadata = {"schema": SCHEMA, "json_schema": {"equal": True}}
    assert json_schema.score('{"age": 7.0, "name": "Ann"}', ANN, metadata)[0] == 1.0
    assert json_schema.score('{"name": "Ann"}', ANN, metadata)[0] == 0.0
    assert json_schema.score('{"name": "Ann", "age": 8}', ANN, metadata)[0] == 0.0
    for completion in json_schema.write_answers(ANN, metadata):
        assert json_schema.score(completion, ANN, metadata)[0] == 1.0


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "metadata has no schema; the reward json_schema needs `schema` in it"),
        ({"schema": "{"}, "metadata['schema'] is no JSON"),
        ({"schema": {"type": "texts"}}, "metadata['schema'] is no JSON Schema: 'texts' is not valid"),
        ({"schema": {}, "json_schema": {"equal": True}}, "the answer is no JSON"),
    ],
)  # fmt: skip
def test_json_that_can_not_be_judged_is_explained(metadata: Any, reason: str) -> None:
    with pytest.raises(Unverifiable) as caught:
        json_schema.score("{}", "", metadata)
    assert reason in str(caught.value)


def test_no_schema_is_fetched() -> None:
    """A reference that leads elsewhere is not followed, whatever stands there."""
    schema = {"$ref": "http://127.0.0.1:1/schema.json"}
    assert json_schema.score("{}", "", {"schema": schema})[0] == 0.0
