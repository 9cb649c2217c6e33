"""Bring the writing of an answer in LaTeX, or in plain text, to one form; its meaning stays.

Both sides of every comparison go through it, so that it may only make equal what means the same.
Readers of its result know no other spelling: the patterns of `rewards/answers/forms.py` expect
``\\text{…}``, ``\\frac{…}{…}``, ``\\le`` and ``\\ge``, and `rewards/choice.py` reads plain text by
it.
"""

import re

LONGEST = 5000
"""Characters of the longest text whose notation is changed. `forms.py` reads no answer of more than
1000 characters, but the text of a whole completion may come here, too."""
SIGNS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "÷": r"\div ",
    "·": r"\cdot ",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "°": r"^\circ ",
    "²": "^2",
    "³": "^3",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
}
"""Sign of Unicode → how LaTeX or ASCII writes it."""
SIGN_TABLE = str.maketrans(SIGNS)
SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|middle)(?![a-zA-Z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|normalsize)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\\(?:mathrm|mbox|textbf|textrm|mathbf|textit|textsf|operatorname)\s*\{", r"\\text{"),
        (r"\\degrees?(?![a-zA-Z])", r"^\\circ"),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"(?<!\\)\bpi\b", r"\\pi "),
        (r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\(?:quad|qquad|thinspace)(?![a-zA-Z])", " "),
        (r"(?<=\d)\s*(?:\{,\}|,\\!)\s*(?=\d{3})", ""),
        (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:!]", ""),
        (r"(?<!\\)\\ |~", " "),
        # 1.5e-3 is a number, not a product with Euler's.
        (r"(?<=\d)[eE]([-+]?\d+)(?![\d.])", r"\\times 10^{\1}"),
        # \frac12, \frac1{2} and \sqrt3 are short for braces.
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"\\log_(\d)(?=\D)", r"\\log_{\1}"),
    )
]
"""Spelling → the one that is compared, in the order in which they are replaced."""
WRAPPERS = [
    re.compile(r"\\\((.*)\\\)", re.DOTALL),
    re.compile(r"\\\[(.*)\\\]", re.DOTALL),
    re.compile(r"(?:\\boxed|\\fbox)\s*\{(.*)\}", re.DOTALL),
]
"""Delimiters of formulas, and boxes, around a whole answer; `_unwrap` takes them off."""
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
MIXED = re.compile(r"(?<![\d.}\w])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
MIXED_PLAIN = re.compile(r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d./])")
PLAIN_FRACTION = re.compile(r"(?<![\d./}\w])(\d+)\s*/\s*(\d+)(?![\d./!^])")
DOLLARS = re.compile(r"(?<!\\)\$")
r"""Dollars that delimit formulas. One of a price is written ``\$`` first (`_keep_currency`)."""


def normalize_notation(text: str) -> str:
    """Return `text` in one of the ways to write it.

    It has no delimiters of formulas and no spacing, one spelling for each command, mixed numbers as
    sums, and repeating decimals as fractions.
    """
    text = text.translate(SIGN_TABLE).strip().strip("*").strip()
    if len(text) > LONGEST:
        return " ".join(text.split())
    text = DOLLARS.sub("", _keep_currency(text)).strip()
    text = _unwrap(text)
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    text = REPEATING.sub(_write_repeating, text)
    text = MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = MIXED_PLAIN.sub(r"(\1+\\frac{\2}{\3})", text)
    text = PLAIN_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return " ".join(_strip_punctuation(text).split())


def remove_spaces(text: str) -> str:
    """Remove white space that separates neither two digits nor two letters, to compare writing."""
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def _keep_currency(text: str) -> str:
    """Write the dollar of a price as ``\\$``: a single one, before a number."""
    if text.count("$") - text.count(r"\$") == 1:
        return re.sub(r"(?<!\\)\$(?=\s*\d)", r"\\$", text)
    return text


def _unwrap(text: str) -> str:
    """Take delimiters of formulas and boxes off, of which some answers have several."""
    for _ in range(4):
        for wrapper in WRAPPERS:
            match = wrapper.fullmatch(text)
            if match is not None and is_balanced(match[1]):
                text = match[1].strip()
                break
        else:
            return text
    return text


def is_balanced(text: str) -> bool:
    """Return whether braces close in the order in which they open."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _strip_punctuation(text: str) -> str:
    """Take punctuation off the end, but not the last sign of a command such as ``\\;``."""
    text = text.strip()
    while text and text[-1] in ".,;:" and not text.endswith("\\" + text[-1]):
        text = text[:-1].rstrip()
    return text


def _write_repeating(match: re.Match[str]) -> str:
    """Write a decimal whose last digits repeat as a fraction: ``0.1\\overline{6}`` is 15/90."""
    integer, fixed, repeated = match.groups()
    denominator = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    numerator = int(integer + fixed + repeated) - int((integer + fixed) or "0")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
