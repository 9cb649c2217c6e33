"""Types of JSON Schema under the names that BFCL, Java and Python have for them.

`schemas.py` validates by converted schemas, and the layouts of `data/layouts/tools.py` write them
into prompts and metadata. This module needs no library, so that data can be read without jsonschema.
"""

from typing import Any

from tuneloop.core.json_types import JsonObject

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
Schema does; ``any`` is left out."""
VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, in which a key ``type`` is no type."""
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords that hold a schema by each name; a property may be called as a keyword is."""


def convert_types(schema: Any) -> Any:
    """Return a schema whose types are those of JSON Schema; where any type will do, it has none."""
    if isinstance(schema, list):
        return [convert_types(part) for part in schema]
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
            converted[key] = {name: convert_types(member) for name, member in part.items()}
        else:
            converted[key] = convert_types(part)
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
