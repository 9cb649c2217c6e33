"""Validate values by JSON Schema. No schema is fetched: references lead into the schema itself.

Schemas come from a row's metadata, and may name types as BFCL does (`schema_types.py`).
"""

import functools
import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry

from tuneloop.core.json_types import JsonMapping
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.structures.schema_types import convert_types


def is_valid(schema: JsonMapping, value: Any, name: str) -> bool:
    """Return whether a value is valid by a schema.

    Args:
        schema: JSON Schema, perhaps with types as BFCL names them.
        value: as `json.loads` returns it.
        name: of the schema in a message.

    Raises:
        Unverifiable: it is no schema.
        Exception: a reference that leads nowhere, or a pattern that Python cannot read; the rewards
            `json_schema` and `tool_calls` count such a value as not valid.
    """
    return bool(_build_validator(json.dumps(schema, sort_keys=True), name).is_valid(value))


@functools.lru_cache(maxsize=1024)
def _build_validator(schema_text: str, name: str) -> Draft202012Validator:
    schema = convert_types(json.loads(schema_text))
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise Unverifiable(f"{name} is no JSON Schema: {error.message[:200]}") from error
    return Draft202012Validator(schema, registry=Registry())
