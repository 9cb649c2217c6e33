"""Read what kind of answer a text states: a value, words, a list, brackets, a relation.

`read_answer` returns one of the forms below, decided by the text alone. `comparison` compares them.

A reader that is added goes into `READERS`, before those that would take its text. A form that is
added goes into `Form`, and needs a case in `rewards/answers/comparison.py: is_same`: without one it
is equal to nothing. `rewards/numeric.py: _is_prose` decides whether a sentence may be read as it.
`tests/unit/rewards/test_numeric.py` tests all of them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tuneloop.rewards.answers.brackets import (
    CLOSING,
    closes_at_end,
    measure_depth,
    split_outside_brackets,
)
from tuneloop.rewards.answers.notation import normalize_notation, remove_spaces
from tuneloop.rewards.answers.units import name_unit

LONGEST = 1000
"""Characters of the longest answer that is read; of a longer one only the writing is compared."""
LONGEST_VALUE = 400
"""Characters of the longest expression that is computed. This limit and the next ones keep the
parser of `rewards/answers/values.py` from taking longer than a reward may."""
DEEPEST = 12
"""The deepest nesting of lists and brackets that is read."""
DEEPEST_VALUE = 8
"""The deepest nesting of brackets in an expression that is computed."""
MOST_BARS = 8
"""The most ``|`` in an expression that is computed."""
COMMAND_NAMES = """
    frac sqrt pi cdot times div infty log ln lg exp sin cos tan cot sec csc arcsin arccos arctan
    sinh cosh tanh binom choose lfloor rfloor lceil rceil alpha beta gamma delta epsilon varepsilon
    zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi psi omega Gamma
    Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
COMMANDS = frozenset(COMMAND_NAMES.split())
r"""The commands of LaTeX that a computed value may hold. Any other (``\approx``, ``\neq``,
``\cancel``, ``\phantom``, ``\sum``) may say something that the parser passes over, so such an
answer is compared by its writing."""
COMMAND = re.compile(r"\\([a-zA-Z]+)")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
SEPARATOR_WORD = re.compile(
    r"\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|\\(?:lor|vee)(?![a-zA-Z])"
    r"|(?:,\s*)?(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z}])"
)
RELATION = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>)")
LETTERS = re.compile(r"[^\W\d_]+")
"""Letters in a row, of any script."""
WORDS = re.compile(r"[^\W\d_]+(?:[ \-'’.]+[^\W\d_]+)*")
VARIABLES = frozenset("abcdkmnpqrstxyz")
"""Letters of which up to three in a row are a product of variables, not a word."""
NAME = re.compile(r"[A-Za-z]|\\(?:theta|alpha|beta|gamma|phi|lambda|mu)")
"""A variable between whose bounds an inequality puts it."""
LABEL = re.compile(
    r"(?=[A-Za-z\\])(?:\\(?!frac|sqrt|pi|infty|cdot|times|div|log|ln|binom|text)[a-zA-Z]+"
    r"|\\text\s*\{[^{}]*\}|[A-Za-z']|\s|_\{?\w+\}?|\^\{?(?:-1|[A-Za-z'])\}?"
    r"|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\})+"
)
r"""The first side of an equation that only names its value: ``x``, ``f(x)``, ``\text{Area}``.
Commands that begin a value, and no name, are excluded (``frac``, ``sqrt``, …)."""
UNIT = re.compile(r"(.*\S)\s*\\text\s*\{([^{}]*)\}\s*(\^\s*\{?-?\d\}?)?")
PLAIN_UNIT = re.compile(
    r"([-+]?(?:\d[\d.,]*|\\frac\{\d+\}\{\d+\}|\(\d+\+\\frac\{\d+\}\{\d+\}\)))\s*"
    r"([A-Za-z]{2,}(?:[ /]+[A-Za-z]+){0,4}(?:\^\{?[23]\}?)?)"
)
DEGREE = re.compile(r"(.*\S)\s*\^\\circ")
PERCENT = re.compile(
    r"(.*[^\s\\])\s*(?:\\?%|\\text\s*\{\s*(?:percent|\\?%)\s*\}|(?<![A-Za-z])percent)"
)
CURRENCY = re.compile(r"([-+]?)\s*(\\\$|€|£|\\text\s*\{\s*\\\$\s*\})\s*(?=[\d.\\-])")
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
BASE = re.compile(r"(\d[0-9A-Fa-f]*)\s*_\s*\{?(?:\\text\s*\{)?\s*(\d+|[a-z]+)\s*\}{0,2}")
TIME = re.compile(r"(\d+):(\d\d)\s*(?:\\text\s*\{)?\s*([aApP])\.?\s?[mM]\.?\s*\}?")
CHOICES = (
    re.compile(r"\\text\s*\{\s*\(?([A-Z])[).:]*\s*\}"),
    re.compile(r"\((?:\\text\s*\{)?([A-Z])\}?\)"),
    re.compile(r"([A-Z])[).]"),
)
"""Letters of multiple choice: they are `Words`, and `comparison.py` tells their case apart."""
CHOICE_AND_TEXT = re.compile(r"(?:\\text\s*\{\s*\(([A-Z])\)\s*\}\s*|\(([A-Z])\)\s+)(\S.*)")
MATRIX = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
FOREIGN_SIGNS = frozenset(',;:=<>%$#&~?"`@\\')
"""Signs that no expression has that is computed: with one an answer is compared by its writing."""
DIGITS_APART = re.compile(r"\d\s+[\d.]")


@dataclass(frozen=True)
class Words:
    """A word or several, or the letter of a choice."""

    text: str


@dataclass(frozen=True)
class Value:
    """Something to compute: `latex`, and what was taken off it.

    Attributes:
        latex: the value in LaTeX, of `COMMANDS` alone.
        unit: the words after it, or the currency before it; empty: none.
        is_percent: whether a percent sign follows it.
    """

    latex: str
    unit: str = ""
    is_percent: bool = False


LEAST = Value(r"-\infty")
GREATEST = Value(r"\infty")
"""The bounds of what has none."""


@dataclass(frozen=True)
class Several:
    r"""Answers that are all stated, in any order: ``1, 2``, ``x = 1 or x = 2``, ``\{1, 2\}``.

    The parts of a union of intervals or sets are such answers, too.
    """

    items: tuple["Form", ...]


@dataclass(frozen=True)
class Ordered:
    """Items in their order, between two marks that say what they are.

    The marks are the brackets of a tuple or an interval. Of a ratio, a matrix, an inequality, a
    number with its base, or a time, `opening` names the kind, and `closing` is empty. Two are the
    same if both marks are, so a kind that is added this way needs no case in
    `comparison.py: is_same`.
    """

    opening: str
    closing: str
    items: tuple["Form", ...]


@dataclass(frozen=True)
class Chain:
    """Sides of an equation after its name, if it has one: ``x = 5``, ``f(x) = 2x + 3``, ``2 = 2``.

    The sides have to be equal to one another.
    """

    name: str
    sides: tuple["Form", ...]


@dataclass(frozen=True)
class Bounds:
    """The interval that inequalities leave to one variable, perhaps up to infinity."""

    name: str
    interval: Ordered


@dataclass(frozen=True)
class Writing:
    """What cannot be read as any of the others: compared by how it is written."""

    text: str


Form = Words | Value | Several | Ordered | Chain | Bounds | Writing


def read_answer(text: str) -> Form:
    """Read an answer, given as a data set or a model writes it."""
    normalized = normalize_notation(text)
    if len(normalized) > LONGEST:
        return Writing(remove_spaces(normalized))
    return _read(normalized, DEEPEST)


def _read(text: str, depth: int) -> Form:
    """Read the form of a text by the first of `READERS` that knows it, or else as a value.

    Args:
        text: in the notation of `normalize_notation`.
        depth: how many forms may still lie in one another; at 0 the text is a `Writing`.
    """
    text = text.strip()
    if not text or depth == 0:
        return Writing(remove_spaces(text))
    wrapped = TEXT.fullmatch(text)
    if wrapped is not None and SEPARATOR_WORD.search(f" {wrapped[1]} "):
        # The names in \text{Maria and Ann} are several answers.
        return _read(wrapped[1], depth - 1)
    for reader in READERS:
        form = reader(text, depth)
        if form is not None:
            return form
    return _read_value(text)


def _read_words(text: str, depth: int) -> Form | None:
    """Read words: text in ``\\text{…}``, or letters that no expression has; and letters of choices."""
    for pattern in CHOICES:
        choice = pattern.fullmatch(text)
        if choice is not None:
            return Words(choice[1])
    explained = CHOICE_AND_TEXT.fullmatch(text)
    if explained is not None and not re.search(r"\([A-Z]\)", explained[3]):
        return Words(explained[1] or explained[2])
    if SEPARATOR_WORD.search(text):
        return None
    bare = TEXT.sub("", text)
    plain = " ".join(TEXT.sub(r" \1 ", text).split()).rstrip(".")
    if "\\" in plain or not WORDS.fullmatch(plain):
        return None
    is_wrapped = not bare.strip(" -.'")
    if is_wrapped or any(map(_is_word, LETTERS.findall(plain))):
        return Words(plain)
    return None


def _is_word(letters: str) -> bool:
    """Return whether letters in a row are a word, and not a product of variables."""
    return len(letters) > 3 or (len(letters) > 1 and not VARIABLES.issuperset(letters))


def _read_several(text: str, depth: int) -> Form | None:
    joined = SEPARATOR_WORD.sub(",", text)
    parts = [part for part in split_outside_brackets(joined, (",", ";")) if part.strip()]
    if len(parts) < 2 or _is_one_number(text):
        return None
    return Several(_read_items(parts, depth))


def _is_one_number(text: str) -> bool:
    """Return whether all commas of `text` separate thousands."""
    return THOUSANDS.search(text) is not None and not set(",;") & set(THOUSANDS.sub("", text))


def _read_union(text: str, depth: int) -> Form | None:
    parts = split_outside_brackets(text, (r"\cup",))
    if len(parts) < 2:
        return None
    return Several(_read_items(parts, depth))


def _read_inequality(text: str, depth: int) -> Form | None:
    pieces = [piece.strip() for piece in RELATION.split(text)]
    if len(pieces) < 3:
        return None
    writing = Writing(remove_spaces(text))
    signs = pieces[1::2]
    sides = [_read_value(side) for side in pieces[::2]]
    values = [side for side in sides if isinstance(side, Value)]
    directions = {sign in ("<", r"\le") for sign in signs}
    if "=" in text or len(values) < len(sides) or len(directions) > 1:
        return writing
    is_open = [sign in ("<", ">") for sign in signs]
    # `3 > x` states what `x < 3` does.
    if directions == {False}:
        values.reverse()
        is_open.reverse()
    return _read_bounds(values, is_open) or writing


def _read_bounds(values: list[Value], is_open: list[bool]) -> Form | None:
    """Read rising values, of which a variable's name makes bounds; None where they say neither.

    Args:
        values: two or more.
        is_open: whether each sign between two values leaves out that they are equal.
    """
    match [_is_name(value) for value in values]:
        case [True, False]:
            values = [LEAST, *values]
            is_open = [True, *is_open]
        case [False, True]:
            values = [*values, GREATEST]
            is_open = [*is_open, True]
        case [False, True, False]:
            pass
        case [_, _]:
            return Ordered("<" if is_open[0] else "<=", "", tuple(values))
        case _:
            return None
    lower, variable, upper = values
    opening = "(" if is_open[0] else "["
    closing = ")" if is_open[1] else "]"
    return Bounds(variable.latex, Ordered(opening, closing, (lower, upper)))


def _is_name(side: Value) -> bool:
    return NAME.fullmatch(side.latex) is not None and not side.unit and not side.is_percent


def _read_equation(text: str, depth: int) -> Form | None:
    sides = [side.strip() for side in split_outside_brackets(text, ("=",))]
    if len(sides) < 2:
        return None
    if not all(sides):
        return Writing(remove_spaces(text))
    name = ""
    if LABEL.fullmatch(sides[0]):
        name = remove_spaces(sides.pop(0))
    return Chain(name, tuple(_read(side, depth - 1) for side in sides))


def _read_brackets(text: str, depth: int) -> Form | None:
    matrix = MATRIX.fullmatch(text)
    if matrix is not None:
        return _read_matrix(matrix[2], depth)
    opening = next((bracket for bracket in CLOSING if text.startswith(bracket)), None)
    closing = next((bracket for bracket in CLOSING.values() if text.endswith(bracket)), None)
    # `(1, 2) + (3, 4)` begins and ends with brackets, too, which are not a pair.
    if opening is None or closing is None or not closes_at_end(text):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    items = split_outside_brackets(inside, (",", ";"))
    if opening == r"\{":
        if re.search(r"\\mid|\||:", inside):
            # A set that is described, not listed.
            return Writing(remove_spaces(text))
        return Several(_read_items(items, depth))
    if len(items) > 1:
        opening = opening.replace(r"\langle", "(")
        closing = closing.replace(r"\rangle", ")")
        return Ordered(opening, closing, _read_items(items, depth))
    # Brackets around one thing only group.
    return _read(inside, depth - 1) if (opening, closing) == ("(", ")") else None


def _read_items(items: list[str], depth: int) -> tuple[Form, ...]:
    return tuple(_read(item, depth - 1) for item in items)


def _read_matrix(inside: str, depth: int) -> Form:
    rows = [row.split("&") for row in re.split(r"\\\\", inside) if row.strip()]
    forms = (tuple(_read(cell, depth - 1) for cell in row) for row in rows)
    return Ordered("matrix", "", tuple(Ordered("row", "", row) for row in forms))


def _read_base(text: str, depth: int) -> Form | None:
    match = BASE.fullmatch(text)
    if match is None:
        return None
    return Ordered("base", "", (Words(match[1].upper()), Words(match[2])))


def _read_time(text: str, depth: int) -> Form | None:
    match = TIME.fullmatch(text)
    if match is None:
        return None
    return Ordered("time", "", (Words(match[1]), Words(match[2]), Words(match[3].lower())))


def _read_ratio(text: str, depth: int) -> Form | None:
    parts = split_outside_brackets(text, (":",))
    if len(parts) < 2:
        return None
    values = tuple(_read_value(part.strip()) for part in parts)
    return Ordered(":", "", values) if all(isinstance(v, Value) for v in values) else None


def _read_plus_minus(text: str, depth: int) -> Form | None:
    if text.count(r"\pm") + text.count(r"\mp") != 1 or r"\mp" in text:
        return None
    plus = re.sub(r"^\+", "", re.sub(r"\\pm\s*", "+", text))
    minus = re.sub(r"\\pm\s*", "-", text)
    return Several((_read_value(plus), _read_value(minus)))


def _read_value(text: str) -> Value | Writing:
    """Read a value with its unit or percent sign; `Writing` if it holds what is not computed."""
    latex, unit, is_percent = _split_unit(text)
    latex = THOUSANDS.sub(lambda match: match[1].replace(",", ""), latex)
    return Value(latex, unit, is_percent) if _is_expression(latex) else Writing(remove_spaces(text))


def _is_expression(latex: str) -> bool:
    """Return whether `latex` holds nothing but what an expression may hold."""
    remainder = COMMAND.sub(" ", latex)
    return (
        bool(latex)
        and latex.isascii()
        and COMMANDS.issuperset(COMMAND.findall(latex))
        and not FOREIGN_SIGNS.intersection(remainder)
        # To the parser `3 4` is the mixed number 3 + 4.
        and DIGITS_APART.search(latex) is None
        and not any(map(_is_word, LETTERS.findall(remainder)))
        # The parser's time is exponential in the depth of brackets and in the number of bars.
        and len(latex) <= LONGEST_VALUE
        and measure_depth(latex) <= DEEPEST_VALUE
        and latex.count("|") <= MOST_BARS
    )


def _split_unit(text: str) -> tuple[str, str, bool]:
    """Take the unit, the currency and the percent sign off a value."""
    percent = PERCENT.fullmatch(text)
    if percent is not None:
        return percent[1], "", True
    currency = CURRENCY.match(text)
    if currency is not None:
        name = "dollar" if "$" in currency[2] else currency[2]
        return currency[1] + text[currency.end() :], name, False
    units: list[str] = []
    while (match := UNIT.fullmatch(text)) is not None:
        text = match[1]
        units.insert(0, match[2] + re.sub(r"[\s{}]", "", match[3] or ""))
    degree = DEGREE.fullmatch(text)
    if degree is not None:
        text = degree[1]
        units.insert(0, "degree")
    plain = PLAIN_UNIT.fullmatch(text)
    # `5 km` and `5cm` have a unit, `5xy` has variables.
    if plain is not None and (" " in text or _is_word(LETTERS.findall(plain[2])[0])):
        text = plain[1]
        units.insert(0, plain[2])
    return text.strip().rstrip(","), name_unit(" ".join(units)), False


READERS: tuple[Callable[[str, int], Form | None], ...] = (
    _read_words,
    _read_several,
    _read_inequality,
    _read_equation,
    _read_union,
    _read_brackets,
    _read_base,
    _read_time,
    _read_ratio,
    _read_plus_minus,
)
"""Functions from a text and a depth to its form, or None; they are tried in turn, and the first
that knows the text reads it. Another order reads other forms: `(1, 2)` is brackets, `x = 1, 2` a
list."""
