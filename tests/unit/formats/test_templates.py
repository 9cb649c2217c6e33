"""Chat templates of model families, as TRL ships them, with the tokenizer of SmolLM2: every turn of the assistant is a
target, in the context that the template shows at that point, or one line says why it cannot be."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from jinja2 import TemplateError
from transformers import AutoTokenizer

from tuneloop.core.errors import UserError
from tuneloop.formats.tokens import (
    encode_answer,
    encode_conversation,
    encode_prompt,
    encode_reply,
)

FOLDER = Path(trl.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
"""All templates of TRL but those that it changed for training."""
SPELLED = re.compile(
    r"<[|｜][^<>\s{}'\"+]{1,40}[|｜]>|<(?:start|end)_of_(?:turn|utterance)>|<turn\|>|<\|turn>|\[gMASK\]|<sop>|</s>"
    r"|<\|tool_response>|<tool_response\|>|<channel\|>|<\|channel>"
)
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma4": ["<eos>", "<turn|>", "<|tool_response>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "smolvlm": ["<end_of_utterance>"],
    "llama3": ["<|eot_id|>"],
    "llava_next": ["</s>"],
    "muse_glimmer": ["<|eot|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "": ["<|im_end|>"],
}
"""Beginning of a template's name → EOS, and the other stops of its models' generation_config.json."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "the city"}},
                "required": ["city"],
            },
        },
    }
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


def result(content: str, number: int = 1) -> dict[str, Any]:
    name = {"tool_call_id": f"call{number}", "name": "get_weather"}
    return {"role": "tool", "content": content, **name}


SYSTEM = {"role": "system", "content": "Be brief please"}
TALK = [user("Hi there"), assistant("Hello you")]
FORMS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "one turn": (TALK, False),
    "several turns": (
        [*TALK, user("And now"), assistant("Bye bye"), user("so"), assistant("End")],
        False,
    ),
    "system": ([SYSTEM, *TALK], False),
    "developer": ([{**SYSTEM, "role": "developer"}, *TALK], False),
    "tools": (
        [
            user("Weather?"),
            assistant("", tool_calls=[call({"city": "Paris"})]),
            result("sunny 20"),
            assistant("It is sunny"),
        ],
        True,
    ),
    "content null, arguments as text": (
        [user("Weather?"), assistant(None, tool_calls=[call('{"city": "Paris"}')])],
        True,
    ),
    "parts": (
        [
            user([{"type": "text", "text": "Hi there"}]),
            assistant([{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]),
        ],
        False,
    ),
    "reasoning": (
        [
            user("Hi there"),
            assistant("Hello you", reasoning_content="greet back"),
            user("And now"),
            assistant("Bye bye", reasoning_content="leave now"),
        ],
        False,
    ),
    "parallel calls": (
        [
            user("Weather?"),
            {
                "role": "assistant",
                "tool_calls": [call({"city": "Paris"}), call({"city": "Rome"}, 2)],
            },
            result("sunny 20"),
            result("rain 10", 2),
            assistant("It depends"),
        ],
        True,
    ),
    "weight 0": (
        [user("Hi there"), assistant("Hello you", weight=0), user("And now"), assistant("Bye bye")],
        False,
    ),
}
WITHOUT_TOOLS = {
    *(
        "cohere",
        "cohere2",
        "deepseek_r1_distill",
        "deepseekv3",
        "gemma",
        "gemma3",
        "idefics3",
        "llama3",
    ),
    *("llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
"""Templates that render no tools."""
REFUSED = {
    **{
        (name, form): "does not render tools"
        for name in WITHOUT_TOOLS
        for form in FORMS
        if FORMS[form][1]
    },
    **{("lfm2", form): "does not render all tool calls" for form in FORMS if FORMS[form][1]},
    **{
        (name, "reasoning"): r"leaves out the reasoning of this turn; set data\.reasoning=drop"
        for name in ("gemma4", "gemma4_v3", "gemma4_v4")
    },
    ("qwen3_5_nothink", "reasoning"): r"its arguments may turn reasoning off.*data\.reasoning=drop",
    ("gptoss", "parallel calls"): "does not render all tool calls",
    ("llama3_1", "parallel calls"): "only supports single tool-calls",
    ("llama3_2", "parallel calls"): "only supports single tool-calls",
    ("gemma", "system"): "System role not supported",
    ("gemma", "developer"): "Conversation roles must alternate",
}
"""What a template cannot do, by (name, form of conversation)."""


@pytest.fixture(scope="module")
def words(smollm2: Path) -> Any:
    """SmolLM2's tokenizer with the control tokens of all templates."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    spelled = {token for name in NAMES for token in SPELLED.findall(read_source(name))}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(spelled)})
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    return tokenizer


def read_source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def set_family(tokenizer: Any, name: str) -> list[int]:
    """Give the tokenizer the template and EOS of a family; return the ids that end its completions."""
    stops = next(stops for beginning, stops in STOPS.items() if name.startswith(beginning))
    tokenizer.chat_template = read_source(name)
    tokenizer.eos_token = stops[0]
    return [tokenizer.convert_tokens_to_ids(token) for token in stops]


def as_template_reads(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reference's messages: what a user of transformers would give to this template."""
    source = read_source(name)
    adapted = []
    for message in messages:
        message = {
            key: value
            for key, value in message.items()
            if key not in ("weight", "reasoning_content")
        }
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        reasoning = next(
            (m.get("reasoning_content") for m in messages if m.get("content") == content), None
        )
        if reasoning:
            keys = [
                key
                for key in ("reasoning_content", "thinking", "reasoning")
                if re.search(rf"\b{key}\b", source)
            ]
            message |= dict.fromkeys(keys, reasoning)
            text = text if keys else f"<think>\n{reasoning}\n</think>\n\n{text}"
        if "tool_calls" in message:
            functions = [made["function"] for made in message["tool_calls"]]
            message["tool_calls"] = [
                {**made, "function": {**function, "arguments": parse(function["arguments"])}}
                for made, function in zip(message["tool_calls"], functions)
            ]
        wants_parts = name in ("idefics3", "smolvlm", "llava_next")
        message["content"] = [{"type": "text", "text": text}] if wants_parts else text
        adapted.append(message)
    return adapted


def parse(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def shows_developer(tokenizer: Any, messages: list[dict[str, Any]]) -> bool:
    """Whether a template renders a message of the role developer, which begins the conversation."""
    try:
        return "Be brief please" in tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, TypeError):
        return False


def build_reference(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, trained: list[int], stops: list[int]
) -> list[tuple[list[int], list[bool]]]:
    """Render the prefix before and after each trained turn; what is added, up to its end, is the target. A turn goes on
    with the document before it if its prompt begins with that text."""
    stop_tokens = [tokenizer.convert_ids_to_tokens(stop) for stop in stops]
    documents: list[list[tuple[str, bool]]] = []
    for number in trained:
        prompt, whole = (
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompted
            )
            for count, prompted in ((number, True), (number + 1, False))
        )
        if whole.startswith(prompt):
            added = whole[len(prompt) :]
        else:
            assert prompt.endswith("<think>\n"), "the template does not continue its own prompt"
            begun = prompt.removesuffix("<think>\n")
            assert whole.startswith(begun)
            rest = whole.removeprefix(begun)
            thought = re.match(r"<think>\n(.*)\n</think>", messages[number]["content"])
            spoken = (thought[1] if thought else "") + "\n</think>\n\n" + rest.lstrip()
            added = rest.removeprefix("<think>") if rest.startswith("<think>") else spoken
        ends = [added.index(token) + len(token) for token in stop_tokens if token in added]
        target = added[: min(ends)] if ends else added
        before = "".join(text for text, _ in documents[-1]) if documents else None
        if before is not None and prompt.startswith(before):
            between = prompt.removeprefix(before)
            documents[-1] += [(between, False), (target, True)]
            if not is_ended_by(documents[-1][-3][0], stop_tokens):
                # The next message's first token ends the turn: it is a target of the turn before.
                first = next(token for token in stop_tokens if between.startswith(token))
                documents[-1][-2:] = [
                    (first, True),
                    (between.removeprefix(first), False),
                    (target, True),
                ]
        else:
            documents.append([(prompt, False), (target, True)])
    return [close_reference(tokenizer, document, stop_tokens) for document in documents]


def is_ended_by(text: str, tokens: list[str]) -> bool:
    return any(text.endswith(token) for token in tokens)


def close_reference(
    tokenizer: Any, document: list[tuple[str, bool]], stop_tokens: list[str]
) -> tuple[list[int], list[bool]]:
    """Encode a document piece by piece; the last target ends with EOS if it has no other stop."""
    ids: list[int] = []
    mask: list[bool] = []
    if not is_ended_by(document[-1][0], stop_tokens):
        document = [*document, (tokenizer.eos_token, True)]
    for text, is_target in document:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [is_target] * len(piece)
    return ids, mask


def learned(tokenizer: Any, document: tuple[list[int], list[bool]]) -> str:
    ids, mask = document
    return tokenizer.decode([token for token, wanted in zip(ids, mask) if wanted])


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_those_of_rendered_prefixes(words: Any, name: str) -> None:
    stops = set_family(words, name)
    for form, (messages, with_tools) in FORMS.items():
        tools = TOOLS if with_tools else None
        text = json.dumps(messages)
        if (name, form) in REFUSED:
            with pytest.raises(UserError, match=REFUSED[name, form]) as raised:
                encode_conversation(words, text, tools, stops=stops)
            assert "\n" not in str(raised.value), form
            continue
        documents = encode_conversation(words, text, json.dumps(tools), stops=stops)
        trained = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight") != 0
        ]
        adapted = as_template_reads(name, messages)
        if form == "developer" and not shows_developer(words, adapted):
            adapted[0]["role"] = "system"
        reference = build_reference(words, adapted, tools, trained, stops)
        shown = [learned(words, document) for document in documents]
        assert documents == reference, (form, shown, [learned(words, d) for d in reference])
        # Each turn, its text once, and its end.
        whole = "".join(shown)
        for number in trained:
            content = messages[number].get("content") or ""
            assert (
                whole.count(content if isinstance(content, str) else "Hello\nyou") == 1
                or not content
            )
        assert all(
            is_ended_by(text, [words.convert_ids_to_tokens(stop) for stop in stops])
            for text in shown
        )


def test_the_native_template_of_the_pretrained_model(smollm2: Path) -> None:
    """SmolLM2's own: it shows any role, and no tools."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    stops = [tokenizer.eos_token_id]
    for form in ("one turn", "several turns", "system", "developer", "weight 0"):
        messages, _ = FORMS[form]
        trained = [
            i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0
        ]
        cleaned = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
        reference = build_reference(tokenizer, cleaned, None, trained, stops)
        assert encode_conversation(tokenizer, json.dumps(messages)) == reference
    messages, _ = FORMS["tools"]
    with pytest.raises(UserError, match="does not render all tool calls"):
        encode_conversation(tokenizer, json.dumps(messages))


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_trains_what_a_conversation_of_one_turn_does(words: Any, name: str) -> None:
    stops = set_family(words, name)
    prompt = json.dumps([user("Hi there")])
    pair = encode_answer(words, prompt, "Hello you", stops=stops)
    assert [pair] == encode_conversation(words, json.dumps(TALK), stops=stops)
    ids, mask = pair
    sampled_from = encode_prompt(words, prompt, True)
    assert ids[: len(sampled_from)] == sampled_from
    assert mask == [False] * len(sampled_from) + [True] * (len(ids) - len(sampled_from))
    assert ids[-1] in stops


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_of_an_environment_is_what_the_template_puts_there(words: Any, name: str) -> None:
    """For a policy that says no reasoning, no template is in the way."""
    stops = set_family(words, name)
    messages = as_template_reads(name, [*TALK, user("And now")])
    prompt = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    after = prompt.rpartition("Hello you")[2]
    reply = encode_reply(words, "And now", True, "user", stops, turn="Hello you", last=stops[-1])
    text = words.decode(reply)
    assert "And now" in text and "Hello" not in text
    assert after.endswith(text) and len(after) - len(text) <= len(
        "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    )
    assert words.encode(after, add_special_tokens=False)[-len(reply) :] == reply


def test_no_file_of_trl_is_left_out() -> None:
    assert len(NAMES) >= 41 and len(NAMES) * len(FORMS) - len(REFUSED) >= 359
    assert {name for name, _ in REFUSED} <= set(NAMES)
    assert os.path.isdir(FOLDER)
