r"""Whether an answer is worked out: a number as such, and not the sum that the question asks for.

A completion that repeats ``23 + 45`` states something equal to 68 and has not computed it. A gold
answer that is a number is answered by a number: ``68``, ``68.0`` or ``6.8 \times 10^1``. A
fraction, a decimal or a mixed number may be answered by any of the three.

`rewards/answers/comparison.py: is_same` asks it before it compares two values.
`tests/unit/rewards/test_worked_out.py` has its cases.
"""

import re

from tuneloop.rewards.answers.notation import remove_spaces

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_FRACTION = (
    rf"\\[dt]?frac\{{[-+]?{_NUMBER}\}}\{{[-+]?{_NUMBER}\}}"
    rf"|\\[dt]?frac\s?\d\s?\d|{_NUMBER}/{_NUMBER}"
)
_POWER_OF_TEN = r"(?:\\times|\\cdot|\*)\s?10(?:\^|\*\*)\{?-?\d+\}?"

INTEGER = re.compile(r"[-+]?\d+(?:\.0*)?")
DECIMAL = re.compile(rf"[-+]?{_NUMBER}(?:{_POWER_OF_TEN})?")
RATIONAL = re.compile(rf"[-+]?(?:{_FRACTION}|\(?\d+\+(?:{_FRACTION})\)?)")


def is_worked_out(gold: str, candidate: str, *, may_be_fraction: bool = False) -> bool:
    """Return whether `candidate` is a number as such, where `gold` is one.

    Where it is none, every candidate will do.

    Args:
        gold: the gold answer in LaTeX, without unit or percent sign.
        candidate: what a completion states, likewise.
        may_be_fraction: whether a fraction answers a whole number, as 1/2 answers 50%.
    """
    gold = remove_spaces(gold)
    candidate = remove_spaces(candidate)
    # Brackets around the whole only group.
    while candidate.startswith("(") and candidate.endswith(")") and "(" not in candidate[1:]:
        candidate = candidate[1:-1]
    if INTEGER.fullmatch(gold) and not may_be_fraction:
        return DECIMAL.fullmatch(candidate) is not None
    if DECIMAL.fullmatch(gold) or RATIONAL.fullmatch(gold):
        return bool(DECIMAL.fullmatch(candidate) or RATIONAL.fullmatch(candidate))
    return True
