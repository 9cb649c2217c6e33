"""Validate values by JSON Schema. No schema is fetched: references lead into the schema itself.

Schemas come from a row's metadata. The layouts of `data/layouts/tools.py` convert the types of
theirs by a table of the same rows; schemas of other files and of ``data.reward_args`` are converted
here alone.
"""

import functools
import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.outcomes import Unverifiable

JSON_TYPES = {
    "dict": "object",
    "Dict": "object",
    "HashMap": "object",
    "Hashtable": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "int": "integer",
    "Bigint": "integer",
    "tuple": "array",
    "list": "array",
    "List": "array",
    "Array": "array",
    "ArrayList": "array",
    "str": "string",
    "String": "string",
    "char": "string",
    "bool": "boolean",
    "Boolean": "boolean",
}
"""Types as BFCL (the Berkeley function-calling leaderboard), Java and Python name them → as JSON
Schema does; ``any`` is left out. `data/layouts/tools.py: JSON_TYPES` has the same rows."""
VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, in which a key ``type`` is no type."""
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords that hold a schema by each name; a property may be called as a keyword is."""


def is_valid(schema: JsonMapping, value: Any, name: str) -> bool:
    """Return whether a value is valid by a schema.

    Args:
        schema: JSON Schema, perhaps with types as BFCL names them.
        value: as `json.loads` returns it.
        name: of the schema in a message.

    Raises:
        Unverifiable: it is no schema.
    """
    return bool(_build_validator(json.dumps(schema, sort_keys=True), name).is_valid(value))


@functools.lru_cache(maxsize=1024)
def _build_validator(schema_text: str, name: str) -> Draft202012Validator:
    schema = _convert_types(json.loads(schema_text))
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise Unverifiable(f"{name} is no JSON Schema: {error.message[:200]}") from error
    return Draft202012Validator(schema, registry=Registry())


def _convert_types(schema: Any) -> Any:
    """Return a schema whose types are those of JSON Schema; where any type will do, it has none."""
    if isinstance(schema, list):
        return [_convert_types(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    converted: JsonObject = {}
    for key, part in schema.items():
        if key == "type":
            if part != "any" and not (isinstance(part, list) and "any" in part):
                converted[key] = _convert_type_names(part)
        elif key in VALUES:
            converted[key] = part
        elif key in NAMED and isinstance(part, dict):
            converted[key] = {name: _convert_types(member) for name, member in part.items()}
        else:
            converted[key] = _convert_types(part)
    return converted


def _convert_type_names(names: Any) -> Any:
    """Return the value of a keyword ``type``, a name or a list of names, with JSON Schema's names.

    What is neither stays, and is refused with the schema.
    """
    if isinstance(names, str):
        return JSON_TYPES.get(names, names)
    if not isinstance(names, list):
        return names
    converted: list[Any] = []
    for name in names:
        converted_name = JSON_TYPES.get(name, name) if isinstance(name, str) else name
        # JSON Schema wants each name once, and ``int`` and ``long`` are one.
        if converted_name not in converted:
            converted.append(converted_name)
    return converted
