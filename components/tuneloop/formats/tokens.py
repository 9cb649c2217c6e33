"""Text to token ids and back: the one place where it happens, so that SFT and RL see the same ids.

A prompt and its completion are tokenized apart and joined as ids: the border between them is always
a border between tokens, in training as in generation. After that nothing retokenizes: stages hand
ids to one another.

Text is text: what data, users or tools say never becomes a control token (one that the tokenizer
marks as special), also where it is spelled like one. Those come from the chat template and from
this module alone.

The functions of `chat_rendering`, `chat_replies` and `conversations` that other packages use are
imported here, and taken from here. What is encoded in another way changes the ids that are trained:
`tests/unit/formats/test_templates.py` has every template of TRL."""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.formats.chat_rendering import encode_text as encode_text
from tuneloop.formats.chat_replies import encode_reply as encode_reply
from tuneloop.formats.conversations import encode_answer as encode_answer
from tuneloop.formats.conversations import encode_conversation as encode_conversation
from tuneloop.formats.conversations import encode_prompt_messages
from tuneloop.formats.model_files import TOKENIZER_FILES, has_tokenizer
from tuneloop.formats.rows import name_row

CALL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>")
"""Marks of tool calls that tokenizers of Mistral and Llama take for special tokens. Without them
`rewards/structures/calls.py` could not tell a call from other text."""


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a Hugging Face model directory. Raises UserError: it cannot be loaded,
    or has no EOS."""
    from transformers import AutoTokenizer

    directory = str(model)
    # Without any of them transformers would make an empty tokenizer up.
    if not has_tokenizer(model):
        remedy = f"has no tokenizer; add its files to it ({', '.join(TOKENIZER_FILES)})"
        raise UserError("policy", directory, remedy)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0][:200]
        remedy = f"its tokenizer cannot be loaded: {reason}"
        raise UserError("policy", directory, remedy) from error
    if tokenizer.eos_token_id is None:
        remedy = "its tokenizer has no eos_token; set one in tokenizer_config.json"
        raise UserError("policy", directory, remedy)
    return tokenizer


def encode_prompt(tokenizer: Any, prompt: str, chat: bool, tools: str | None = None) -> list[int]:
    """Encode a prompt, which is plain text or (`chat`) a JSON list of messages: the ids that a
    completion follows.

    Messages, with the schemas of `tools` (a JSON list), go through the tokenizer's template, up to
    where the assistant speaks; only the template adds special tokens, and there is one BOS. Plain
    text gets the special tokens that the tokenizer itself prepends (Llama's BOS, nothing for Qwen),
    as vLLM does; an end of sequence that it appends is dropped, since the text goes on. Raises
    UserError: messages that the template cannot render, text that is not a list of messages, or a
    prompt of no token."""
    if chat:
        ids = encode_prompt_messages(tokenizer, prompt, tools)
    else:
        text_ids = encode_text(tokenizer, prompt)
        ids = list(tokenizer.encode(prompt, split_special_tokens=True))
        end = [tokenizer.eos_token_id]
        # Text that itself ends so would be cut otherwise.
        if ids[-1:] == end and text_ids[-1:] != end:
            ids.pop()
    if not ids:
        raise UserError("prompt", prompt, "has no tokens; nothing can follow it")
    return ids


def encode_prompt_row(tokenizer: Any, row: JsonMapping) -> list[int]:
    """Encode the prompt of a row of data. Raises UserError that names the row as the user's file
    does."""
    try:
        return encode_prompt(tokenizer, row["prompt"], row["chat"], row.get("tools"))
    except UserError as error:
        raise UserError(f"{name_row(row)}: {error.field}", error.value, error.remedy) from error


def encode_completion(tokenizer: Any, text: str) -> list[int]:
    """Encode what the policy should produce for plain `text`: no special tokens but the end of
    sequence, last. In a chat, the answer is a turn of the template: `encode_answer`."""
    ids = encode_text(tokenizer, text)
    ids.append(tokenizer.eos_token_id)
    return ids


def stop_ids(tokenizer: Any, model: Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's and those of generation_config.json,
    sorted. `digest_tokenizer` (`training/corpora.py`) and `config/model_facts.py` name the same files,
    and change with it."""
    ids = {tokenizer.eos_token_id}
    config = model / "generation_config.json"
    if config.exists():
        # One id or several: Llama 3 and Qwen end a turn and a text by different tokens.
        listed = json.loads(config.read_text()).get("eos_token_id")
        if isinstance(listed, list):
            ids.update(listed)
        elif listed is not None:
            ids.add(listed)
    return tuple(sorted(ids))


@functools.lru_cache(8)
def _find_call_marks(tokenizer: Any, size: int) -> dict[int, str]:
    """Find id → text of the `CALL_MARKS` of a tokenizer of `size` tokens."""
    added = tokenizer.get_added_vocab()
    return {added[mark]: mark for mark in CALL_MARKS if mark in added}


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode `ids` to text for people and verifiers, without special tokens but `CALL_MARKS`; never
    encode it again."""
    marks = _find_call_marks(tokenizer, len(tokenizer))
    texts: list[str] = []
    for is_mark, part in itertools.groupby(ids, marks.__contains__):
        if is_mark:
            texts += [marks[token] for token in part]
        else:
            # The clean-up would remove spaces before punctuation, which the policy wrote.
            text = tokenizer.decode(
                list(part), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            texts.append(text)
    return "".join(texts)
