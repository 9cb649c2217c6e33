"""Conversations with masks."""

import json

import pytest

from tests.policies import tokenizer
from tuneloop.core.errors import UserError
from tuneloop.formats.tokens import (
    decode_ids,
    encode_completion,
    encode_conversation,
    encode_prompt,
    encode_reply,
)
from tuneloop.rewards.structures.calls import Call, parse_calls

TALK = [
    {"role": "user", "content": "1 ="},
    {"role": "assistant", "content": "one"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
]


@pytest.mark.parametrize(
    "written",
    ['[TOOL_CALLS]f[ARGS]{"a": 1}', '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'],
)
def test_marks_of_tool_calls_stay_where_they_are_special_tokens(written):
    words = tokenizer()
    marks = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    words.add_special_tokens({"additional_special_tokens": marks})
    ids = [*words(written)["input_ids"], words.eos_token_id]
    assert set(words.convert_tokens_to_ids(marks)) & set(ids)
    text = decode_ids(words, ids)
    assert text == written
    assert parse_calls(text, {}) == [Call("f", {"a": 1})]


def test_every_turn_of_the_assistant_is_a_target():
    words = tokenizer()
    ((ids, targets),) = encode_conversation(words, json.dumps(TALK))
    learned = [token for token, wanted in zip(ids, targets) if wanted]
    assert learned.count(words.eos_token_id) == 2
    assert decode_ids(words, learned) == "onetwo"
    first = encode_prompt(words, json.dumps(TALK[:1]), True)
    assert ids[: len(first)] == first and not any(targets[: len(first)])
    last = encode_prompt(words, json.dumps(TALK[:3]), True)
    assert ids[: len(last)] == last and targets[len(last)]


def test_a_template_that_hides_earlier_turns_gives_each_turn_a_row_of_its_own():
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    first, second = encode_conversation(words, json.dumps(TALK))
    assert decode_ids(words, first[0]) == "<user>1 =<assistant>one"
    assert decode_ids(words, second[0]) == "<user>1 =<assistant><tool>2<assistant>two"
    for (ids, targets), text in ((first, "one"), (second, "two")):
        learned = [token for token, wanted in zip(ids, targets) if wanted]
        assert learned == [*words.encode(text), words.eos_token_id]


def test_nothing_to_learn():
    with pytest.raises(UserError, match="no message of the assistant"):
        encode_conversation(tokenizer(), json.dumps(TALK[:1]))


def controls(words, ids):
    return [token for token in ids if token in words.all_special_ids]


@pytest.mark.parametrize("spelled", ["{}", "a {}b", "{}{}", "<{}>", "{}\n{}"])
@pytest.mark.parametrize("number", range(3))
def test_no_text_becomes_a_control_token(number: int, spelled: str) -> None:
    words = tokenizer()
    name = words.all_special_tokens[number]
    text = spelled.replace("{}", name)
    assert controls(words, words.encode(text)), "the tokenizer by itself makes one of it"
    assert controls(words, encode_prompt(words, text, False)) == []
    assert controls(words, encode_completion(words, text)) == [words.eos_token_id]
    stops = [words.eos_token_id]
    for put in (
        lambda said: encode_prompt(words, json.dumps([{"role": "user", "content": said}]), True),
        lambda said: encode_conversation(
            words, json.dumps([*TALK, {"role": "assistant", "content": said}])
        )[0][0],
        lambda said: encode_conversation(
            words, json.dumps([{"role": "system", "content": said}, *TALK])
        )[0][0],
        lambda said: encode_reply(words, said, True, "tool", stops),
        lambda said: encode_reply(words, said, False, "tool", stops),
    ):
        assert controls(words, put(text)) == controls(words, put("word"))
        assert text in words.decode(put(text), skip_special_tokens=False), (
            "it is still there to be read"
        )


def test_a_text_in_two_parts_becomes_no_control_token() -> None:
    """What is put between its halves is taken out again."""
    words = tokenizer()
    name = words.eos_token
    text = name[:5] + name + name[5:]
    ids = encode_prompt(words, json.dumps([{"role": "user", "content": text}]), True)
    assert controls(words, ids) == controls(words, encode_prompt(words, json.dumps(TALK[:1]), True))


def test_text_without_control_tokens_is_as_the_tokenizer_has_it() -> None:
    words = tokenizer()
    assert encode_prompt(words, "1 + 2 = <|im_x|>", False) == words.encode("1 + 2 = <|im_x|>")
    assert encode_prompt(words, json.dumps(TALK[:1]), True) == list(
        words.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=False)
    )
