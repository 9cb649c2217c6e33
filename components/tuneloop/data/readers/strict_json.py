"""JSON as a data set may have it: what Python's `json` reads in silence and would change is refused.

Refused are NaN and infinite numbers, a key that an object has twice, half of a surrogate pair, and
values nested deeper than `DEPTH`."""

import json
import math
from typing import Any

from tuneloop.core.errors import shorten_text
from tuneloop.data import BadValue

DEPTH = 64


def parse_json(text: str) -> Any:
    """Parse one JSON value. Raises BadValue with the reason why it cannot be used."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise BadValue(f"is nested deeper than {DEPTH} levels") from error
    except BadValue:
        raise
    except ValueError as error:
        raise BadValue(f"is not JSON ({shorten_text(str(error))})") from error
    # Both checks walk through the whole value, so they are made only where the text gives a reason.
    if text.count("[") + text.count("{") > DEPTH and measure_depth(value) > DEPTH:
        raise BadValue(f"is nested deeper than {DEPTH} levels")
    if "\\u" in text:
        check_encodable(value)
    return value


def measure_depth(value: Any) -> int:
    """Measure how deep lists and objects are nested in a value; text or a number has depth 0."""
    depth = 0
    level = [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [
            part
            for container in level
            for part in (container.values() if isinstance(container, dict) else container)
        ]
    return depth


def check_encodable(value: Any) -> None:
    """Check that all text in a value can be written. Raises BadValue: it has half of a character."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadValue(f"has half of a surrogate pair (\\u{ord(half):04x})") from error


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise BadValue(f"has the key {repeated!r} twice in one object")
    return built


def _refuse_constant(name: str) -> Any:
    raise BadValue(f"has the number {name}, which is not JSON")


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadValue(f"has the number {shorten_text(text, 40)}, which is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_build_object, parse_constant=_refuse_constant, parse_float=_parse_float
)
