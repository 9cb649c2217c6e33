r"""Mathematical equality: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are the same answer.

The gold answer is taken as its data set states it (``3\sqrt{13}``, ``$x^2$``, ``\boxed{4}``,
``(-\infty, 3]``, ``5 \text{ cm}``, ``\text{Tuesday}``, ``1,234``). It decides how the
answer is compared: as a number, an interval, a word, … (`tuneloop.rewards.answers.comparison`). The
final answer of a completion is its last box, else its last "The answer is …" or ``#### …``, else all
of it or the last expression in it. A completion that states two answers has none. docs/rewards.md
lists what is the same answer, and what is not.
"""

import functools

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.answers.comparison import is_same
from tuneloop.rewards.answers.extraction import (
    MATH,
    NUMBER,
    FinalAnswer,
    find_final_answer,
    find_last_expression,
)
from tuneloop.rewards.answers.forms import Chain, Form, Several, Words, Writing, read_answer
from tuneloop.rewards.answers.notation import DOLLARS, normalize_notation, remove_spaces

NO_ANSWERS = ("proof", "notfound", "not found", "nan", "n/a")
"""What data sets write where a problem has no answer that can be compared, in lower case: such a
row is ``unverifiable``. docs/rewards.md lists them; `data/layouts/math.py: NO_ANSWERS` is a list of
its own."""


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 1.0 if the final answer of `completion` is `answer`, else 0.0; None without one."""
    gold = _read_gold(answer)
    if gold is None:
        return None
    writing, form = gold
    # Whatever the completion makes a parser raise, it is not the answer.
    try:
        final = find_final_answer(completion)
        if remove_spaces(normalize_notation(final.text)) == writing:
            return 1.0
        return float(is_same(form, read_final_answer(final)))
    except Exception:
        return 0.0


def write_answers(answer: str, metadata: JsonObject) -> list[str]:
    """Write `answer` the ways in which a model would state it, for `rewards/proof.py`."""
    text = find_final_answer(answer).text.strip("*")
    is_plain = isinstance(read_answer(text), Words) and "\\" not in text
    statement = text if is_plain or DOLLARS.search(text) else f"${text}$"
    return [
        f"Therefore the result is $\\boxed{{{text}}}$.",
        f"The answer is {statement}.",
    ]


def read_final_answer(final: FinalAnswer) -> Form:
    """Read what a completion states; in prose the expression that its statement begins with, or
    its last one."""
    form = read_answer(final.text)
    if final.source == "box" or not _is_prose(form, final.text):
        return form
    if final.source == "statement":
        # The sentence may go on after the formula: "The answer is $5$ because …".
        formula = MATH.match(final.text) or NUMBER.match(final.text)
        return read_answer(formula[0]) if formula else form
    expression = find_last_expression(final.text)
    return form if expression is None else read_answer(expression)


def _is_prose(form: Form, text: str) -> bool:
    """Return whether `text` is a sentence, or several lines, and not an answer by itself."""
    if isinstance(form, Several):
        parts = form.items
    elif isinstance(form, Chain):
        parts = form.sides
    elif isinstance(form, Words) and len(form.text) == 1:
        return False
    else:
        parts = (form,)
    return any(isinstance(part, Words | Writing) for part in parts) or "\n" in text


@functools.lru_cache(maxsize=4096)
def _read_gold(answer: str) -> tuple[str, Form] | None:
    """Read the gold answer: how it is written, and its form. None where there is none."""
    text = find_final_answer(answer).text
    normalized = normalize_notation(text)
    if not normalized or normalized.casefold() in NO_ANSWERS:
        return None
    return remove_spaces(normalized), read_answer(text)
