"""Chat templates: from messages to text and ids, with what users write kept apart from control
tokens.

Text is text: what messages and tools say never becomes a control token, also where it is spelled
like one. Such words are replaced by marks while the template renders, and are encoded as text.

Tests: `tests/unit/formats/test_templates.py` (every template of TRL) and
`tests/unit/formats/test_chat_forms.py`."""

import enum
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.formats.chat_forms import (
    Form,
    Message,
    Reasoning,
    clean_messages,
    list_forms,
    list_tools,
)

WORDS = re.compile(r"\w+")
WRITTEN_PART = re.compile(r"""\{['"]type['"]: ['"]text['"]""")
"""A part of a message's content as Python or JSON has it, which no template means to show."""
NO_UNICODE = "is not Unicode: it has half of a surrogate pair; correct or drop the row"


class Progress(enum.IntEnum):
    """The check at which a form of a conversation failed; a later one is a higher number.

    (The display of long steps, `core/progress.py`, has a class of the same name.)

    `RENDER`: the template raised, or wrote Python objects. `PROMPT`: it left out a tool or a message
    of the prompt. `TURN`: it left out text or tool calls of the assistant's turn. `REASONING`: it
    left out only the turn's reasoning.
    """

    RENDER = 0
    PROMPT = 1
    TURN = 2
    REASONING = 3


class CannotRender(ValueError):
    """A template that raises, or that leaves out what a message says.

    Attributes:
        progress: `conversations.py` tries several forms of a conversation, and shows the user the
            error of the one that got farthest.
        part: of the conversation that cannot be rendered.
        remedy: what the user can do.
    """

    def __init__(self, progress: Progress, part: str, remedy: str) -> None:
        self.progress = progress
        self.part = part
        self.remedy = remedy
        super().__init__(f"{part}: {remedy}")


@dataclass(frozen=True)
class Chat:
    """A conversation with its tools, ready for the template of a tokenizer.

    Attributes:
        messages: cleaned, and with a mark (a word that no text has) in place of each word that
            spells a control token.
        form: the way of writing messages that the template gets: tool calls as text or as objects,
            content as text or as parts (`chat_forms.list_forms`).
        words: mark → the word that it stands for.
    """

    tokenizer: Any
    messages: list[Message]
    tools: list[Message] | None
    form: Form
    words: Mapping[str, str]

    def render(self, count: int, *, prompt: bool) -> str:
        """Render the first `count` messages, with marks; as a `prompt` up to where the assistant
        speaks. Raises CannotRender: whatever the template raises."""
        messages = [self.form.apply(message) for message in self.messages[:count]]
        part = describe_message(self.messages[:count])
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=self.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            # Jinja's own errors, and whatever the code of a template can raise.
            reason = " ".join(str(error).split()) or type(error).__name__
            remedy = f"the chat template cannot render this conversation: {reason}"
            raise CannotRender(progress=Progress.RENDER, part=part, remedy=remedy) from error
        if self.form.parts and WRITTEN_PART.search(text):
            raise CannotRender(
                progress=Progress.RENDER,
                part=part,
                remedy="the chat template writes content as a list of parts",
            )
        return str(text)

    def encode(self, text: str, *, start: bool) -> list[int]:
        """Encode rendered text; `start`: it begins the conversation, so it gets one BOS, whatever
        the template and the tokenizer put there. Raises UserError: it is not Unicode."""
        try:
            ids = self._encode_pieces(text)
        except (UnicodeError, TypeError) as error:
            # Tokenizers raise a TypeError at half of a surrogate pair.
            raise UserError("conversation", describe_message(self.messages), NO_UNICODE) from error
        if not start:
            return ids
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        if ids[:1] != [bos] and prepends_bos(self.tokenizer):
            ids.insert(0, bos)
        return ids

    def _encode_pieces(self, text: str) -> list[int]:
        """Encode rendered text with the words in place of their marks, which are text alone."""
        if not self.words:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        marks = "|".join(map(re.escape, self.words))
        ids: list[int] = []
        for piece in re.split(f"({marks})", text):
            if piece in self.words:
                ids += encode_text(self.tokenizer, self.words[piece])
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids


def open_chat(
    tokenizer: Any, messages: Sequence[Message], tools: Any, reasoning: Reasoning = "keep"
) -> Chat:
    """Prepare a conversation for the template of a tokenizer. Raises UserError: it has none, no
    message is given, or parts of messages are not as OpenAI has them."""
    template = tokenizer.chat_template
    if not template:
        remedy = "has no chat template, but the prompts are chats; use plain prompts, "
        remedy += "or set model.chat_template to a file"
        raise UserError("policy", "tokenizer", remedy)
    source = template if isinstance(template, str) else "\n".join(template.values())
    try:
        cleaned = clean_messages(messages, reasoning, source)
        listed = list_tools(tools)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = f"is not as OpenAI's messages and tools are ({error}); correct or drop the row"
        raise UserError("prompt", json.dumps(messages, ensure_ascii=False), remedy) from error
    if not cleaned:
        raise UserError("prompt", "[]", "has no messages")
    hider = _Hider(tokenizer, cleaned, listed)
    hidden_messages = hider.hide(cleaned)
    hidden_tools = hider.hide(listed)
    return Chat(
        tokenizer=tokenizer,
        messages=hidden_messages,
        tools=hidden_tools,
        form=Form(),
        words=hider.words,
    )


def list_chats(chat: Chat) -> list[Chat]:
    """List a conversation in all forms that could make a difference to a template, the plainest
    first."""
    return [replace(chat, form=form) for form in list_forms(chat.messages)]


def check_prompt(chat: Chat, text: str, count: int) -> None:
    """Check that `text`, rendered of the first `count` messages, has what these and the tools say.
    An assistant's earlier turns are the template's to shorten. Raises CannotRender: something is
    missing."""
    for tool in chat.tools or ():
        name = tool["function"]["name"]
        if name not in text:
            remedy = f"the chat template does not render tools ({name!r} is missing); "
            remedy += "drop the tools, or set model.chat_template to one that does"
            raise CannotRender(progress=Progress.PROMPT, part="tools", remedy=remedy)
    for message in chat.messages[:count]:
        content = message.get("content")
        role = message["role"]
        if role == "assistant" or not isinstance(content, str):
            continue
        if not has_words(text, content):
            remedy = f"the chat template leaves out this message of the role {role!r}; "
            remedy += "drop or rename it, or set model.chat_template to one that renders it"
            raise CannotRender(
                progress=Progress.PROMPT, part=describe_message([message]), remedy=remedy
            )


def has_words(text: str, content: str) -> bool:
    """Whether `text` has what `content` says, however a template quotes or trims it."""
    return content.strip() in text or all(word in text for word in WORDS.findall(content))


def describe_message(messages: Sequence[JsonMapping]) -> str:
    """Describe the last of some messages for an error: its role and how its content begins."""
    if not messages:
        return "no messages"
    last = messages[-1]
    content = last.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    description = f"{last['role']}: {text[:60]}"
    calls = [call["function"]["name"] for call in last.get("tool_calls", ())]
    if calls:
        description += f" calls {', '.join(calls)}"
    return description


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode text by itself; what is spelled like a control token is text, too. Raises UserError:
    it is not Unicode."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    except (UnicodeError, TypeError) as error:
        raise UserError("text", text, NO_UNICODE) from error


def list_control_ids(tokenizer: Any) -> frozenset[int]:
    """List the ids of the control tokens of a tokenizer."""
    # A tokenizer has the same hash after tokens were added to it: its size tells.
    return _list_control_ids(tokenizer, len(tokenizer))


@functools.lru_cache(8)
def _list_control_ids(tokenizer: Any, size: int) -> frozenset[int]:
    """List the ids of the control tokens of a tokenizer of `size` tokens."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


@functools.lru_cache(8)
def prepends_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer itself begins a text with its BOS."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer.encode("a"))[:1] == [bos]


@functools.lru_cache(8)
def compile_control_tokens(tokenizer: Any, size: int) -> re.Pattern[str]:
    """Compile a pattern that finds the control tokens of a tokenizer of `size` tokens in folded
    text."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted(set(added).union(tokenizer.all_special_tokens))
    patterns = [re.escape(fold_text(name)) for name in names]
    # Without any, nothing is found: an empty pattern would be everywhere.
    return re.compile("|".join(patterns) or "(?!)")


def fold_text(text: str) -> str:
    """Fold text at least as far as any tokenizer's normalizer: compatible forms and upper and lower
    case are equal."""
    return unicodedata.normalize("NFKC", text).casefold()


class _Hider:
    """Replaces words that spell control tokens by marks that nobody can write into the
    conversation. `conversations.py: _show` puts the words back where text with marks is shown to a
    user."""

    def __init__(self, tokenizer: Any, messages: Any, tools: Any) -> None:
        self.controls = compile_control_tokens(tokenizer, len(tokenizer))
        content = json.dumps([messages, tools]).encode("utf-8", "surrogatepass")
        self.key = hashlib.sha256(content).hexdigest()[:16]
        self.words: dict[str, str] = {}

    def hide(self, value: Any) -> Any:
        """Return `value` with marks in all its texts."""
        if isinstance(value, dict):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.hide(part) for part in value]
        if not isinstance(value, str) or not self.controls.search(fold_text(value)):
            return value
        # A word at a time, so that a template still sees the remaining text: where reasoning ends,
        # what to trim. A control token with a space in it takes the whole text.
        hidden = re.sub(r"\S+", self._hide_word, value)
        return self._replace(value) if self.controls.search(fold_text(hidden)) else hidden

    def _hide_word(self, match: re.Match[str]) -> str:
        word = match.group()
        return self._replace(word) if self.controls.search(fold_text(word)) else word

    def _replace(self, text: str) -> str:
        """Return the mark of a text; equal texts have equal marks."""
        for mark, word in self.words.items():
            if word == text:
                return mark
        # The key is a digest of the conversation: nobody can write it into the same.
        mark = f"@{self.key}x{len(self.words)}@"
        self.words[mark] = text
        return mark
