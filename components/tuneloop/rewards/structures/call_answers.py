"""Gold tool calls: BFCL's possible answers, or calls with their arguments.

`are_expected` compares the calls of a completion with them. `data/layouts/tools.py` writes such
answers, and files may have them in a column of answers. A form that is added is read by
`_read_gold_call`, and written by `build_calls`, by which `rewards/proof.py` proves it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.structures.calls import Call
from tuneloop.rewards.structures.json_text import NotJson, is_equal, parse_json

IGNORED_SIGNS = re.compile(r"[ ,./\-_*^]")
"""Signs that BFCL leaves out of texts before it compares them."""
OPTIONAL = ""
"""Among the accepted values of BFCL: the argument may be left out."""


@dataclass(frozen=True)
class GoldCall:
    """A call that is expected.

    Attributes:
        name: the tool.
        arguments: argument → its value; where `is_loose`, its accepted values.
        is_loose: whether texts are compared as BFCL does, without case and punctuation.
    """

    name: str
    arguments: JsonMapping
    is_loose: bool


def read_gold_calls(answer: str) -> list[GoldCall] | None:
    """Read the gold calls.

    Returns:
        The calls; empty where no call is right, None where the row has no answer.

    Raises:
        Unverifiable: the answer is in neither of the two forms.
    """
    if not answer.strip():
        return None
    try:
        value = parse_json(answer)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            raise Unverifiable(f"the answer is no JSON list of calls: {answer!r:.80}")
        # The arguments of a call may be a text of JSON, as OpenAI has them.
        return [_read_gold_call(call) for call in value]
    except NotJson as error:
        raise Unverifiable(
            f"the answer is no JSON list of calls ({error}): {answer!r:.80}"
        ) from None


def _read_gold_call(call: Any) -> GoldCall:
    """Read a gold call in the form of OpenAI (name and arguments) or BFCL (name: values that are right)."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    match call:
        case {"name": str(name), "arguments": arguments}:
            if isinstance(arguments, str):
                arguments = parse_json(arguments or "{}")
            if isinstance(arguments, dict):
                return GoldCall(name, arguments, is_loose=False)
        case dict() if len(call) == 1:
            ((name, accepted),) = call.items()
            if isinstance(accepted, dict):
                return GoldCall(name, accepted, is_loose=True)
    raise Unverifiable(
        f"the answer has a call that is neither {{name: {{argument: [values]}}}} nor has name and "
        f"arguments: {call!r:.80}"
    )


def are_expected(calls: Sequence[Call], gold: Sequence[GoldCall]) -> bool:
    """Return whether the calls are the gold calls, in any order."""
    if len(calls) != len(gold):
        return False
    # A loose gold call may accept several calls, so the first match need not be the right one.
    matches = [
        [i for i, call in enumerate(calls) if is_expected(call, expected)] for expected in gold
    ]
    partners: dict[int, int] = {}
    return all(_find_partner(index, matches, partners, set()) for index in range(len(gold)))


def _find_partner(
    gold_index: int, matches: list[list[int]], partners: dict[int, int], tried: set[int]
) -> bool:
    """Find a call for a gold call (Kuhn's algorithm): others move to another call if need be.

    Args:
        gold_index: of the gold call.
        matches: for each gold call the indexes of the calls that it accepts.
        partners: index of a call → index of the gold call that has it; changed.
        tried: the calls that this search has looked at; changed.
    """
    for index in matches[gold_index]:
        if index in tried:
            continue
        tried.add(index)
        if index not in partners or _find_partner(partners[index], matches, partners, tried):
            partners[index] = gold_index
            return True
    return False


def is_expected(call: Call, gold: GoldCall) -> bool:
    """Return whether a call is the gold call."""
    if not is_same_name(call.name, gold.name):
        return False
    if gold.is_loose:
        return _is_accepted_object(call.arguments, gold.arguments)
    return is_equal(call.arguments, gold.arguments)


def is_same_name(name: str, other: str) -> bool:
    """Return whether two names of tools are one: some formats have no dots in them."""
    return name.replace(".", "_") == other.replace(".", "_")


def build_calls(gold: Sequence[GoldCall]) -> list[JsonObject]:
    """Build calls that the gold calls accept, each with `name` and `arguments`, for
    `rewards/tool_calls.py: write_answers`."""
    calls: list[JsonObject] = []
    for call in gold:
        arguments = _choose(call.arguments) if call.is_loose else call.arguments
        calls.append({"name": call.name, "arguments": arguments})
    return calls


def _choose(option: Any) -> Any:
    """Build a value that an accepted one accepts: objects have accepted values in turn."""
    if isinstance(option, list):
        return [_choose(part) for part in option]
    if not isinstance(option, dict):
        return option
    chosen: JsonObject = {}
    for key, values in option.items():
        required = [value for value in _to_list(values) if value != OPTIONAL]
        if required:
            chosen[key] = _choose(required[0])
    return chosen


def _to_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _is_accepted_object(arguments: JsonMapping, accepted: JsonMapping) -> bool:
    """Return whether an object has accepted values only, and all that may not be left out."""
    if not arguments.keys() <= accepted.keys():
        return False
    for key, values in accepted.items():
        options = _to_list(values)
        if key not in arguments:
            if OPTIONAL not in options:
                return False
        elif not any(_is_accepted(arguments[key], option) for option in options):
            return False
    return True


def _is_accepted(value: Any, option: Any) -> bool:
    """Return whether a value is an accepted one, as BFCL compares them."""
    match value, option:
        case str(), str():
            return _fold(value) == _fold(option)
        case list(), list():
            return len(value) == len(option) and all(map(_is_accepted, value, option))
        case dict(), dict():
            return _is_accepted_object(value, option)
    return is_equal(value, option)


def _fold(text: str) -> str:
    return IGNORED_SIGNS.sub("", text).casefold().replace("'", '"')


def write_json(value: Any) -> str:
    """Write a value as a model writes it."""
    return json.dumps(value, ensure_ascii=False)
