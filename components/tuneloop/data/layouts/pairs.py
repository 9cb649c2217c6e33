"""Pairs of a better and a worse completion, and completions that are good or bad.

No layout here has `rewards`: nothing but its partner judges a side of a pair.
"""

from dataclasses import replace

from tuneloop.data import BadValue, Example
from tuneloop.data.columns import add_system, as_messages, read_completion, read_prompt
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import get_optional_text, is_messages, read_pair, read_sides
from tuneloop.data.messages import parse_tools, parse_transcript


def read_preference(values: Values) -> Example:
    """Read TRL's form with a prompt of its own; sides that have the prompt once more
    (UltraFeedback) are taken apart."""
    return read_sides(values, "prompt")


def read_hh(values: Values) -> Example:
    """Read Anthropic's HH: the sides are transcripts that begin alike."""
    columns = ("chosen", "rejected")
    return read_pair(
        {column: parse_transcript(get_optional_text(values, column)) for column in columns}
    )


def read_orca_pairs(values: Values) -> Example:
    """Read Orca's pairs: system, question, chosen, rejected."""
    example = read_sides(values, "question")
    system = get_optional_text(values, "system")
    # A prompt of messages has its own system message.
    if not system.strip() or not isinstance(example.prompt, str):
        return example
    return replace(example, prompt=add_system(as_messages(example.prompt), system))


def read_unpaired(values: Values) -> Example:
    """Read TRL's unpaired form (KTO): a completion and whether it is good. A good one is a
    demonstration. A bad one is used only in a pair, which `data/layout_tables.py: _pair_up` makes
    with a good one of the same prompt and tools."""
    # Rows behind the first ones, by which the layout was recognised, may hold something else.
    label = values.get("label")
    if not isinstance(label, bool):
        raise BadValue("column 'label' must hold true or false")
    prompt = read_prompt(values, "prompt")
    completion = read_completion(values, "completion")
    tools = parse_tools(values.get("tools"))
    if not label:
        return Example(prompt, None, rejected=completion, tools=tools)
    return Example(prompt, None, demonstration=completion, tools=tools)


def _is_transcript(values: Values) -> bool:
    return get_optional_text(values, "chosen").lstrip().startswith("Human:")


def _is_conversation_pair(values: Values) -> bool:
    return is_messages(values.get("chosen")) and is_messages(values.get("rejected"))


LAYOUTS = (
    Layout(
        name="ultrafeedback",
        title="UltraFeedback, binarized",
        columns=("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        fits=_is_conversation_pair,
        read=read_preference,
        summary="prompt from what chosen and rejected share",
    ),
    Layout(
        name="preference",
        title="pairs (TRL)",
        columns=("prompt", "chosen", "rejected"),
        read=read_preference,
        summary="prompt from prompt, pairs from chosen and rejected",
    ),
    Layout(
        name="implicit-preference",
        title="pairs of conversations (TRL)",
        columns=("chosen", "rejected"),
        fits=_is_conversation_pair,
        read=read_pair,
        summary="prompt from what chosen and rejected share",
    ),
    Layout(
        name="hh",
        title="Anthropic HH",
        columns=("chosen", "rejected"),
        fits=_is_transcript,
        read=read_hh,
        summary="prompt from what chosen and rejected share (Human:, Assistant:)",
    ),
    Layout(
        name="orca-pairs",
        title="Orca pairs",
        columns=("question", "chosen", "rejected"),
        read=read_orca_pairs,
        summary="prompt from system and question, pairs from chosen and rejected",
    ),
    Layout(
        name="unpaired-preference",
        title="good and bad completions (TRL, KTO)",
        columns=("prompt", "completion", "label"),
        types={"label": bool},
        read=read_unpaired,
        summary="prompt from prompt, pairs of a good and a bad completion of one prompt",
    ),
)
