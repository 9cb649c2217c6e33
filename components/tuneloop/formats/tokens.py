"""Text to token ids and back: the one place where it happens, so that SFT and RL see the same ids.

A prompt and its completion are tokenized apart and joined as ids: the border between them is always a border
between tokens, in training as in generation. After that nothing retokenizes: stages hand ids to one another.

Text is text: what data, users or tools say never becomes a control token (one that the tokenizer marks as special),
also where it is spelled like one. Those come from the chat template and from this module alone."""

import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model: Path) -> Any:
    """Load the tokenizer of a Hugging Face model directory. Raises UserError: it cannot be loaded, or has no EOS."""
    from transformers import AutoTokenizer

    if not any(
        (model / name).is_file() for name in FILES
    ):  # transformers would make an empty one up
        raise UserError(
            "policy", str(model), f"has no tokenizer; add its files to it ({', '.join(FILES)})"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n")[0][:200]
        raise UserError(
            "policy", str(model), f"its tokenizer cannot be loaded: {reason}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            "policy", str(model), "its tokenizer has no eos_token; set one in tokenizer_config.json"
        )
    return tokenizer


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """Encode a prompt, which is plain text or (`chat`) a JSON list of messages: the ids that a completion follows.

    Messages go through the tokenizer's template, up to where the assistant speaks; only the template adds special
    tokens. Plain text gets the special tokens that the tokenizer itself prepends (Llama's BOS, nothing for Qwen), as
    vLLM does; an end of sequence that it appends is dropped, since the text goes on. Raises UserError: messages without
    a chat template, text that is not a list of messages, or a prompt of no token."""
    if chat:
        ids = _encode_chat(tokenizer, prompt)
    else:
        ids = list(tokenizer.encode(prompt, split_special_tokens=True))
        if ids[-1:] == [tokenizer.eos_token_id] and encode_text(tokenizer, prompt)[-1:] != ids[-1:]:
            ids.pop()
    if not ids:
        raise UserError("prompt", prompt, "has no tokens; nothing can follow it")
    return ids


def encode_completion(tokenizer: Any, text: str) -> list[int]:
    """Encode what the policy should produce for `text`: no special tokens but the end of sequence, last."""
    return [*encode_text(tokenizer, text), tokenizer.eos_token_id]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode text by itself; what is spelled like a control token is text, too."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def encode_conversation(tokenizer: Any, messages: str) -> tuple[list[int], list[bool]]:
    """Encode a whole conversation; return its ids, and of each whether it is a target.

    Each turn of the assistant is a target up to and with its end of sequence; what the template puts after that is not,
    nor are other messages, tools' results among them. Raises UserError: no turn of the assistant; or a template that
    rewrites earlier turns (one that strips reasoning does), so that what is trained would not be what is sampled."""
    turns = json.loads(messages)
    ids: list[int] = []
    targets: list[bool] = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _encode_chat(tokenizer, json.dumps(turns[:number]))
        whole = _apply_template(tokenizer, turns[: number + 1])
        if before[: len(ids)] != ids or whole[: len(before)] != before:
            remedy = "the chat template rewrites what was said before it; give each turn as a demonstration of its own"
            raise UserError(f"message {number}", turn["content"][:60], remedy)
        said = whole[len(before) :]
        end = (
            said.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in said else len(said)
        )
        targets += [False] * (len(before) - len(ids)) + [True] * end + [False] * (len(said) - end)
        ids = whole
    if not ids:
        raise UserError("prompt", messages, "has no message of the assistant to learn")
    return ids, targets


def encode_reply(
    tokenizer: Any,
    text: str,
    chat: bool,
    role: str,
    stops: Sequence[int],
    keep_reasoning: bool = False,
) -> list[int]:
    """Encode what lies between two turns of the policy: after the token that ended one, up to the start of the next.

    Plain text is itself. In a chat it is what the template puts between the end of the assistant's turn and its next:
    the end of that message, a message of `role`, the opening of a new one. The template renders a sample conversation;
    the policy's own turn is never rendered, as only its sampled ids count. Raises UserError if the template cannot
    render this, ends turns with none of the ids `stops`, or rewrites earlier turns; `keep_reasoning` accepts one that
    removes the reasoning from them."""
    if not chat:
        return encode_text(tokenizer, text)
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
    ]
    try:
        before = _apply_template(tokenizer, turns)
        turns.append({"role": role, "content": text})
        after = _apply_template(tokenizer, turns, add_generation_prompt=True)
    except Exception as error:  # jinja's, and whatever a template raises
        raise UserError(
            "chat template", role, f"cannot render a reply of this role ({error})"
        ) from error
    if not (ends := [place + 1 for place, token in enumerate(before) if token in stops]):
        raise UserError(
            "chat template", list(stops), "ends no turn of the assistant with one of these ids"
        )
    if keep_reasoning:
        end = [place + 1 for place, token in enumerate(after) if token in stops][len(ends) - 1]
    elif after[: (end := ends[-1])] != before[:end]:
        remedy = "strips reasoning from earlier turns, or else rewrites them, so the policy would not see what it said;"
        raise UserError(
            "chat template", role, f"{remedy} --keep-reasoning true goes on with what was sampled"
        )
    return after[end:]


def stop_ids(tokenizer: Any, model: Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's and those of generation_config.json, sorted."""
    config = model / "generation_config.json"
    listed = json.loads(config.read_text()).get("eos_token_id") if config.exists() else None
    more = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(sorted({tokenizer.eos_token_id, *more}))


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode `ids` to text for people and verifiers, without special tokens; never encode it again."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError(
            "policy",
            "tokenizer",
            "has no chat template, but the prompts are chats; use plain prompts",
        )
    try:
        return _apply_template(tokenizer, json.loads(prompt), add_generation_prompt=True)
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise UserError("prompt", prompt, "is not a JSON list of chat messages") from error


@functools.lru_cache(8)
def _control_tokens(tokenizer: Any, size: int) -> re.Pattern[str]:
    """Return a pattern that finds the control tokens of a tokenizer of `size` tokens in folded text."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile(
        "|".join(re.escape(_fold(name)) for name in {*added, *tokenizer.all_special_tokens})
        or "(?!)"
    )


def _fold(text: str) -> str:
    """Fold text at least as far as any tokenizer's normalizer: compatible forms and upper and lower case are equal."""
    return unicodedata.normalize("NFKC", text).casefold()


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> list[int]:
    """Render and encode messages; strings that spell a control token are replaced meanwhile, and encoded as text."""
    controls, found = _control_tokens(tokenizer, len(tokenizer)), list[str]()
    mark = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[
        :16
    ]  # nobody can write it into the messages

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {hide(key): hide(part) for key, part in value.items()}
        if isinstance(value, list):
            return [hide(part) for part in value]
        if not (isinstance(value, str) and controls.search(_fold(value))):
            return value
        found.append(value)
        return f"@{mark}:{len(found) - 1}@"

    hidden = hide(messages)
    if not found:
        return list(tokenizer.apply_chat_template(messages, return_dict=False, **how))
    pieces = re.split(
        f"@{mark}:([0-9]+)@", tokenizer.apply_chat_template(hidden, tokenize=False, **how)
    )
    ids = [
        encode_text(tokenizer, found[int(piece)])
        if i % 2
        else tokenizer.encode(piece, add_special_tokens=False)
        for i, piece in enumerate(pieces)
    ]
    return [token for part in ids for token in part]
