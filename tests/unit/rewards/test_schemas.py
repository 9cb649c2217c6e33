"""JSON Schema with the types of BFCL, Java and Python."""

from typing import Any

import pytest

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.structures.schemas import is_valid

PROPERTIES_CALLED_AS_KEYWORDS: JsonObject = {
    "type": "dict",
    "properties": {"enum": {"type": "int"}, "default": {"type": "list"}, "type": {"type": "str"}},
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "dict"}, {}, 1),
        ({"type": ["dict", "null"]}, None, 1),
        ({"type": ["int", "long", "str"]}, "a", 1.5),
        ({"type": "list", "items": {"type": ["float", "null"]}}, [None, 1.5], ["a"]),
        (PROPERTIES_CALLED_AS_KEYWORDS, {"enum": 1, "default": [], "type": "a"}, {"enum": "a"}),
        (PROPERTIES_CALLED_AS_KEYWORDS, {"default": [1]}, {"default": 1}),
        ({"enum": [{"type": "dict"}]}, {"type": "dict"}, {"type": "object"}),
    ],
)
def test_types_are_those_of_json_schema(schema: JsonObject, valid: Any, invalid: Any) -> None:
    assert is_valid(schema, valid, "schema") and not is_valid(schema, invalid, "schema")


def test_any_type_among_others_is_any_type() -> None:
    assert is_valid({"type": ["any", "null"]}, 1, "schema")


@pytest.mark.parametrize("names", [5, ["dict", 5], ["nothing"]])
def test_what_is_no_type_is_refused(names: Any) -> None:
    with pytest.raises(Unverifiable, match="schema is no JSON Schema"):
        is_valid({"type": names}, 1, "schema")
