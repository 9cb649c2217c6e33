"""Read JSON that a policy writes: strictly, so that no text means two things.

The rewards `tool_calls` and `json_schema` read completions, gold answers and metadata by it. Rows
of files are read by `data/readers/strict_json.py`. Tests are in
`tests/unit/rewards/test_tool_calls.py` and `test_choice_and_json.py`.
"""

import json
import re
from typing import Any

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.answers.extraction import THOUGHTS_END
from tuneloop.rewards.outcomes import Unverifiable

FENCED = re.compile(r"```(?:json|python|tool_code|text)?[ \t]*\n(.*?)```", re.DOTALL)
"""A fenced block that may hold JSON or calls; a block of another language is not looked into."""
SPECIAL_TOKENS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end|end_of_text|return|call)\|>|</s>|<eos>|<end_of_turn>"
)
"""Tokens that end a turn, by model family. Rollouts are decoded without a tokenizer's special
tokens (`formats/tokens.py: decode_ids`); other texts may have them."""


class NotJson(ValueError):
    """The text is no JSON value."""


def parse_json(text: str) -> Any:
    """Parse one JSON value.

    Raises:
        NotJson: the text is none, has NaN or Infinity, the same key twice, or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)[:200]) from None


def read_json_field(metadata: JsonMapping, name: str) -> Any:
    """Read a value of a row's metadata that may be written as JSON text; None where it is missing.

    Raises:
        Unverifiable: it is text, and no JSON.
    """
    value = metadata.get(name)
    if not isinstance(value, str) or not value:
        return value
    try:
        return parse_json(value)
    except NotJson as error:
        raise Unverifiable(f"metadata[{name!r}] is no JSON: {error}") from None


def is_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    # To Python True is 1.
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_equal(value[k], other[k]) for k in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_equal, value, other))
    return bool(value == other)


def take_final_text(completion: str) -> str:
    """Take what a completion says after its thoughts, without the tokens that end turns."""
    text = completion.rpartition(THOUGHTS_END)[2]
    return SPECIAL_TOKENS.sub("", text).strip()


def take_fenced(text: str) -> str:
    """Take the only fenced block of a text; all of the text if it has none, or several."""
    blocks: list[str] = FENCED.findall(text)
    return blocks[0].strip() if len(blocks) == 1 else text


def _build_object(pairs: list[tuple[str, Any]]) -> JsonObject:
    built = dict(pairs)
    if len(built) < len(pairs):
        raise ValueError("the same key twice")
    return built


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
