"""Find the final answer that a completion states: a box, "The answer is …", or its last expression.

The rewards `numeric` and `choice` begin with it, and `data/layouts/_parts.py: find_boxed` reads gold
answers of data sets by `iterate_boxes`. A resumed run keeps the scores that older rules gave. Its
rules decide which completions are right: a
change is tried on the recorded answers of `tests/unit/rewards` first (`test_numeric.py`,
`test_dollars.py`, `test_choice_and_json.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

BOX = re.compile(r"\\(?:boxed|fbox)\s*")
"""The beginning of a box. `rewards/answers/notation.py: WRAPPERS` knows the same two commands."""
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
JOINED = re.compile(
    r"(?:[\s$.,;:*]|\\\]|\\\[|\\\(|\\\)|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b)*"
)
"""What may stand between boxes that state one answer together, as in ``\\boxed{1}, \\boxed{2}``."""
STATED = re.compile(
    r"(?:\banswers?\b[*_]*[ \t]*(?:is|are|would be|will be|=|:)|####)[*_ \t:]*", re.IGNORECASE
)
"""What announces an answer. docs/rewards.md lists the words, and `rewards/numeric.py` and
`rewards/choice.py` write gold answers by them (`write_answers`)."""
# A full stop after a title or in a name of a place, as in St. Lucia, ends no sentence.
SENTENCE_END = re.compile(
    r"(?<!\bSt)(?<!\bMt)(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)[.!](?=\s|$|\*)|\n"
)
THOUGHTS_END = "</think>"
"""What ends a model's reasoning; the answer is looked for behind it, as are JSON, tool calls and
programs."""
MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$(?=\S)([^$]+?)(?<=\S)(?<!\\)\$(?!\d)",
    re.DOTALL,
)
"""Formulas. A single dollar opens one before a sign that is no space, and closes one after such a
sign and not before a digit: ``$18 now and $20`` are amounts of money."""
NUMBER = re.compile(
    r"(?<![\w.,])[-+]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s?/\s?\d+(?![\d/]))?(?:\s?\\?%)?"
)
"""A number in prose, with a currency, thousands, a denominator or a percent sign."""
TAIL = 20_000
"""Characters at the end of a completion in which a statement or an expression is looked for."""


@dataclass(frozen=True)
class FinalAnswer:
    """The text of a final answer, and how the completion states it.

    Attributes:
        text: the answer as it is written, perhaps with ``$``.
        source: ``box``; ``statement`` ("The answer is …", "#### …"); or ``text``: neither.
    """

    text: str
    source: Literal["box", "statement", "text"]


def find_final_answer(completion: str) -> FinalAnswer:
    """Find the final answer of `completion`, after its thoughts if they end.

    The last box counts, with those that it is joined with; without a box the last statement;
    without a statement all of the text.
    """
    _, ended, remainder = completion.rpartition(THOUGHTS_END)
    text = remainder if ended else completion
    boxed = _find_last_boxes(text)
    if boxed is not None:
        return FinalAnswer(boxed, "box")
    if BOX.search(text):
        # The box was never closed: the completion was cut, and states nothing.
        return FinalAnswer("", "box")
    statement = _find_last_statement(text)
    if statement is not None:
        return FinalAnswer(statement, "statement")
    return FinalAnswer(text.strip(), "text")


def find_last_expression(text: str) -> str | None:
    """Find the last expression in prose: the last ``$…$`` and those joined with it, or the last
    number; None if there is neither."""
    text = text[-TAIL:]
    formulas = list(MATH.finditer(text))
    if formulas:
        first = _find_first_joined(text, [formula.span() for formula in formulas])
        # One group of each match is the formula, by its delimiters.
        parts = [next(filter(None, formula.groups())).strip() for formula in formulas[first:]]
        return ", ".join(dict.fromkeys(parts))
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


def iterate_boxes(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield the start, the end and the content of every closed box that stands in no other."""
    closing = _match_braces(text)
    position = 0
    for match in BOX.finditer(text):
        start = match.end()
        if match.start() < position:
            continue
        if text.startswith("{", start):
            # A box that never closes was cut, or is a slip of the pen; those after it count.
            end = closing.get(start)
            if end is None:
                continue
            position = end + 1
            yield match.start(), position, text[start + 1 : end]
        else:
            # `\\boxed 5` takes one sign.
            position = start + 1
            yield match.start(), position, text[start:position]


def _match_braces(text: str) -> dict[int, int]:
    """Map each opening brace to the one that closes it; escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _find_last_boxes(text: str) -> str | None:
    """Find the content of the last box, or of several that are joined ("… and …")."""
    boxes = list(iterate_boxes(text))
    if not boxes:
        return None
    first = _find_first_joined(text, [(start, end) for start, end, _ in boxes])
    # The same box, repeated, is one answer.
    contents = dict.fromkeys(content.strip() for _, _, content in boxes[first:])
    return ", ".join(contents)


def _find_first_joined(text: str, spans: Sequence[tuple[int, int]]) -> int:
    """Return the index of the first of the spans that state one answer with the last one."""
    first = len(spans) - 1
    while first > 0 and _are_joined(text, spans[first - 1][1], spans[first][0]):
        first -= 1
    return first


def _are_joined(text: str, start: int, end: int) -> bool:
    return JOINED.fullmatch(text, start, end) is not None


def _find_last_statement(text: str) -> str | None:
    """Find what the last "The answer is …" or ``#### …`` states."""
    text = text[-TAIL:]
    statements = list(STATED.finditer(text))
    if not statements:
        return None
    remainder = text[statements[-1].end() :].lstrip()
    # A sentence does not end within a formula. Units and a second answer may follow it.
    end = 0
    formula = MATH.match(remainder)
    while formula is not None and _are_joined(remainder, end, formula.start()):
        end = formula.end()
        formula = MATH.search(remainder, end)
    sentence = SENTENCE_END.search(remainder, end)
    return remainder[: sentence.start() if sentence else None].strip(" *_")
