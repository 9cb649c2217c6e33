"""JSON by a schema: the completion is a JSON value that ``metadata["schema"]`` (JSON Schema, or its
JSON text) allows, and with ``metadata["json_schema"] = {"equal": true}`` the answer's value.

Thoughts that end with ``</think>`` may come before it, and a fenced block may hold it
(`rewards/structures/json_text.py`). No layout writes a schema: it comes from ``data.reward_args``
or a column that ``data.columns.metadata`` names. Tests are in
`tests/unit/rewards/test_choice_and_json.py`.
"""

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.structures.json_text import (
    NotJson,
    is_equal,
    parse_json,
    read_json_field,
    take_fenced,
    take_final_text,
)
from tuneloop.rewards.structures.schemas import is_valid


def score(completion: str, answer: str, metadata: JsonObject) -> tuple[float, dict[str, float]]:
    """Judge a JSON value.

    Returns:
        1.0 for a value that is valid, and equal to the answer if that is asked for, else 0.0; and
        whether it is JSON (`parsed`), and valid (`valid`).

    Raises:
        Unverifiable: there is no schema, it is none, or the answer is no JSON.
    """
    schema = read_schema(metadata)
    must_be_equal = metadata.get("json_schema", {}).get("equal")
    if must_be_equal:
        try:
            expected = parse_json(answer)
        except NotJson as error:
            raise Unverifiable(f"the answer is no JSON ({error}): {answer!r:.80}") from None
    # Whatever the completion makes the parser or a pattern of the schema raise, it is not valid.
    try:
        value = parse_json(take_fenced(take_final_text(completion)))
    except MemoryError:
        # Earlier calls may hold it: a new process judges again (`judging.py: judge`).
        raise
    except Exception:
        return 0.0, {"parsed": 0.0, "valid": 0.0}
    try:
        valid = is_valid(schema, value, "metadata['schema']")
        right = valid and (not must_be_equal or is_equal(value, expected))
    except (Unverifiable, MemoryError):
        raise
    except Exception:
        return 0.0, {"parsed": 1.0, "valid": 0.0}
    return float(right), {"parsed": 1.0, "valid": float(valid)}


def write_answers(answer: str, metadata: JsonObject) -> list[str]:
    """Write the answer bare and in a fenced block."""
    return [answer, f"```json\n{answer}\n```"] if answer.strip() else []


def read_schema(metadata: JsonMapping) -> JsonMapping:
    """Read the schema. Raises Unverifiable: there is none."""
    schema = read_json_field(metadata, "schema")
    if not isinstance(schema, dict):
        raise Unverifiable("metadata has no schema; the reward json_schema needs `schema` in it")
    return schema
