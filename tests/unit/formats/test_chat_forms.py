"""Conversations that templates, tokenizers and data sets make difficult."""

import copy
import json
import random
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tests.policies import tokenizer
from tuneloop.core.errors import UserError
from tuneloop.formats.template_settings import find_turn_end, set_chat_template
from tuneloop.formats.tokens import encode_answer, encode_conversation, encode_prompt

CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {"key": "a b"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "1 ="},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2 ="},
    {"role": "assistant", "content": "two"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}(%s)]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tokenizer()


@pytest.fixture
def words(plain: Any) -> Any:
    return copy.deepcopy(plain)


def learned(tokens: Any, document: tuple[list[int], list[bool]]) -> str:
    ids, targets = document
    return tokens.decode([token for token, wanted in zip(ids, targets) if wanted])


def test_a_turn_of_weight_0_is_context_only(words: Any) -> None:
    first = {**TALK[1], "weight": 0}
    ((ids, targets),) = encode_conversation(words, json.dumps([TALK[0], first, *TALK[2:]]))
    assert learned(words, (ids, targets)) == "two<|im_end|>"
    assert ids == encode_conversation(words, json.dumps(TALK))[0][0]
    with pytest.raises(UserError, match="no message of the assistant to learn"):
        encode_conversation(words, json.dumps([TALK[0], first]))


def test_each_turn_has_a_row_of_its_own_if_asked_to(words: Any) -> None:
    together = encode_conversation(words, json.dumps(TALK))
    apart = encode_conversation(words, json.dumps(TALK), history="per-turn")
    assert [learned(words, document) for document in together] == ["one<|im_end|>two<|im_end|>"]
    assert [learned(words, document) for document in apart] == ["one<|im_end|>", "two<|im_end|>"]
    assert together[0][0] == apart[1][0]


def test_a_turn_that_only_the_next_message_ends_learns_that(words: Any) -> None:
    """As in GLM-4: the stop is where the next message begins, and EOS after the last turn."""
    words.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    words.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    stop = words.convert_tokens_to_ids("<|user|>")
    (document,) = encode_conversation(words, json.dumps(TALK), stops=[stop])
    assert learned(words, document) == f"one<|user|>two{words.eos_token}"
    # Where it is no stop, the model would go on: each turn is learned with EOS.
    apart = encode_conversation(words, json.dumps(TALK))
    assert [learned(words, row) for row in apart] == [
        f"one{words.eos_token}",
        f"two{words.eos_token}",
    ]


@pytest.mark.parametrize("in_template", [0, 1, 2])
@pytest.mark.parametrize("by_tokenizer", [False, True])
def test_there_is_one_bos_whatever_template_and_tokenizer_say(
    words: Any, in_template: int, by_tokenizer: bool
) -> None:
    words.add_special_tokens({"bos_token": "<bos>"})
    bos = words.bos_token_id
    if by_tokenizer:
        words.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bos)]
        )
    words.chat_template = "{{ bos_token }}" * in_template + CHATML
    wanted = 1 if by_tokenizer or in_template else 0
    prompt = json.dumps(TALK[:1])
    for ids in (
        encode_prompt(words, prompt, True),
        encode_answer(words, prompt, "one")[0],
        encode_conversation(words, json.dumps(TALK))[0][0],
    ):
        assert ids.count(bos) == wanted and (ids[0] == bos) == bool(wanted)
    assert encode_prompt(words, "1 =", False).count(bos) == int(by_tokenizer)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", '{"key": "a b"}'),
        ("{{ call.function.arguments }}", '{"key": "a b"}'),
        ("{{ '' + call.function.arguments }}", '{"key": "a b"}'),
        ("{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "key=a b"),
    ],
    ids=["as JSON", "as it is", "joined to text", "by key"],
)
@pytest.mark.parametrize("given", ["object", "text"])
def test_arguments_are_rendered_once(words: Any, written: str, shown: str, given: str) -> None:
    """Neither as Python writes them, nor encoded a second time."""
    words.chat_template = CALLING.replace("%s", written)
    call = copy.deepcopy(CALL)
    if given == "text":
        call["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]
    for content in ({"content": ""}, {"content": None}, {}):
        turns = [TALK[0], {"role": "assistant", "tool_calls": [call], **content}]
        (document,) = encode_conversation(words, json.dumps(turns))
        assert learned(words, document) == f"[find({shown})]<|im_end|>"


@pytest.mark.parametrize(
    ("turns", "tools", "reason"),
    [
        (
            [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
            None,
            "tool calls .'find'",
        ),
        ([TALK[0], TALK[1]], [{"name": "find", "parameters": {}}], "does not render tools .'find'"),
        (
            [{"role": "critic", "content": "hm"}, *TALK[:2]],
            None,
            "leaves out this message of the role 'critic'",
        ),
        (
            [TALK[0], {"role": "assistant", "content": [{"type": "image"}]}],
            None,
            "'image'; only text",
        ),
        ([TALK[1]], None, "nothing stands before this turn"),
        ([], None, "has no message"),
        ([TALK[0], {"role": "assistant", "content": "a\ud83d"}], None, "half of a surrogate pair"),
        (["text"], None, "is not a JSON list of chat messages"),
        (
            [TALK[0], {"role": "assistant", "content": "", "tool_calls": ["find"]}],
            None,
            "tool call is not an object",
        ),
        (
            [TALK[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
            None,
            "with a name",
        ),
    ],
)
def test_what_a_template_leaves_out_is_said_in_one_line(
    words: Any, turns: list[Any], tools: Any, reason: str
) -> None:
    words.chat_template = (
        "{% if messages[0].role == 'assistant' or not messages %}{{ raise_exception('a user begins') }}{% endif %}"
        "{% for m in messages if m.role != 'critic' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match=reason) as raised:
        encode_conversation(words, json.dumps(turns), json.dumps(tools))
    assert "\n" not in str(raised.value)


def test_parts_are_never_written_as_python_has_them(words: Any) -> None:
    """A template that raises for text is tried with parts, and must not show the list itself."""
    words.chat_template = (
        "{% if messages[0].content is string %}{{ raise_exception('no text') }}{% endif %}" + CHATML
    )
    with pytest.raises(UserError, match="no text"):
        encode_conversation(words, json.dumps(TALK))
    words.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
    (document,) = encode_conversation(words, json.dumps(TALK))
    assert learned(words, document) == "one<|im_end|>two<|im_end|>"


def test_reasoning_is_kept_or_dropped(words: Any) -> None:
    thought = [TALK[0], {**TALK[1], "reasoning_content": "count"}]
    inline = [TALK[0], {"role": "assistant", "content": "<think>\ncount\n</think>\n\none"}]
    for turns in (thought, inline):
        (kept,) = encode_conversation(words, json.dumps(turns))
        (dropped,) = encode_conversation(words, json.dumps(turns), reasoning="drop")
        assert learned(words, kept) == "<think>\ncount\n</think>\n\none<|im_end|>"
        assert learned(words, dropped) == "one<|im_end|>"


def test_a_spelled_control_token_hides_nothing_from_the_template(words: Any) -> None:
    """Only the word is set apart: the template still trims the text, and sees where the reasoning ends."""
    words.chat_template = CHATML.replace("m.content", "m.content.split('</think>')[-1] | trim")
    spelled = "  say <|im_end|> twice "
    ids = encode_prompt(words, json.dumps([{"role": "user", "content": spelled}]), True)
    assert ids.count(words.eos_token_id) == 1
    assert "user\nsay <|im_end|> twice<|im_end|>" in words.decode(ids)


def test_mutated_conversations_never_end_in_a_traceback(words: Any) -> None:
    """Each is encoded, or refused in a line."""
    rest = random.Random(0)
    values: list[Any] = [
        None,
        "",
        0,
        True,
        [],
        {},
        "x\ud83d",
        "<|im_end|>",
        "</think>",
        [None],
        10**30,
    ]
    values += [{"type": "text", "text": 5}, [{"name": "f"}], [{"function": {"name": None}}]]
    whole = [*TALK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    templates = [CHATML, CALLING.replace("%s", "{{ call.function.arguments | tojson }}")]
    outcomes = []

    def mutate(value: Any) -> Any:
        if rest.random() < 0.1:
            return rest.choice(values)
        if isinstance(value, dict):
            return {key: mutate(part) for key, part in value.items() if rest.random() < 0.95}
        if isinstance(value, list):
            return [mutate(part) for part in value if rest.random() < 0.95]
        return value

    for number in range(400):
        words.chat_template = templates[number % 2]
        text = json.dumps(mutate(whole))
        try:
            documents = encode_conversation(words, text)
        except UserError as error:
            assert "\n" not in str(error)
            outcomes.append(False)
        else:
            assert all(any(targets) and not targets[0] for _, targets in documents)
            outcomes.append(True)
    assert {True, False} == set(outcomes)


@pytest.mark.parametrize(
    "value", [False, 3, 0.5, "high 'n' \"low\"", None, ["a", 1], {"a": [True]}]
)
def test_arguments_of_a_template_stand_before_it(words: Any, value: Any) -> None:
    words.chat_template = (
        "\n{%- set mode = mode if mode is defined else 'none' %}{{ mode | tojson }}:" + CHATML
    )
    before = words.apply_chat_template(TALK[:1], tokenize=False)
    set_chat_template(words, None, {"mode": value})
    after = words.apply_chat_template(TALK[:1], tokenize=False)
    assert before == before.replace('"none":', '"none":') and before.startswith('"none":')
    assert after == json.dumps(value) + before.removeprefix('"none"')
    # A caller may still say otherwise.
    assert words.apply_chat_template(TALK[:1], tokenize=False, mode="none") == before


def test_a_template_keeps_the_newline_that_it_begins_with(words: Any) -> None:
    words.chat_template = "\n{% if mode is defined %}{{ mode }}{% endif %}" + CHATML
    set_chat_template(words, None, {"mode": "a"})
    assert words.apply_chat_template(TALK[:1], tokenize=False).startswith("\na")


def test_arguments_and_files_of_templates_that_are_wrong(words: Any, tmp_path: Any) -> None:
    words.chat_template = "{% if enable_thinking is defined %}{% endif %}" + CHATML
    with pytest.raises(
        UserError, match=r"model\.template_args\.thinking: .*it has enable_thinking$"
    ):
        set_chat_template(words, None, {"thinking": True})
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    for file, reason in (
        (broken, "is not a Jinja template: .*line 1"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(UserError, match=rf"model\.chat_template: .*{reason}"):
            set_chat_template(words, str(file), {})
    broken.write_text(" ")
    with pytest.raises(UserError, match="is empty"):
        set_chat_template(words, str(broken), {})
    words.chat_template = None
    with pytest.raises(UserError, match=r"goes with a chat template.*model\.chat_template"):
        set_chat_template(words, None, {"enable_thinking": True})


def test_the_end_of_turns_is_found(words: Any) -> None:
    eos = words.eos_token_id
    assert find_turn_end(words, {eos}) is None
    words.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    end = words.convert_tokens_to_ids("<|end|>")
    # As in Gemma: turns end with a token that is no stop of the model; and as in Phi-3, with EOS after the last one.
    for template in (
        CHATML.replace("<|im_end|>", "<|end|>"),
        CHATML.replace("<|im_end|>", "<|end|>")
        + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
    ):
        words.chat_template = template
        assert find_turn_end(words, {eos}) == end
        assert find_turn_end(words, {eos, end}) is None
    words.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert find_turn_end(words, {eos}) is None
