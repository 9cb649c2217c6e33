"""Verifiers of reasoning_gym that evaluate the completion: it runs no code in the judge's process."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from tuneloop.data import Example
from tuneloop.data.reasoning_gym import load_splits
from tuneloop.rewards.evaluated_text import EVALUATORS, find_evaluations, is_formula
from tuneloop.rewards.reasoning_gym import score

EVALUATING = sorted(
    name for name, (task, _) in DATASETS.items() if find_evaluations(task.score_answer, task)
)
CODE = [
    "__import__('pathlib').Path({marker!r}).touch()",
    "  __import__('pathlib').Path({marker!r}).touch()  ",
    "[open({marker!r}, 'w') for _ in [1]]",
    "[].__class__.__base__.__subclasses__() and open({marker!r}, 'w')",
    "(lambda: open({marker!r}, 'w'))()",
    "sympify(\"open({marker!r}, 'w')\")",
    "S(\"open({marker!r}, 'w')\")",
    "x + open({marker!r}, 'w')",
    "1 if open({marker!r}, 'w') else 2",
    "f'{{open({marker!r}, \"w\")}}'",
]
"""Completions that make a file where they are evaluated."""


def read_examples(task: str, count: int) -> list[Example]:
    rows = load_splits(count, 1, task=task).train
    return [row for row, _ in zip(rows, range(count), strict=False)]


def test_the_verifiers_that_evaluate_are_recognized() -> None:
    """Those of reasoning_gym 0.1.25; a call in the text of `score_answer` itself is never missed."""
    expected = {"countdown", "n_queens", "puzzle24", "simple_integration", "spiral_matrix"}
    expected |= {"binary_matrix", "intermediate_integration", "polynomial_multiplication"}
    assert expected | {"string_insertion"} <= set(EVALUATING)
    for name, (task, _) in DATASETS.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(task.score_answer)))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {getattr(call, "attr", getattr(call, "id", "")) for call in calls}
        assert name in EVALUATING or not called & set(EVALUATORS), name


@pytest.mark.parametrize("task", EVALUATING)
def test_a_completion_runs_no_code(task: str, tmp_path: Path) -> None:
    (example,) = read_examples(task, 1)
    marker = tmp_path / "marker"
    for code in CODE:
        points = score(code.format(marker=str(marker)), example.answer, example.metadata)
        assert not marker.exists(), code
        assert points is not None and points < 0.1, code


@pytest.mark.parametrize("task", EVALUATING)
def test_right_answers_keep_their_marks(task: str) -> None:
    for example in read_examples(task, 10):
        text = example.answer
        if task == "intermediate_integration" and "Integral(" in text:
            continue  # its own gold answer is an integral that sympy could not solve
        assert score(text, text, example.metadata) == 1.0, text


def test_a_list_keeps_its_share() -> None:
    """These verifiers pay a tenth for a list of the right parts."""
    (letters,) = read_examples("string_insertion", 1)
    (numbers,) = read_examples("spiral_matrix", 1)
    assert score(str(list(letters.answer)), "", letters.metadata) == 0.1
    items = [int(number) for number in numbers.answer.split()]
    assert score(str(items), "", numbers.metadata) == 0.1


@pytest.mark.parametrize("text", ["oracle_answer", "(oracle_answer)", "entry['answer']"])
def test_a_variable_of_the_verifier_is_no_answer(text: str) -> None:
    (example,) = read_examples("string_insertion", 1)
    assert score(text, "", example.metadata) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "x**2/2 + C",
        "-exp(x)*sin(x) + 1.5*cos(2*x) + C",
        "log(x, 2) + sqrt(pi)",
        "(1 + 2)*3 - .5",
        "X^2!",
        "x1 + 2",
    ],
)
def test_formulas_pass(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "x.diff(x)",
        "1..real",
        "'a'",
        "x_1",
        "preview(x)",
        "open(x)",
        "x if y else z",
        "x[0]",
        "x . y",
    ],
)
def test_code_is_no_formula(text: str) -> None:
    assert not is_formula(text)
