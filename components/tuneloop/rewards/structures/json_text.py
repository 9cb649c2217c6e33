"""Read JSON that a policy writes: strictly, so that no text means two things."""

import json
import re
from typing import Any

FENCED = re.compile(r"```(?:json|python|tool_code|text)?[ \t]*\n(.*?)```", re.DOTALL)
SPECIAL_TOKENS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end|end_of_text|return|call)\|>|</s>|<eos>|<end_of_turn>"
)
THOUGHTS_END = "</think>"


class NotJson(ValueError):
    """The text is no JSON value."""


def parse_json(text: str) -> Any:
    """Parse one JSON value. Raises NotJson: it is none, has NaN or Infinity, the same key twice, or
    is nested too deep."""
    try:
        return json.loads(text, object_pairs_hook=_build_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)[:200]) from None


def take_final_text(completion: str) -> str:
    """Take what a completion says after its thoughts, without the tokens that end turns."""
    text = completion.rpartition(THOUGHTS_END)[2]
    return SPECIAL_TOKENS.sub("", text).strip()


def take_fenced(text: str) -> str:
    """Take the only fenced block of a text; all of the text if it has none, or several."""
    blocks: list[str] = FENCED.findall(text)
    return blocks[0].strip() if len(blocks) == 1 else text


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        raise ValueError("the same key twice")
    return built


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
