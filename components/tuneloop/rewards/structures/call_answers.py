"""Gold tool calls: BFCL's possible answers, or calls with their arguments; and whether others are
the same."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneloop.rewards.scoring import Unverifiable
from tuneloop.rewards.structures.calls import Call
from tuneloop.rewards.structures.json_text import NotJson, parse_json

IGNORED_SIGNS = re.compile(r"[ ,./\-_*^]")
"""What BFCL leaves out of texts before it compares them."""
OPTIONAL = ""
"""Among the accepted values of BFCL: the argument may be left out."""


@dataclass(frozen=True)
class GoldCall:
    """A call that is expected.

    Attributes:
        name: the tool.
        accepted: argument → its accepted values.
        is_loose: whether texts are compared as BFCL does, without case and punctuation.
    """

    name: str
    accepted: Mapping[str, Sequence[Any]]
    is_loose: bool


def read_gold_calls(answer: str) -> list[GoldCall] | None:
    """Read the gold calls; empty where no call is right, None where the row has no answer. Raises
    Unverifiable: they are neither of the two forms."""
    if not answer.strip():
        return None
    try:
        value = parse_json(answer)
    except NotJson as error:
        raise Unverifiable(
            f"the answer is no JSON list of calls ({error}): {answer!r:.80}"
        ) from None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise Unverifiable(f"the answer is no JSON list of calls: {answer!r:.80}")
    return [_read_gold_call(call) for call in value]


def _read_gold_call(call: Any) -> GoldCall:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    match call:
        case {"name": str(name), "arguments": arguments}:
            if isinstance(arguments, str):
                arguments = parse_json(arguments or "{}")
            if isinstance(arguments, dict):
                accepted = {key: [value] for key, value in arguments.items()}
                return GoldCall(name, accepted, is_loose=False)
        case dict() if len(call) == 1:
            ((name, accepted),) = call.items()
            if isinstance(accepted, dict):
                listed = {key: _to_list(values) for key, values in accepted.items()}
                return GoldCall(name, listed, is_loose=True)
    raise Unverifiable(
        f"the answer has a call that is neither {{name: {{argument: [values]}}}} nor has name and "
        f"arguments: {call!r:.80}"
    )


def are_expected(calls: Sequence[Call], gold: Sequence[GoldCall]) -> bool:
    """Return whether the calls are the gold calls, in any order."""
    if len(calls) != len(gold):
        return False
    matches = [[i for i, call in enumerate(calls) if is_expected(call, one)] for one in gold]
    taken: dict[int, int] = {}
    return all(_find_partner(index, matches, taken, set()) for index in range(len(gold)))


def _find_partner(
    gold_index: int, matches: list[list[int]], taken: dict[int, int], tried: set[int]
) -> bool:
    """Find a call for a gold call, moving those that have found one if need be (Kuhn's algorithm)."""
    for index in matches[gold_index]:
        if index in tried:
            continue
        tried.add(index)
        if index not in taken or _find_partner(taken[index], matches, taken, tried):
            taken[index] = gold_index
            return True
    return False


def is_expected(call: Call, gold: GoldCall) -> bool:
    """Return whether a call is the gold call."""
    if not is_same_name(call.name, gold.name):
        return False
    return _is_accepted_object(call.arguments, gold.accepted, gold.is_loose)


def is_same_name(name: str, other: str) -> bool:
    """Return whether two names of tools are one: some formats have no dots in them."""
    return name.replace(".", "_") == other.replace(".", "_")


def build_calls(gold: Sequence[GoldCall]) -> list[dict[str, Any]]:
    """Build calls that the gold calls accept, each with `name` and `arguments`."""
    calls: list[dict[str, Any]] = []
    for call in gold:
        arguments = (
            _choose_object(call.accepted)
            if call.is_loose
            else {key: values[0] for key, values in call.accepted.items()}
        )
        calls.append({"name": call.name, "arguments": arguments})
    return calls


def _choose_object(accepted: Mapping[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for key, values in accepted.items():
        options = [value for value in _to_list(values) if value != OPTIONAL]
        if options:
            chosen[key] = _choose(options[0])
    return chosen


def _choose(option: Any) -> Any:
    if isinstance(option, dict):
        return _choose_object(option)
    if isinstance(option, list):
        return [_choose(part) for part in option]
    return option


def _to_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _is_accepted_object(
    arguments: Mapping[str, Any], accepted: Mapping[str, Any], is_loose: bool
) -> bool:
    if not arguments.keys() <= accepted.keys():
        return False
    for key, values in accepted.items():
        options = _to_list(values)
        if key not in arguments:
            if not is_loose or OPTIONAL not in options:
                return False
        elif not any(_is_accepted(arguments[key], option, is_loose) for option in options):
            return False
    return True


def _is_accepted(value: Any, option: Any, is_loose: bool) -> bool:
    if isinstance(option, bool) or isinstance(value, bool):
        return value is option
    if isinstance(option, int | float) and isinstance(value, int | float):
        return value == option
    if isinstance(option, str) and isinstance(value, str):
        return _fold(value) == _fold(option) if is_loose else value == option
    if isinstance(option, list) and isinstance(value, list):
        pairs = zip(value, option)
        return len(value) == len(option) and all(_is_accepted(v, o, is_loose) for v, o in pairs)
    if isinstance(option, dict) and isinstance(value, dict):
        if is_loose:
            return _is_accepted_object(value, option, is_loose)
        return value.keys() == option.keys() and all(
            _is_accepted(value[key], option[key], is_loose) for key in option
        )
    return value is None and option is None


def _fold(text: str) -> str:
    return IGNORED_SIGNS.sub("", text).casefold().replace("'", '"')


def write_json(value: Any) -> str:
    """Write a value as a model writes it."""
    return json.dumps(value, ensure_ascii=False)
