"""Tool calls that are the answer: xLAM and the Berkeley function-calling leaderboard (BFCL).

The answers are read by `rewards/structures/call_answers.py: read_gold_calls`, in two forms: xLAM's
calls with their arguments, and BFCL's with the values that each argument may have. The schemas in
the metadata ``tools`` are read by `rewards/tool_calls.py: read_schemas`.
"""

import json
from collections.abc import Mapping
from typing import Any

from tuneloop.core.json_types import JsonObject
from tuneloop.data import BadValue, Example
from tuneloop.data.columns import as_messages
from tuneloop.data.layouts import Companion, Layout, Values
from tuneloop.data.layouts._parts import get_text_of, get_value, parse_list
from tuneloop.data.messages import parse_calls, parse_messages, parse_tools
from tuneloop.rewards.structures.schema_types import JSON_TYPES, convert_types

TOOL_CALLS = {"tool_calls": 1.0}
"""The reward of these layouts, and its weight."""


def read_xlam(values: Values) -> Example:
    """Read xLAM: a query, tools and the calls that answer it, all of them JSON text."""
    prompt = as_messages(get_text_of(values, "query"))
    written_tools = parse_list(values.get("tools"), "tools")
    tools = parse_tools([_convert_xlam_tool(tool) for tool in written_tools])
    calls = parse_calls(parse_list(values.get("answers"), "answers"))
    if not calls:
        raise BadValue("column 'answers' has no call")
    reply: JsonObject = {"role": "assistant", "content": "", "tool_calls": calls}
    # RL learns from the answer, and SFT from the conversation, which the template renders.
    return Example(
        prompt,
        json.dumps([call["function"] for call in calls], ensure_ascii=False),
        metadata={"tools": tools},
        tools=tools,
        conversation=[*prompt, reply],
    )


def read_bfcl(values: Values) -> Example:
    """Read BFCL: turns of messages, functions, and from the file of possible answers the calls with
    the values that each argument may have."""
    turns = get_value(values, "question")
    # Later turns depend on what the tools say to the first one's calls.
    if not isinstance(turns, list) or len(turns) != 1:
        raise BadValue("has not one turn; only tasks of one turn have one answer")
    functions = parse_list(get_value(values, "function"), "function")
    tools = parse_tools([convert_types(function) for function in functions])
    truth = values.get("ground_truth")
    # Tasks without tools that fit have no answers: any call is wrong.
    answer = None if truth is None else json.dumps(_check_truth(truth), ensure_ascii=False)
    return Example(
        parse_messages(turns[0], "question"), answer, metadata={"tools": tools}, tools=tools
    )


def _check_truth(truth: Any) -> list[JsonObject]:
    """Return the calls of a task. Raises BadValue: each must be a function's name with the values
    that its arguments may have."""
    calls = truth if isinstance(truth, list) else []
    is_valid = [isinstance(call, dict) and len(call) == 1 for call in calls]
    if not calls or not all(is_valid):
        raise BadValue("column 'ground_truth' must hold calls: {name: {argument: [values]}}")
    return calls


def _convert_xlam_tool(tool: Any) -> JsonObject:
    """Return an xLAM tool in OpenAI's form: its parameters are described without a schema
    around them. Raises BadValue: they are not described."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise BadValue("column 'tools' has a tool without a name")
    parameters = tool.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise BadValue("column 'tools' has a tool whose parameters are no object")
    if "properties" in parameters:
        return dict(tool)
    properties: JsonObject = {}
    required: list[str] = []
    for name, description in parameters.items():
        if not isinstance(description, Mapping):
            raise BadValue("column 'tools' has a tool whose parameters are not described")
        # xLAM writes "str, optional" for parameters that may be left out.
        written_type, _, qualifier = str(description.get("type", "string")).partition(",")
        # Of `List[int]` only the list is said: JSON Schema has the items' type elsewhere.
        base = written_type.split("[")[0].strip()
        properties[name] = dict(description) | {"type": JSON_TYPES.get(base, base)}
        if "optional" not in qualifier and "default" not in description:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}


LAYOUTS = (
    Layout(
        name="xlam",
        title="xLAM",
        columns=("query", "tools", "answers"),
        read=read_xlam,
        summary="prompt from query, tools from tools, answer from answers",
        rewards=TOOL_CALLS,
    ),
    Layout(
        name="bfcl",
        title="BFCL",
        columns=("id", "question", "function"),
        types={"question.0.0.role": str},
        read=read_bfcl,
        summary="prompt from question, tools from function, answer from possible_answer",
        rewards=TOOL_CALLS,
        companion=Companion("possible_answer/{name}", key="id"),
    ),
)
