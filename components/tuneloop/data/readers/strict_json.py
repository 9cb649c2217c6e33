"""JSON as a data set may have it: what Python's `json` reads in silence and would change is refused.

Refused are NaN and infinite numbers, a key that an object has twice, half of a surrogate pair, and
values nested deeper than `DEPTH`.

Messages begin with a verb: callers put the name of the row or the column before them.

It reads rows of the user and JSON text in their columns. JSON that a policy writes is read by
`rewards/structures/json_text.py: parse_json`, which is as strict about keys and constants.
"""

import json
import math
from typing import Any

from tuneloop.core.errors import shorten_text
from tuneloop.core.json_types import JsonObject
from tuneloop.data import BadValue

DEPTH = 64
"""The deepest nesting of lists and objects. Templates and the libraries around them recurse into
values; data sets have fewer than a dozen levels. docs/data.md states the number."""
TOO_DEEP = f"is nested deeper than {DEPTH} levels"


def parse_json(text: str) -> Any:
    """Parse one JSON value. Raises BadValue: the reason why it cannot be used, which is a predicate
    (``is not JSON``). `data.messages.parse_text` puts the column before it."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise BadValue(TOO_DEEP) from error
    except BadValue:
        raise
    except ValueError as error:
        raise BadValue(f"is not JSON ({shorten_text(str(error))})") from error
    # Both checks walk through the whole value, so they are made only where the text gives a reason.
    if text.count("[") + text.count("{") > DEPTH:
        check_depth(value)
    if "\\u" in text:
        check_encodable(value)
    return value


def describe_type(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "text" if value.strip() else "empty text"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return "an object"


def check_depth(value: Any) -> None:
    """Check that lists and objects are nested in a value no deeper than `DEPTH`. Raises BadValue:
    they are."""
    level = [value]
    # Level by level: recursion would end in Python's own error before it says anything.
    for _ in range(DEPTH):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        level = inner
    if any(isinstance(part, dict | list) for part in level):
        raise BadValue(TOO_DEEP)


def check_encodable(value: Any) -> None:
    """Check that all text in a value can be written. Raises BadValue: it has half of a
    character."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadValue(f"has half of a surrogate pair (\\u{ord(half):04x})") from error


def _build_object(pairs: list[tuple[str, Any]]) -> JsonObject:
    values = dict(pairs)
    # Python keeps the last value of a key, other readers the first: neither is what the row says.
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadValue(f"has the key {repeated!r} twice in one object")
    return values


def _refuse_constant(name: str) -> Any:
    raise BadValue(f"has the number {name}, which is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    # `1e999` is JSON, and Python makes infinity of it, which cannot be written as JSON again.
    if not math.isfinite(number):
        raise BadValue(f"has the number {shorten_text(text, 40)}, which is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_constant=_refuse_constant, parse_float=_parse_float
)
