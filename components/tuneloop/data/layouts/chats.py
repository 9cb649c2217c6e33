"""Conversations and instructions: what people fine-tune on.

A prompt that ends with the assistant's message is a whole conversation (`Example.is_conversation`):
`data/splitting.py` gives it to SFT alone, whatever else the example has. Which layout is taken of
several that fit, and what a further one needs, is in `data/layouts/__init__.py`. Tests:
`tests/unit/data/test_layouts.py`.
"""

from dataclasses import replace

from tuneloop.data import BadValue, Example
from tuneloop.data.columns import Columns, add_system, as_messages, read_completion, read_prompt
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import (
    get_answer,
    get_optional_text,
    get_text_of,
    is_messages,
)
from tuneloop.data.messages import parse_messages, parse_tools, parse_turns
from tuneloop.formats.chat_forms import Message


def make_chat(messages: list[Message], values: Values) -> Example:
    """Make an example of a conversation, or of a prompt in messages with an answer beside it."""
    tools = parse_tools(values.get("tools"))
    answer = values.get("answer")
    if messages[-1]["role"] == "assistant":
        return Example(messages, None, tools=tools)
    # Rewards compare with text or a number.
    has_answer = answer not in (None, "") and not isinstance(answer, list | dict)
    # A conversation with turns of the assistant that breaks off was meant to be learned.
    is_asking = all(message["role"] in ("system", "user") for message in messages)
    if not (has_answer or is_asking):
        role = messages[-1]["role"]
        raise BadValue(f"ends with the {role}'s message: there is no reply to learn")
    return Example(messages, get_answer(values, "answer") if has_answer else None, tools=tools)


def read_messages(values: Values) -> Example:
    """Read OpenAI's form: a list of messages, or its JSON text (Toucan)."""
    return make_chat(parse_messages(values.get("messages"), "messages"), values)


def read_sharegpt(values: Values) -> Example:
    """Read ShareGPT's form: ``conversations`` with ``from`` and ``value``."""
    messages = parse_messages(values.get("conversations"), "conversations")
    system = get_optional_text(values, "system") or get_optional_text(values, "system_prompt")
    if system and messages[0]["role"] != "system":
        messages = add_system(messages, system)
    example = make_chat(messages, values)
    # Hermes writes the tools into the system message, in the form that its model expects.
    is_written = "<tools>" in messages[0]["content"]
    return replace(example, tools=None) if is_written else example


def read_orca(values: Values) -> Example:
    """Read OpenOrca: a system message, a question, a response."""
    messages = as_messages(get_text_of(values, "question"))
    system = get_optional_text(values, "system_prompt")
    # OpenOrca has an empty one in a part of its rows, which templates would render as such.
    if system.strip():
        messages = add_system(messages, system)
    return Example(messages, None, demonstration=read_completion(values, "response"))


def read_prompt_completion(values: Values) -> Example:
    """Read TRL's form of a prompt and its completion."""
    completion = values.get("completion")
    tools = parse_tools(values.get("tools"))
    prompt = read_prompt(values, "prompt")
    if is_messages(completion) and isinstance(prompt, list):
        messages = prompt + parse_turns(completion, "completion")
        # Without a reply the row would be taken for a prompt, in silence.
        if messages[-1]["role"] != "assistant":
            role = messages[-1]["role"]
            raise BadValue(
                f"column 'completion' ends with the {role}'s message, not the assistant's"
            )
        return Example(messages, None, tools=tools)
    completion = read_completion(values, "completion")
    if values.get("answer") in (None, ""):
        return Example(prompt, None, demonstration=completion, tools=tools)
    # Beside an answer the completion is a worked solution, which the reward has to accept.
    return Example(prompt, get_answer(values, "answer"), solution=completion, tools=tools)


def read_text(values: Values) -> Example:
    """Read plain text. Its first word is the prompt and the rest the completion: the first token of
    a text cannot be learned, as nothing comes before it."""
    text = get_text_of(values, "text").strip()
    words = text.split(maxsplit=1)
    # Chinese and Japanese have no spaces between words: the first character is enough.
    first = words[0] if len(words) == 2 else text[:1]
    if len(first) == len(text):
        raise BadValue("column 'text' has one character: nothing follows it")
    # Many texts begin with the same word, and are no rows of one prompt.
    return Example(first, None, demonstration=text[len(first) :], is_plain=True, key=text)


LAYOUTS = (
    Layout(
        name="messages",
        title="chats (messages)",
        columns=("messages",),
        types={"messages": list | str},
        read=read_messages,
        summary="conversations from messages",
    ),
    Layout(
        name="sharegpt",
        title="ShareGPT",
        columns=("conversations",),
        types={"conversations": list | str},
        read=read_sharegpt,
        summary="conversations from conversations (from, value)",
    ),
    Layout(
        name="alpaca",
        title="Alpaca",
        columns=("instruction", "output"),
        roles=Columns(prompt="instruction", input="input", completion="output"),
        summary="prompt from instruction and input, demonstration from output",
    ),
    Layout(
        name="dolly",
        title="Dolly",
        columns=("instruction", "response"),
        roles=Columns(prompt="instruction", input="context", completion="response"),
        summary="prompt from instruction and context, demonstration from response",
    ),
    Layout(
        name="orca",
        title="OpenOrca",
        columns=("question", "response"),
        read=read_orca,
        summary="prompt from system_prompt and question, demonstration from response",
    ),
    Layout(
        name="prompt-completion",
        title="prompts and completions (TRL)",
        columns=("prompt", "completion"),
        read=read_prompt_completion,
        summary="prompt from prompt, demonstration from completion",
    ),
    Layout(
        name="prompt-answer",
        title="prompts and answers",
        columns=("prompt", "answer"),
        roles=Columns(prompt="prompt", answer="answer", tools="tools"),
        summary="prompt from prompt, answer from answer",
    ),
    Layout(
        name="question-answer",
        title="questions and answers",
        columns=("question", "answer"),
        roles=Columns(prompt="question", answer="answer"),
        summary="prompt from question, answer from answer",
    ),
    Layout(
        name="prompt-only",
        title="prompts",
        columns=("prompt",),
        roles=Columns(prompt="prompt", tools="tools"),
        summary="prompt from prompt, no answers",
    ),
    Layout(
        name="text",
        title="plain text",
        columns=("text",),
        types={"text": str},
        read=read_text,
        summary="text from text",
    ),
)
