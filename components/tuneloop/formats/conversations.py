"""Conversations to learn from: which ids are context, and which are targets.

Every turn of the assistant is a target in the context in which it is sampled: its prompt is the
template's rendering of the messages before it, up to where the assistant speaks, and its target is
what the template adds for the turn, up to and with the token that ends it. A template may render a
turn otherwise once another follows: it strips reasoning, or ends the conversation by another token.
Such a turn cannot be both a target and the context of a later one in a single document, so the
later turn begins a document of its own.

A document is a sequence of ids that is trained on as one. `chat_rendering.py` renders text with
marks, which stand for words of the user that spell control tokens. A conversation is tried in
several forms (`chat_forms.py: Form`), since templates differ in what they read of a message.

Tests: `tests/unit/formats/test_templates.py`, `tests/unit/formats/test_chat_forms.py`."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.formats.chat_forms import Message, Reasoning, split_reasoning
from tuneloop.formats.chat_rendering import (
    CannotRender,
    Chat,
    Progress,
    check_prompt,
    describe_message,
    has_words,
    list_chats,
    list_control_ids,
    open_chat,
)

T = TypeVar("T")
NO_PROMPT = "nothing stands before this turn; let a message of the user begin the conversation"
NO_MESSAGES = "is not a JSON list of chat messages"
History = Literal["as-rendered", "per-turn"]
"""`as-rendered`: turns share a document wherever the template renders the earlier ones as they were
targets; `per-turn`: each turn has a document of its own.

It is a setting of the data, as `Reasoning` is, and goes this way: a field of
`stages/data_prep.py: DataOptions` and a line in its facts; a field of
`formats/facts.py: PromptFacts`; the list of names that `stages/tokenize_data.py` passes on;
`training/corpora.py: RowEncoder`; and `training/delegation.py: CONVERSATION_CHOICES`, as other
backends render conversations themselves."""
OPEN_REASONING = re.compile(r"<think>\s*\Z")
"""The end of a prompt in which the template has opened the reasoning."""


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant: what stands before it, and its own part, as rendered text with marks
    (`Chat.words`) and as ids.

    Attributes:
        is_ended: whether the last id is the token that ends the turn. It is not where a template
            ends a turn by the beginning of the next message alone (GLM-4).
    """

    prompt_text: str
    prompt: list[int]
    target_text: str
    target: list[int]
    is_ended: bool


Encoded = tuple[list[int], list[bool]]
"""Ids, and of each whether it is a target."""


def encode_prompt_messages(tokenizer: Any, messages: str, tools: Any = None) -> list[int]:
    """Encode messages up to where the assistant speaks. Raises UserError: the template cannot
    render them."""
    chat = open_chat(tokenizer, _parse_messages(messages), tools)
    count = len(chat.messages)

    def encode(chat: Chat) -> list[int]:
        text = chat.render(count, prompt=True)
        check_prompt(chat, text, count)
        return chat.encode(text, start=True)

    return _encode_in_some_form(chat, encode)


def encode_conversation(
    tokenizer: Any,
    messages: str | Sequence[Message],
    tools: Any = None,
    *,
    stops: Iterable[int] = (),
    history: History = "as-rendered",
    reasoning: Reasoning = "keep",
) -> list[Encoded]:
    """Encode a conversation as one or more documents in which every turn of the assistant is a
    target once.

    A turn with ``weight: 0`` is context only. `stops` are the ids that end a completion beside the
    tokenizer's EOS. Raises UserError: no turn to learn, or a template that cannot render one of
    them whole."""
    parsed = _parse_messages(messages)
    chat = open_chat(tokenizer, parsed, tools, reasoning)
    numbers: list[int] = []
    for number, message in enumerate(parsed):
        if message["role"] == "assistant" and message.get("weight") != 0:
            numbers.append(number)
    if not numbers:
        raise UserError("prompt", messages, "has no message of the assistant to learn")
    all_stops = {tokenizer.eos_token_id}.union(stops)

    def encode(chat: Chat) -> list[Encoded]:
        turns = [encode_turn(chat, number, all_stops, reasoning) for number in numbers]
        return join_turns(chat, turns, all_stops, history)

    return _encode_in_some_form(chat, encode)


def encode_answer(
    tokenizer: Any,
    messages: str,
    answer: str,
    tools: Any = None,
    *,
    stops: Iterable[int] = (),
    reasoning: Reasoning = "keep",
) -> Encoded:
    """Encode a prompt of messages with its completion: as the last turn of a conversation, whose
    only target it is, so that a pair and a conversation of one turn train the same ids. Raises
    UserError as `encode_conversation`."""
    turns = [message | {"weight": 0} for message in _parse_messages(messages)]
    turns.append({"role": "assistant", "content": answer})
    (document,) = encode_conversation(tokenizer, turns, tools, stops=stops, reasoning=reasoning)
    return document


def encode_turn(chat: Chat, number: int, stops: set[int], reasoning: Reasoning) -> Turn:
    """Encode message `number`, a turn of the assistant. Raises CannotRender: the template does not
    render all of it, or not as something that it lets the model say."""
    message = chat.messages[number]
    if number == 0:
        raise CannotRender(
            progress=Progress.PROMPT, part=describe_message([message]), remedy=NO_PROMPT
        )
    prompt = chat.render(number, prompt=True)
    check_prompt(chat, prompt, number)
    rendered = chat.render(number + 1, prompt=False)
    addition = _find_addition(message, prompt, rendered)
    _check_turn(message, addition, reasoning)
    prompt_ids = chat.encode(prompt, start=True)
    if not prompt_ids:
        raise CannotRender(
            progress=Progress.PROMPT, part=describe_message([message]), remedy=NO_PROMPT
        )
    whole_ids = chat.encode(rendered, start=True)
    if rendered.startswith(prompt) and whole_ids[: len(prompt_ids)] == prompt_ids:
        target = whole_ids[len(prompt_ids) :]
    else:
        # The border between prompt and turn becomes one between tokens, as it is when the turn is
        # sampled.
        target = chat.encode(addition, start=False)
    end = find_end(chat.tokenizer, target, stops)
    if end is None:
        return Turn(
            prompt_text=prompt,
            prompt=prompt_ids,
            target_text=addition,
            target=target,
            is_ended=False,
        )
    target = target[:end]
    # The text up to and with the token that ends the turn. A turn may have that token before its
    # end, so it is cut at the last of those that are among the ids.
    token = chat.tokenizer.convert_ids_to_tokens(target[-1])
    pieces = addition.split(token)
    ended = pieces[: target.count(target[-1])]
    return Turn(
        prompt_text=prompt,
        prompt=prompt_ids,
        target_text=token.join(ended) + token,
        target=target,
        is_ended=True,
    )


def find_end(tokenizer: Any, ids: Sequence[int], stops: set[int]) -> int | None:
    """Find where a turn ends in what a template adds for it: after the first of `stops` that only
    blanks and control tokens follow, or else after the last control token, if only blanks follow.
    None: it has no such token."""
    for accepted in (stops, list_control_ids(tokenizer)):
        ends = [
            index
            for index, token in enumerate(ids, 1)
            if token in accepted and _is_blank(tokenizer, ids[index:])
        ]
        if ends:
            return ends[0] if accepted is stops else ends[-1]
    return None


class _Document:
    """A document that grows by turns. A turn without an end of its own gets one: the stop that
    begins the next message, or the tokenizer's EOS."""

    def __init__(self, chat: Chat, turn: Turn) -> None:
        self.chat = chat
        self.text = turn.prompt_text + turn.target_text
        self.ids = turn.prompt + turn.target
        self.targets = [False] * len(turn.prompt) + [True] * len(turn.target)
        self.is_ended = turn.is_ended

    def append(self, turn: Turn, stops: set[int]) -> bool:
        """Add a turn whose prompt begins with the very text of this document, and return True; else
        do nothing."""
        if not turn.prompt_text.startswith(self.text):
            return False
        if turn.prompt[: len(self.ids)] == self.ids:
            between = turn.prompt[len(self.ids) :]
        else:
            between = self.chat.encode(turn.prompt_text[len(self.text) :], start=False)
        # The turn before has no id that ends sampling. Joined to what follows, it would teach the
        # model to write the next message itself, instead of ending its turn.
        if not self.is_ended and (not between or between[0] not in stops):
            return False
        gap = [False] * len(between)
        if not self.is_ended:
            gap[0] = True
        self.text = turn.prompt_text + turn.target_text
        self.ids += between + turn.target
        self.targets += gap + [True] * len(turn.target)
        self.is_ended = turn.is_ended
        return True

    def close(self) -> Encoded:
        """Return ids and targets, with an end."""
        if self.is_ended:
            return self.ids, self.targets
        eos = self.chat.tokenizer.eos_token_id
        return self.ids + [eos], self.targets + [True]  # noqa: RUF005


def join_turns(
    chat: Chat, turns: Sequence[Turn], stops: set[int], history: History = "as-rendered"
) -> list[Encoded]:
    """Join turns into documents; see `History`."""
    documents: list[_Document] = []
    for turn in turns:
        if documents and history == "as-rendered" and documents[-1].append(turn, stops):
            continue
        documents.append(_Document(chat, turn))
    return [document.close() for document in documents]


def _encode_in_some_form(chat: Chat, encode: Callable[[Chat], T]) -> T:
    """Return `encode` of the conversation in the first of its forms (`list_chats`) for which the
    template leaves out nothing. Raises UserError with the reason of the form that got farthest."""
    refusals: list[CannotRender] = []
    for candidate in list_chats(chat):
        try:
            return encode(candidate)
        except CannotRender as error:
            refusals.append(error)
    # Of equals the first: the plainest form is nearest to what the user wrote.
    refusal = max(refusals, key=lambda error: error.progress)
    part = _show(chat, refusal.part)
    raise UserError("conversation", part, _show(chat, refusal.remedy)) from refusal


def _show(chat: Chat, text: str) -> str:
    """Replace marks by the words that they stand for."""
    for mark, word in chat.words.items():
        text = text.replace(mark, word)
    return text


def _find_addition(message: Message, prompt: str, rendered: str) -> str:
    """Find what the template adds to the prompt for a turn. Where it opens the reasoning in the
    prompt, but shows a turn without it (DeepSeek), the turn first says its reasoning, if it has
    some, and closes it."""
    if rendered.startswith(prompt):
        return rendered[len(prompt) :]
    opened = OPEN_REASONING.search(prompt)
    if opened and rendered.startswith(prompt[: opened.start()]):
        remainder = rendered[opened.start() :]
        if remainder.startswith("<think>"):
            return remainder.removeprefix("<think>").lstrip("\n")
        thought, _ = split_reasoning(message)
        return f"{thought}\n</think>\n\n{remainder.lstrip()}"
    remedy = "the chat template does not render this turn as something that follows its own prompt"
    if split_reasoning(message)[0]:
        remedy += " (its arguments may turn reasoning off)"
        remedy += "; set data.reasoning=drop, or model.template_args"
    raise CannotRender(progress=Progress.TURN, part=describe_message([message]), remedy=remedy)


def _check_turn(message: Message, addition: str, reasoning: Reasoning) -> None:
    """Check that a template rendered all that a turn says. Raises CannotRender: the part that is
    missing."""
    part = describe_message([message])
    thought, text = split_reasoning(message)
    if not has_words(addition, text):
        remedy = "the chat template leaves out the text of this turn;"
        remedy += " set model.chat_template to one that has it"
        if message.get("tool_calls"):
            remedy = "the chat template leaves out the text beside tool calls; drop one of the two"
        raise CannotRender(progress=Progress.TURN, part=part, remedy=remedy)
    if reasoning == "keep" and not has_words(addition, thought):
        remedy = "the chat template leaves out the reasoning of this turn;"
        remedy += " set data.reasoning=drop, or model.chat_template to one that has it"
        raise CannotRender(progress=Progress.REASONING, part=part, remedy=remedy)
    functions = [call["function"] for call in message.get("tool_calls", ())]
    # Several calls of one function are all there where its name is there as often.
    counts = Counter(function["name"] for function in functions)
    for function in functions:
        name = function["name"]
        if addition.count(name) < counts[name] or not _has_arguments(addition, function):
            remedy = f"the chat template does not render all tool calls ({name!r});"
            remedy += " set model.chat_template to one that does, or drop the row"
            raise CannotRender(progress=Progress.TURN, part=part, remedy=remedy)


def _has_arguments(text: str, function: JsonMapping) -> bool:
    """Whether `text` has the arguments of a call, neither as Python writes them nor encoded a
    second time."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return has_words(text, arguments)
    if not arguments:
        return True
    encoded = json.dumps(arguments, ensure_ascii=False)
    # As Python writes an object, with single quotes.
    if str(arguments) in text and str(arguments) != encoded:
        return False
    # JSON text as a JSON string, of a template that expects objects and got text.
    if json.dumps(encoded, ensure_ascii=False) in text:
        return False
    return all(has_words(text, leaf) for leaf in _list_leaves(arguments))


def _list_leaves(value: Any) -> list[str]:
    """List the keys and values in a JSON value as text, without truth values and nulls."""
    if isinstance(value, Mapping):
        leaves = [leaf for part in value.values() for leaf in _list_leaves(part)]
        return list(value) + leaves
    if isinstance(value, list):
        return [leaf for part in value for leaf in _list_leaves(part)]
    return [] if value is None or isinstance(value, bool) else [str(value)]


def _is_blank(tokenizer: Any, ids: Sequence[int]) -> bool:
    return not ids or not tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def _parse_messages(messages: str | Sequence[Message]) -> list[Message]:
    """Return messages, which may be JSON text. Raises UserError: they are not a list of objects
    with roles."""
    try:
        parsed = json.loads(messages) if isinstance(messages, str) else list(messages)
    except ValueError as error:
        raise UserError("prompt", messages, NO_MESSAGES) from error
    if not isinstance(parsed, list):
        raise UserError("prompt", messages, NO_MESSAGES)
    for message in parsed:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError("prompt", messages, NO_MESSAGES)
    return parsed
