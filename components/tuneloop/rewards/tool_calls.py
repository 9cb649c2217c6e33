"""Tool calls: the completion makes the calls of the answer, each valid by its tool's schema.

``metadata["tools"]`` lists the tools, in OpenAI's form or as ``{"name", "parameters"}`` (a list, or
its JSON text). The answer is a JSON list of calls: ``{"name", "arguments"}``, or as BFCL's possible
answers ``{name: {argument: [accepted values]}}``. Calls are compared in any order. ``[]`` says that
no tool should be called; without an answer any valid calls are right. `rewards/structures/calls.py`
lists the formats in which a completion may write them.

The tools of a prompt come into its metadata by `data/tables.py: RowBuilder.build`, whatever the
layout.
"""

from collections.abc import Mapping

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.structures.call_answers import (
    are_expected,
    build_calls,
    is_same_name,
    read_gold_calls,
    write_json,
)
from tuneloop.rewards.structures.calls import Call, parse_calls
from tuneloop.rewards.structures.json_text import read_json_field
from tuneloop.rewards.structures.schemas import is_valid


def score(completion: str, answer: str, metadata: JsonObject) -> tuple[float, dict[str, float]]:
    """Judge the calls of `completion`.

    Returns:
        1.0 if it makes the right calls, else 0.0; and whether it makes calls (`parsed`), and all of
        tools that there are, with arguments that their schemas allow (`valid`).

    Raises:
        Unverifiable: there are neither tools nor an answer, or they are not what they should be.
    """
    gold = read_gold_calls(answer)
    schemas = read_schemas(metadata)
    if gold is None and not schemas:
        raise Unverifiable("metadata has no tools, and the row no answer; tool_calls needs one")
    orders = {name: list(schema.get("properties", {})) for name, schema in schemas.items()}
    # Whatever the completion makes a parser or a schema's pattern raise, it is no right call.
    try:
        calls = parse_calls(completion, orders)
    except MemoryError:
        # Earlier calls may hold it: a new process judges again (`judging.py: judge`).
        raise
    except Exception:
        return float(gold == []), {"parsed": 0.0, "valid": 0.0}
    try:
        valid = not schemas or all(_is_valid_call(call, schemas) for call in calls)
        # The gold calls are right even where their own schema is narrower, as in some rows of BFCL.
        right = valid if gold is None else are_expected(calls, gold)
    except Unverifiable:
        if gold is None:
            raise
        return float(are_expected(calls, gold)), {"parsed": 1.0, "valid": 0.0}
    except MemoryError:
        raise
    except Exception:
        return 0.0, {"parsed": 1.0, "valid": 0.0}
    return float(right), {"parsed": 1.0, "valid": float(valid)}


def write_answers(answer: str, metadata: JsonObject) -> list[str]:
    """Write the gold calls as Hermes and OpenAI do."""
    gold = read_gold_calls(answer)
    if gold is None:
        return []
    calls = build_calls(gold)
    if not calls:
        return ["None of these tools can do that."]
    tagged = "\n".join(f"<tool_call>\n{write_json(call)}\n</tool_call>" for call in calls)
    functions = [
        {"type": "function", "function": call | {"arguments": write_json(call["arguments"])}}
        for call in calls
    ]
    return [tagged, write_json(functions)]


def read_schemas(metadata: JsonMapping) -> dict[str, JsonMapping]:
    """Read the schemas of the tools' arguments, by the names of the tools; empty without tools.

    Raises:
        Unverifiable: a tool has no name, or its parameters are no schema.
    """
    tools = read_json_field(metadata, "tools") or []
    if not isinstance(tools, list):
        raise Unverifiable(f"metadata['tools'] is no list: {tools!r:.80}")
    schemas: dict[str, JsonMapping] = {}
    for number, tool in enumerate(tools):
        match tool:
            case {"function": {"name": str(name)} as description}:
                pass
            case {"name": str(name)} as description if "function" not in tool:
                pass
            case _:
                raise Unverifiable(f"metadata['tools'][{number}] has no name: {tool!r:.80}")
        parameters = description.get("parameters") or {"type": "object"}
        if not isinstance(parameters, dict):
            raise Unverifiable(f"metadata['tools'][{number}] has parameters that are no schema")
        schemas[name] = parameters
    return schemas


def _is_valid_call(call: Call, schemas: Mapping[str, JsonMapping]) -> bool:
    """Return whether a tool of this name has these arguments, required ones included."""
    for name, schema in schemas.items():
        if is_same_name(call.name, name):
            # JSON Schema allows any further argument, which a tool would not.
            properties = schema.get("properties", call.arguments)
            if not call.arguments.keys() <= set(properties):
                return False
            return is_valid(schema, call.arguments, f"the schema of the tool {name}")
    return False
