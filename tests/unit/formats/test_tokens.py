"""Conversations with masks."""

import json

import pytest

from tests.policies import tokenizer
from tuneloop.core.errors import UserError
from tuneloop.formats.tokens import decode_ids, encode_conversation, encode_prompt

TALK = [
    {"role": "user", "content": "1 ="},
    {"role": "assistant", "content": "one"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


def test_every_turn_of_the_assistant_is_a_target():
    words = tokenizer()
    ids, targets = encode_conversation(words, json.dumps(TALK))
    said = [token for token, wanted in zip(ids, targets) if wanted]
    assert said.count(words.eos_token_id) == 2
    assert decode_ids(words, said) == "onetwo"
    first = encode_prompt(words, json.dumps(TALK[:1]), True)
    assert ids[: len(first)] == first and not any(targets[: len(first)])
    last = encode_prompt(words, json.dumps(TALK[:3]), True)
    assert ids[: len(last)] == last and targets[len(last)]


def test_a_template_that_strips_what_was_thought_is_refused():
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with pytest.raises(UserError, match=r"message 3: 'two'.*rewrites what was said.*demonstration of its own"):
        encode_conversation(words, json.dumps(TALK))


def test_nothing_to_learn():
    with pytest.raises(UserError, match="no message of the assistant"):
        encode_conversation(tokenizer(), json.dumps(TALK[:1]))
