"""The reward `tool_calls`: the formats that models write, schemas, and BFCL's possible answers."""

import json
from typing import Any

import pytest

from tests.data_packages import read_bfcl
from tuneloop.rewards.scoring import Unverifiable, score_all
from tuneloop.rewards.structures.call_answers import build_calls, read_gold_calls
from tuneloop.rewards.tool_calls import score, write_answers

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1},
                "units": {"type": "string", "enum": ["C", "F"]},
            },
            "required": ["city"],
        },
    },
}
ADD = {
    "name": "math.add",
    "parameters": {
        "type": "dict",
        "properties": {"a": {"type": "float"}, "b": {"type": "float"}},
        "required": ["a", "b"],
    },
}
TOOLS = {"tools": [WEATHER, ADD]}
PARIS = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
SUM = {"name": "math.add", "arguments": {"a": 1, "b": 2.5}}
ONE = json.dumps([PARIS])
TWO = json.dumps([PARIS, SUM])
ARGUMENTS = json.dumps(PARIS["arguments"])
WRAPPED = json.dumps(
    {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}]}
)  # fmt: skip
FORMATS = {
    "Hermes": f"<tool_call>\n{json.dumps(PARIS)}\n</tool_call>",
    "Hermes with text": f"I look.\n<tool_call>{json.dumps(PARIS)}</tool_call> Wait.<|im_end|>",
    "Hermes after thoughts": f"<think>f(a=1)? no</think>\n<tool_call>{json.dumps(PARIS)}</tool_call>",
    "Qwen3-Coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    ),
    "Mistral": f"[TOOL_CALLS] [{json.dumps(PARIS)}]</s>",
    "Mistral with a name": f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}</s>",
    "Llama": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|eot_id|>',
    "Llama after its tag": f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}<|eom_id|>',
    "OpenAI": WRAPPED,
    "OpenAI's list": json.dumps(json.loads(WRAPPED)["tool_calls"]),
    "OpenAI's old form": json.dumps({"function_call": {"name": "get_weather", "arguments": ARGUMENTS}}),
    "a list": ONE,
    "a fenced list": f"Here:\n```json\n{ONE}\n```",
    "BFCL": "[get_weather(city='Paris', days=2)]",
    "BFCL, one call": 'get_weather(city="Paris", days=2)',
    "BFCL by position": "get_weather('Paris', 2)",
    "BFCL's JSON": json.dumps([{"get_weather": PARIS["arguments"]}]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_read_in_every_format(name: str) -> None:
    right = (1.0, {"parsed": 1.0, "valid": 1.0})
    assert score(FORMATS[name], ONE, TOOLS) == right
    assert score(FORMATS[name], ONE, {"tools": json.dumps([WEATHER])}) == right
    assert score(FORMATS[name].replace("Paris", "Rome"), ONE, TOOLS)[0] == 0.0


@pytest.mark.parametrize(
    ("completion", "parts"),
    [
        ("", (0, 0)),
        ("It is sunny in Paris.", (0, 0)),
        ("get_weather(city=input())", (0, 0)),
        ("[get_weather(city='Paris', days=2), print(a=1)]", (1, 0)),
        ("get_weather(city='Paris', city='Paris', days=2)", (0, 0)),
        (ONE + ONE, (0, 0)),
        (FORMATS["Hermes"] + FORMATS["Hermes"], (1, 1)),
        (FORMATS["Hermes"].replace("Paris", "Rome") + FORMATS["Hermes"], (1, 1)),
        ("get_weather(city='Paris')", (1, 1)),
        ("get_weather(city='Paris', days='2')", (1, 0)),
        ("get_weather(city='Paris', days=True)", (1, 0)),
        ("get_weather(city='Paris', days=2, units='C')", (1, 1)),
        ("get_weather(city='Paris', days=2, wind=True)", (1, 0)),
        ("get_climate(city='Paris', days=2)", (1, 0)),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "days": 2, "days": 3}}', (0, 0)),
        ('{"name": "get_weather", "arguments": {"city": "Paris", "days": NaN}}', (0, 0)),
        ("<tool_call>" * 500, (0, 0)),
        ("[" * 50_000, (0, 0)),
        ("f(" * 5_000 + ")" * 5_000, (0, 0)),
        ('{"a":' * 50_000, (0, 0)),
        ("[" + "get_weather(city='Paris')," * 100 + "]", (0, 0)),
    ],
)
def test_other_calls_are_wrong(completion: str, parts: tuple[float, float]) -> None:
    assert score(completion, ONE, TOOLS) == (0.0, dict(zip(("parsed", "valid"), parts)))


def test_parallel_calls_come_in_any_order_and_names_without_dots() -> None:
    calls = ["get_weather(city='Paris', days=2)", "math.add(a=1.0, b=2.5)"]
    assert score(f"[{', '.join(calls)}]", TWO, TOOLS)[0] == 1.0
    assert score("\n".join(reversed(calls)), TWO, TOOLS)[0] == 1.0
    assert score("\n".join(calls).replace("math.add", "math_add"), TWO, TOOLS)[0] == 1.0
    assert score(calls[0], TWO, TOOLS)[0] == 0.0
    assert score("\n".join([*calls, calls[0]]), TWO, TOOLS)[0] == 0.0
    llama = "; ".join(
        json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in (SUM, PARIS)
    )
    assert score(f"<|python_tag|>{llama}", TWO, TOOLS)[0] == 1.0
    overlapping = json.dumps([{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}])
    assert score("[f(x=1), f(x=2)]", overlapping, {})[0] == 1.0
    assert score("[f(x=2), f(x=2)]", overlapping, {})[0] == 0.0


def test_possible_answers_of_bfcl() -> None:
    accepted = {
        "to": ["New York", "NYC"],
        "at": ["", "9:00"],
        "seats": [[1, 2]],
        "who": [{"name": ["Al"], "age": ["", 7]}],
    }
    answer = json.dumps([{"book": accepted}])
    for call, expected in {
        "book(to='new-york', seats=[1, 2], who={'name': 'al'})": 1.0,
        "book(to='NYC', at='9:00', seats=[1, 2.0], who={'name': 'Al', 'age': 7})": 1.0,
        "book(to='NYC', seats=[2, 1], who={'name': 'Al'})": 0.0,
        "book(to='NYC', seats=[1, 2], who={'name': 'Al', 'age': 8})": 0.0,
        "book(to='NYC', seats=[1, 2])": 0.0,
        "book(to='Boston', seats=[1, 2], who={'name': 'Al'})": 0.0,
        "book(to='NYC', at='10:00', seats=[1, 2], who={'name': 'Al'})": 0.0,
        "book(to='NYC', seats=[True, 2], who={'name': 'Al'})": 0.0,
    }.items():
        assert score(call, answer, {})[0] == expected, call


def test_no_call_and_any_call() -> None:
    assert score("I cannot do that.", "[]", TOOLS)[0] == 1.0
    assert score(FORMATS["Hermes"], "[]", TOOLS)[0] == 0.0
    assert score(FORMATS["Hermes"], "", TOOLS)[0] == 1.0
    assert score("get_weather()", "", TOOLS)[0] == 0.0
    assert score("I cannot do that.", "", TOOLS)[0] == 0.0


@pytest.mark.parametrize(
    ("answer", "metadata", "reason"),
    [
        ("", {}, "metadata has no tools, and the row no answer"),
        ("Paris", TOOLS, "the answer is no JSON list of calls"),
        ("7", TOOLS, "the answer is no JSON list of calls: '7'"),
        ('{"name": "f", "arguments": "x=1"}', TOOLS, "the answer is no JSON list of calls"),
        ('[{"a": 1, "b": 2}]', TOOLS, "the answer has a call that is neither"),
        (ONE, {"tools": [{"description": "?"}]}, "metadata['tools'][0] has no name"),
        ("", {"tools": [{"name": "f", "parameters": {"type": "texts"}}]}, "the schema of the tool f is no JSON"),
    ],
)  # fmt: skip
def test_what_can_not_be_judged_is_explained(answer: str, metadata: Any, reason: str) -> None:
    with pytest.raises(Unverifiable) as caught:
        score("f()", answer, metadata)
    assert reason in str(caught.value)


@pytest.mark.parametrize("category", ["simple_python", "multiple", "parallel", "parallel_multiple"])
def test_gold_calls_of_bfcl_earn_full_marks(category: str) -> None:
    tasks = read_bfcl(category)
    rows = []
    for task in tasks:
        answer = json.dumps(task["ground_truth"])
        metadata = {"tools": task["function"]}
        common = {
            "answer": answer,
            "metadata": json.dumps(metadata),
            "reward_spec": '{"tool_calls": 1}',
        }
        calls = build_calls(read_gold_calls(answer) or [])
        python = [
            f"{c['name']}({', '.join(f'{k}={v!r}' for k, v in c['arguments'].items())})"
            for c in calls
        ]
        texts = [*write_answers(answer, metadata), f"[{', '.join(python)}]"]
        rows += [{**common, "completion": text} for text in texts]
        rows.append({**common, "completion": texts[-1].replace("(", "(surplus=1, ", 1)})
    scores = [outcome.score for outcome in score_all(rows, timeout_s=60)]
    assert len(tasks) >= 200
    assert scores == [1.0, 1.0, 1.0, 0.0] * len(tasks)
