"""What lies between two turns of the policy in a conversation that goes on: an environment's
reply.

`inference/multi_turn.py` asks it after each turn of an episode, by way of `formats/tokens.py`.
Tests: `tests/unit/formats/test_templates.py`, `tests/unit/inference/test_episodes.py`.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.formats.chat_rendering import (
    CannotRender,
    Chat,
    encode_text,
    list_chats,
    list_control_ids,
    open_chat,
)


def encode_reply(
    tokenizer: Any,
    text: str,
    chat: bool,
    role: str,
    stops: Sequence[int],
    keep_reasoning: bool = False,
    turn: str | None = None,
    last: int | None = None,
) -> list[int]:
    """Encode what lies between two turns of the policy: after the token that ended one, up to the
    start of the next.

    Plain text is itself. In a chat it is what the template puts between the end of the assistant's
    turn and its next: the rest of that message, a message of `role`, the opening of a new one. The
    template renders a sample conversation; the policy's own turn is never rendered, as only its
    sampled ids count.

    Args:
        text: of the reply.
        chat: whether the prompt was a chat.
        role: of the message that the reply becomes, such as ``tool``.
        stops: the ids that end a completion.
        keep_reasoning: accept a template that removes the reasoning of earlier turns: the policy
            goes on from what it sampled.
        turn: the text of the policy's turn, if known: one without reasoning loses nothing where the
            template removes it.
        last: the last id of the policy's turn, if known.

    Raises UserError: the template cannot render this, ends turns with none of `stops`, or removes
    the reasoning of earlier turns.
    """
    if not chat:
        return encode_text(tokenizer, text)
    # Words of the sample that no reply can have in it by chance, nor a template.
    marks = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    thought = f"t{marks[:16]}"
    answer = f"a{marks[16:32]}"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{answer}"},
        {"role": role, "content": text},
    ]
    sample, alone, followed = _render_sample(open_chat(tokenizer, messages, None), answer)
    end = alone.rpartition(answer)[2]
    ids = _cut_end(sample, end, followed.rpartition(answer)[2], stops, last)
    has_reasoning = turn is None or "</think>" in turn
    if thought not in followed and has_reasoning and not keep_reasoning:
        remedy = "strips reasoning from earlier turns, so the policy would not see what it said;"
        remedy += " --keep-reasoning true goes on with what was sampled"
        raise UserError("chat template", role, remedy)
    return ids


def _render_sample(chat: Chat, answer: str) -> tuple[Chat, str, str]:
    """Render a sample conversation up to the assistant's turn, and up to the next; return both with
    the conversation in the form that shows the `answer`. Raises UserError: the template shows it in
    none."""
    role = chat.messages[-1]["role"]
    refusal: CannotRender | None = None
    for sample in list_chats(chat):
        try:
            alone = sample.render(2, prompt=False)
            followed = sample.render(3, prompt=True)
        except CannotRender as error:
            refusal = refusal or error
            continue
        if answer in alone and answer in followed:
            return sample, alone, followed
    if refusal is not None:
        remedy = f"cannot render a reply of this role ({refusal.__cause__})"
        raise UserError("chat template", role, remedy) from refusal
    raise UserError("chat template", role, "does not render the turns of the assistant")


def _cut_end(
    sample: Chat, alone: str, followed: str, stops: Sequence[int], last: int | None
) -> list[int]:
    """Encode what follows a turn, `followed`, without the token that ends the turn, which was
    sampled. `alone` is what follows it at the end of a conversation. Raises UserError: the template
    ends turns with no stop."""
    end_ids = sample.encode(alone, start=False)
    ids = sample.encode(followed, start=False)
    if any(token in stops for token in end_ids):
        for end, (token, other) in enumerate(zip(ids, end_ids), 1):
            if token != other:
                break
            if token in stops:
                return ids[end:]
        # The end of the conversation has a token of its own (gpt-oss); another stands in its place
        # between turns.
        controls = list_control_ids(sample.tokenizer)
        ends = (end for end, token in enumerate(ids, 1) if token in controls)
        return ids[next(ends) :]
    if not end_ids and ids and ids[0] in stops:
        # The next message's first token ends a turn (GLM-4): it is there already if it is what was
        # sampled.
        return ids[1:] if last in (None, ids[0]) else ids
    remedy = "ends no turn of the assistant with one of these ids"
    raise UserError("chat template", list(stops), remedy)
