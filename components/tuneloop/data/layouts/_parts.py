"""What several layouts need: answers in boxes, choices by letter, programs in fences, pairs.

Imported by the families of layouts alone. What is written here is read by rewards: programs in
fences by `rewards/programs/completions.py: extract_code`, letters by `rewards/choice.py`, and the
answer of `find_boxed` by `rewards/numeric.py`.
"""

import ast
import json
import random
import string
from collections.abc import Sequence
from typing import Any

import xxhash

from tuneloop.data import BadValue, Example, Prompt
from tuneloop.data.columns import (
    MISSING,
    as_messages,
    get_path,
    read_answer,
    read_completion,
    read_prompt,
    split_conversation,
)
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.messages import get_text, is_messages, parse_messages, parse_tools
from tuneloop.data.readers.strict_json import describe_type, parse_json
from tuneloop.formats.chat_forms import Message
from tuneloop.rewards.answers.extraction import iterate_boxes

LAYOUTS: tuple[Layout, ...] = ()
"""Empty, but required: `list_layouts` imports every module of this package, and reads its layouts."""


def get_text_of(values: Values, column: str) -> str:
    """Return the text of a required column. Raises BadValue: it is no text, or empty."""
    prompt = read_prompt(values, column)
    if not isinstance(prompt, str):
        raise BadValue(f"column {column!r} must hold text, not messages")
    return prompt


def get_value(values: Values, path: str) -> Any:
    """Return the value at a path. Raises BadValue: there is none, or it is null."""
    value = get_path(values, path)
    if value is MISSING or value is None:
        state = "null" if value is None else "missing"
        raise BadValue(f"column {path!r} is {state}")
    return value


def get_optional_text(values: Values, column: str) -> str:
    """Return the text of a column that may be empty or missing. Raises BadValue: it is no text."""
    value = values.get(column)
    if value is not None and not isinstance(value, str):
        raise BadValue(f"column {column!r} must hold text, not {describe_type(value)}")
    return value or ""


def get_answer(values: Values, column: str) -> str:
    """Return the answer that a column holds. Raises BadValue: it holds none."""
    return read_answer(get_path(values, column), column)


def find_boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{…}`` of a solution holds; None if there is none, or an empty one.

    >>> find_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes = [content for _, _, content in iterate_boxes(text)]
    if not boxes:
        return None
    return boxes[-1].strip() or None


def fence_program(program: str) -> str:
    """Return a program as a model answers with it: a fenced block."""
    return f"```python\n{program.strip(chr(10))}\n```"


def parse_list(value: Any, column: str) -> list[Any]:
    """Return a list, or that of its JSON (or Python) text. Raises BadValue: it is neither."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except BadValue:
            value = parse_literal(value, column)
    if not isinstance(value, list):
        raise BadValue(f"column {column!r} must hold a list, not {describe_type(value)}")
    return value


def parse_literal(text: str, column: str) -> Any:
    """Return the value of a Python literal. Raises BadValue: the text is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadValue(f"column {column!r} is neither JSON nor a Python literal") from error


def format_choices(question: str, choices: Sequence[str]) -> str:
    """Return a question of multiple choice as a prompt that asks for a letter."""
    letters = string.ascii_uppercase[: len(choices)]
    lines = [f"{letter}. {choice}" for letter, choice in zip(letters, choices)]
    listed = "\n".join(lines)
    return f"{question}\n\n{listed}\n\nAnswer with the letter of the right choice."


def check_choices(choices: Any, column: str) -> list[str]:
    """Return choices as texts. Raises BadValue: they are no list of two to 26 texts."""
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26:
        raise BadValue(f"column {column!r} must hold 2 to 26 choices")
    return [read_answer(choice, column) for choice in choices]


def shuffle_choices(right: str, wrong: Sequence[str]) -> tuple[list[str], str]:
    """Return choices in an order that follows from their text alone, and the letter of `right`.
    Raises BadValue: a wrong choice is the right one, so that two letters would be right.
    """
    if right in wrong:
        raise BadValue(f"has the right choice {right!r:.80} among the wrong ones, too")
    choices = [right, *wrong]
    # The same data gives the same letters, whatever seed a run has and however rows are ordered.
    seed = xxhash.xxh3_64_intdigest(json.dumps(choices, ensure_ascii=False).encode())
    random.Random(seed).shuffle(choices)
    return choices, string.ascii_uppercase[choices.index(right)]


def read_pair(values: Values) -> Example:
    """Read the pair ``chosen`` and ``rejected``, whose sides have the prompt in them. Raises
    BadValue: the sides differ before their last message, or one is no conversation."""
    sides: list[tuple[list[Message], Message]] = []
    for column in ("chosen", "rejected"):
        messages = parse_messages(values.get(column), column)
        try:
            sides.append(split_conversation(messages))
        except BadValue as error:
            raise BadValue(f"column {column!r} {error}") from error
    (prompt, better), (other_prompt, worse) = sides
    # Sides that differ in an earlier turn are not two completions of one prompt.
    if prompt != other_prompt:
        raise BadValue("'chosen' and 'rejected' differ before their last message")
    if "tool_calls" in better or "tool_calls" in worse:
        raise BadValue("a side of the pair is a tool call; only text can be preferred")
    return make_pair(prompt, get_text(better), get_text(worse), values)


def read_sides(values: Values, prompt_column: str) -> Example:
    """Read the pair ``chosen`` and ``rejected`` with a prompt of its own: its sides are
    completions, or have the prompt in them once more."""
    if is_messages(values.get("chosen")) and len(values["chosen"]) > 1:
        return read_pair(values)
    prompt = read_prompt(values, prompt_column)
    better = read_completion(values, "chosen")
    worse = read_completion(values, "rejected")
    if is_messages(values.get("chosen")):
        prompt = as_messages(prompt)
    return make_pair(prompt, better, worse, values)


def make_pair(prompt: Prompt, chosen: str, rejected: str, values: Values) -> Example:
    """Make an example of a pair, with the column ``tools`` of its row. Raises BadValue: its sides
    are equal. `data/columns.py: Columns.apply` refuses these by itself for the columns that a user
    names.
    """
    if chosen == rejected:
        raise BadValue("chosen and rejected are equal: there is nothing to prefer")
    tools = parse_tools(values.get("tools"))
    return Example(prompt, None, demonstration=chosen, rejected=rejected, tools=tools)
