"""Bring the names of units to one spelling.

`rewards/answers/forms.py: _split_unit` takes the words after a number for a unit and names it by
this. Two units are compared as texts: nothing is converted, and 1 m is not 100 cm.
"""

import re

UNIT_NAMES = {
    "in": "inch",
    "inches": "inch",
    "ft": "foot",
    "feet": "foot",
    "centimeter": "cm",
    "centimetre": "cm",
    "meter": "m",
    "metre": "m",
    "kilometer": "km",
    "kilometre": "km",
    "millimeter": "mm",
    "gram": "g",
    "kilogram": "kg",
    "hr": "hour",
    "h": "hour",
    "min": "minute",
    "sec": "second",
    "s": "second",
    "mph": "mile per hour",
    "deg": "degree",
    "liter": "l",
    "litre": "l",
}
"""Word in the singular or the plural → its replacement, which may be several words."""
SINGULAR = re.compile(r"(?<=[a-z]{2})(?<!s)s\b")
"""The s of a plural: at the end of a word, after two letters, not of a double s (glass)."""


def name_unit(unit: str) -> str:
    """Bring a unit to one spelling: in the singular, squares as ``^2``.

    The word "units" names no unit, and is dropped. Names are replaced word by word: km/h and "km
    per hour" stay different.
    """
    unit = re.sub(r"[\s\\]+", " ", unit.lower()).strip(" .")
    unit = re.sub(r"[{}]", "", unit)
    unit = re.sub(r"\b(?:square|sq\.?) (\w+)", r"\1^2", unit)
    unit = re.sub(r"\b(?:cubic|cu\.?) (\w+)", r"\1^3", unit)
    words = re.findall(r"[^\W\d_]+|\^-?\d|/", unit)
    named = " ".join(map(_name_word, words)).replace(" ^", "^")
    return "" if re.fullmatch(r"unit(?:\^[23])?", named) else named


def _name_word(word: str) -> str:
    singular = SINGULAR.sub("", word)
    return UNIT_NAMES.get(word) or UNIT_NAMES.get(singular, singular)
