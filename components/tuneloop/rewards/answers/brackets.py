"""Find where brackets close, and split text outside of them.

`rewards/answers/forms.py` calls it with text that `rewards/answers/notation.py` has brought to one
form. It is tested through the reward, by `tests/unit/rewards/test_numeric.py`.
"""

import re

CLOSING = {"(": ")", "[": "]", r"\{": r"\}", r"\langle": r"\rangle"}
"""Opening bracket of a tuple, an interval or a set → the one that closes it;
`forms.py: _read_brackets` reads what stands between. `split_outside_brackets` and `measure_depth`
look for ``([{`` by themselves."""
LEVELS = dict.fromkeys(CLOSING, 1) | dict.fromkeys(CLOSING.values(), -1) | {"{": 1, "}": -1}
"""Bracket → how it changes the depth."""
TOKEN = re.compile("|".join(map(re.escape, LEVELS)) + r"|\\?.", re.DOTALL)
"""A bracket of `LEVELS`, or any other sign, with the backslash before it."""


def closes_at_end(text: str) -> bool:
    """Return whether the bracket that opens `text` closes at its end."""
    level = 0
    for token in TOKEN.finditer(text):
        level += LEVELS.get(token[0], 0)
        if level == 0:
            return token.end() == len(text)
    return False


def split_outside_brackets(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split a text at separators that stand in no bracket. Brackets are ``( [ {``, escaped or not,
    but not ``\\langle``.

    Args:
        text: LaTeX.
        separators: signs, or commands such as ``\\cup``.

    Returns:
        The parts; all of `text` where brackets do not match.
    """
    # A command that is only the beginning of a longer one separates nothing.
    separator = "|".join(
        re.escape(name) + (r"(?![^\W\d_])" if name.startswith("\\") else "") for name in separators
    )
    parts: list[str] = []
    level = 0
    begin = 0
    for token in re.finditer(rf"({separator})|\\?.", text, re.DOTALL):
        sign = token[0][-1]
        if token[1] and level == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
        elif sign in "([{":
            level += 1
        elif sign in ")]}":
            level -= 1
            if level < 0:
                return [text]
    parts.append(text[begin:])
    return parts if level == 0 else [text]


def measure_depth(text: str) -> int:
    """Count how deep brackets nest."""
    level = 0
    deepest = 0
    for sign in text:
        if sign in "([{":
            level += 1
            deepest = max(deepest, level)
        elif sign in ")]}":
            level -= 1
    return deepest
