"""Multiple choice: the prompt lists the choices by letter, and the answer is a letter.

The metadata ``choices`` is read by `rewards/choice.py: read_choices`, in the order of the letters.
"""

import string

from tuneloop.data import BadValue, Example
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import (
    check_choices,
    format_choices,
    get_text_of,
    get_value,
    shuffle_choices,
)

CHOICE = {"choice": 1.0}
"""The reward of these layouts, and its weight."""
WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
"""GPQA's columns with the wrong choices."""


def read_gpqa(values: Values) -> Example:
    """Read GPQA: one right answer and three wrong ones, in an order that their text decides."""
    right = get_text_of(values, "Correct Answer").strip()
    wrong = [get_text_of(values, column).strip() for column in WRONG]
    choices, letter = shuffle_choices(right, wrong)
    return _make_question(get_text_of(values, "Question").strip(), choices, letter)


def read_mmlu(values: Values) -> Example:
    """Read MMLU: the answer is the number of a choice, from 0, or its letter."""
    column = "choices" if "choices" in values else "options"
    choices = check_choices(get_value(values, column), column)
    letter = _find_letter(get_value(values, "answer"), choices)
    return _make_question(get_text_of(values, "question"), choices, letter)


def read_arc(values: Values) -> Example:
    """Read ARC and CommonsenseQA: choices with labels of their own, and the right one's label."""
    labels = get_value(values, "choices.label")
    choices = check_choices(get_value(values, "choices.text"), "choices.text")
    key = get_value(values, "answerKey")
    has_labels = isinstance(labels, list) and len(labels) == len(choices)
    if not has_labels or key not in labels:
        raise BadValue(f"column 'answerKey' is {key!r}, which is not the label of a choice")
    # Some rows of ARC have the labels 1 to 4: the prompt lists all choices by letter.
    letter = string.ascii_uppercase[labels.index(key)]
    return _make_question(get_text_of(values, "question"), choices, letter)


def _make_question(question: str, choices: list[str], letter: str) -> Example:
    """Make an example of a question; `letter` names the right one of its choices.

    The reward `choice` reads the choices from the metadata, since completions may state one by its
    text.
    """
    prompt = format_choices(question, choices)
    return Example(prompt, letter, metadata={"choices": choices})


def _find_letter(answer: object, choices: list[str]) -> str:
    """Find the letter of the choice that an answer names by its number, from 0, or its letter.

    The text of a choice is not compared. Raises BadValue, by which the row is refused: it is
    neither.
    """
    letters = string.ascii_uppercase[: len(choices)]
    # CSV has numbers as text.
    if isinstance(answer, str) and answer.isdigit():
        answer = int(answer)
    if type(answer) is int and 0 <= answer < len(choices):
        return letters[answer]
    if isinstance(answer, str) and len(answer) == 1 and answer.upper() in letters:
        return answer.upper()
    raise BadValue(f"column 'answer' is {answer!r}, which is neither a choice's number nor letter")


LAYOUTS = (
    Layout(
        name="gpqa",
        title="GPQA",
        columns=("Question", "Correct Answer", *WRONG),
        read=read_gpqa,
        summary="prompt from Question and its four answers, answer is a letter",
        rewards=CHOICE,
    ),
    Layout(
        name="mmlu",
        title="MMLU",
        columns=("question", "choices", "answer"),
        types={"choices": list},
        read=read_mmlu,
        summary="prompt from question and choices, answer is a letter",
        rewards=CHOICE,
    ),
    Layout(
        name="mmlu-pro",
        title="MMLU-Pro",
        columns=("question", "options", "answer"),
        types={"options": list},
        read=read_mmlu,
        summary="prompt from question and options, answer is a letter",
        rewards=CHOICE,
    ),
    Layout(
        name="arc",
        title="ARC or CommonsenseQA",
        columns=("question", "choices.text", "choices.label", "answerKey"),
        read=read_arc,
        summary="prompt from question and choices, answer is a letter",
        rewards=CHOICE,
    ),
)
