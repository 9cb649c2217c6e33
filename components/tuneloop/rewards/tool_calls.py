"""Tool calls: the completion makes the calls of the answer, each valid by its tool's schema.

``metadata["tools"]`` lists the tools, in OpenAI's form or as ``{"name", "parameters"}`` (a list, or
its JSON text). The answer is a JSON list of calls: ``{"name", "arguments"}``, or as BFCL's possible
answers ``{name: {argument: [accepted values]}}``. Calls are compared in any order. ``[]`` says that
no tool should be called; without an answer any valid calls are right. `structures.calls` lists the
formats in which a completion may write them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tuneloop.rewards.scoring import Unverifiable
from tuneloop.rewards.structures.call_answers import (
    are_expected,
    build_calls,
    is_same_name,
    read_gold_calls,
    write_json,
)
from tuneloop.rewards.structures.calls import Call, parse_calls
from tuneloop.rewards.structures.json_text import NotJson, parse_json
from tuneloop.rewards.structures.schemas import is_valid


def score(completion: str, answer: str, metadata: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Return 1.0 if `completion` makes the right calls, else 0.0; and whether it makes calls
    (`parsed`), and all of tools that there are, with arguments that their schemas allow (`valid`).

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
    except Exception:
        return 0.0, {"parsed": 1.0, "valid": 0.0}
    return float(right), {"parsed": 1.0, "valid": float(valid)}


def write_answers(answer: str, metadata: dict[str, Any]) -> list[str]:
    """Write the gold calls as Hermes and OpenAI do."""
    gold = read_gold_calls(answer)
    if gold is None:
        return []
    calls = build_calls(gold)
    if not calls:
        return ["None of these tools can do that."]
    tagged = "\n".join(f"<tool_call>\n{write_json(call)}\n</tool_call>" for call in calls)
    functions = [
        {"type": "function", "function": {**call, "arguments": write_json(call["arguments"])}}
        for call in calls
    ]
    return [tagged, write_json(functions)]


def read_schemas(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Read the schemas of the tools' arguments, by the names of the tools; empty without tools.
    Raises Unverifiable: one has no name, or its parameters are no schema."""
    tools = metadata.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = parse_json(tools)
        except NotJson as error:
            raise Unverifiable(f"metadata['tools'] is no JSON: {error}") from None
    if not isinstance(tools, list):
        raise Unverifiable(f"metadata['tools'] is no list: {tools!r:.80}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        described = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(described, dict) or not isinstance(described.get("name"), str):
            raise Unverifiable(f"metadata['tools'][{number}] has no name: {tool!r:.80}")
        parameters = described.get("parameters") or {"type": "object"}
        if not isinstance(parameters, dict):
            raise Unverifiable(f"metadata['tools'][{number}] has parameters that are no schema")
        schemas[described["name"]] = parameters
    return schemas


def _is_valid_call(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether a tool of this name has these arguments, required ones included."""
    for name, schema in schemas.items():
        if is_same_name(call.name, name):
            known: Sequence[str] = list(schema.get("properties", {}))
            is_known = "properties" not in schema or call.arguments.keys() <= set(known)
            return is_known and is_valid(schema, call.arguments, f"the schema of the tool {name}")
    return False
