"""JSON by a schema: the completion is a JSON value that ``metadata["schema"]`` (JSON Schema, or its
JSON text) allows, and with ``metadata["json_schema"] = {"equal": true}`` the answer's value.

Thoughts that end with ``</think>`` may come before it, and a fenced block may hold it.
"""

from collections.abc import Mapping
from typing import Any

from tuneloop.rewards.scoring import Unverifiable
from tuneloop.rewards.structures.json_text import (
    NotJson,
    parse_json,
    take_fenced,
    take_final_text,
)
from tuneloop.rewards.structures.schemas import is_valid


def score(completion: str, answer: str, metadata: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Return 1.0 for a value that is valid, and equal to the answer if that is asked for, else 0.0;
    and whether it is JSON (`parsed`), and valid (`valid`).

    Raises:
        Unverifiable: there is no schema, it is none, or the answer is no JSON.
    """
    schema = read_schema(metadata)
    expected: list[Any] = []
    if metadata.get("json_schema", {}).get("equal"):
        try:
            expected = [parse_json(answer)]
        except NotJson as error:
            raise Unverifiable(f"the answer is no JSON ({error}): {answer!r:.80}") from None
    # Whatever the completion makes the parser or a pattern of the schema raise, it is not valid.
    try:
        value = parse_json(take_fenced(take_final_text(completion)))
    except Exception:
        return 0.0, {"parsed": 0.0, "valid": 0.0}
    try:
        valid = is_valid(schema, value, "metadata['schema']")
        right = valid and all(is_equal(value, one) for one in expected)
    except Unverifiable:
        raise
    except Exception:
        return 0.0, {"parsed": 1.0, "valid": 0.0}
    return float(right), {"parsed": 1.0, "valid": float(valid)}


def write_answers(answer: str, metadata: dict[str, Any]) -> list[str]:
    """Write the answer bare and in a fenced block."""
    return [answer, f"```json\n{answer}\n```"] if answer.strip() else []


def read_schema(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the schema. Raises Unverifiable: there is none."""
    schema = metadata.get("schema")
    if isinstance(schema, str):
        try:
            schema = parse_json(schema)
        except NotJson as error:
            raise Unverifiable(f"metadata['schema'] is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise Unverifiable("metadata has no schema; the reward json_schema needs `schema` in it")
    return schema


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_equal(value[k], other[k]) for k in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return bool(value == other)
