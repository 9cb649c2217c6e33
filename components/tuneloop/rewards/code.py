"""Programs (Python) that pass tests. Each test runs the program in the sandbox: see `sandbox` and docs/training.md.

``metadata["tests"]`` lists the tests, of these forms:

- ``{"stdin": "1 2\\n", "stdout": "3\\n"}``: the whole program, what it prints; blanks at the end of lines do not count;
- ``{"call": "add(1, 2)", "returns": 3}``: an expression evaluated after the program, and its value;
- ``"assert add(1, 2) == 3"``: the same, where one side of ``==`` is a literal.

The expected result never enters the sandbox, so that a program cannot copy it; an assertion of another form would be
evaluated by the program under test, and is refused. ``metadata["code"]`` may hold the limits: `seconds` (of all
tests together, see `sandbox`, 4; stay below the stage's `timeout_s`), `memory_mb` (256) and `output_kb` (64)."""

import ast
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tuneloop.rewards.sandbox import Ending, Limits, check_sandbox, run_in_sandbox
from tuneloop.rewards.scoring import Escape

BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
LIMITS = {"seconds": 4.0, "memory_mb": 256, "output_kb": 64}
REASONS = ("error", "timeout", "memory", "output")

check_sandbox("rewards", "code")


@dataclass(frozen=True)
class Test:
    """One test: what goes in, and what must come out."""

    stdin: str
    call: str | None
    expected: Any

    def passed(self, ending: Ending) -> bool:
        """Return whether a program that ended so passes."""
        if ending.kind != "done":
            return False
        if self.call is None:
            return _lines(ending.stdout) == _lines(self.expected)
        try:
            return bool(_plain(ast.literal_eval(ending.result or "")) == _plain(self.expected))
        except (
            ValueError,
            SyntaxError,
            MemoryError,
            RecursionError,
        ):  # no literal, so not the expected value
            return False


def score(
    completion: str, answer: str, metadata: dict[str, Any]
) -> tuple[float, dict[str, float]] | None:
    """Return the share of tests that the program in `completion` passes, and those that ended by each of `REASONS`. The
    last fenced block is the program, else all of it. None without tests, with one of another form, or with other
    limits. Raises Escape where the program tried to get out; no further test is run."""
    tests = [_test(given) for given in metadata.get("tests") or []]
    if not tests or None in tests:
        return None
    limits = {**LIMITS, **metadata.get("code", {})}
    if limits.keys() != LIMITS.keys() or not all(
        isinstance(v, int | float) and v > 0 for v in limits.values()
    ):
        return None
    left, program = limits["seconds"], extract_code(completion)
    passed, ended = 0, Counter[str]()
    for test in filter(None, tests):
        if left <= 0:
            ended["timeout"] += 1
            continue
        most = Limits(left, int(limits["memory_mb"] * 2**20), int(limits["output_kb"] * 2**10))
        ending = run_in_sandbox(program, test.stdin, test.call, most)
        if ending.kind == "escape":
            raise Escape(ending.door)
        left -= ending.seconds
        ended[ending.kind] += 1
        passed += test.passed(ending)
    return passed / len(tests), {reason: ended[reason] / len(tests) for reason in REASONS}


def extract_code(completion: str) -> str:
    """Return the program that a completion gives.

    >>> extract_code("Sure:\\n```python\\nprint(1)\\n```\\nThat is all.")
    'print(1)\\n'
    """
    blocks: list[str] = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _test(given: Any) -> Test | None:
    if isinstance(given, str):
        return _assertion(given)
    if isinstance(given, dict) and given.keys() == {"call", "returns"}:
        return Test("", str(given["call"]), given["returns"])
    if isinstance(given, dict) and "stdout" in given and given.keys() <= {"stdin", "stdout"}:
        return Test(str(given.get("stdin", "")), None, str(given["stdout"]))
    return None


def _assertion(text: str) -> Test | None:
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        return None
    if not (
        isinstance(statement, ast.Assert) and isinstance(compared := statement.test, ast.Compare)
    ):
        return None
    if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq):
        return None
    left, right = compared.left, compared.comparators[0]
    for expected, call in ((right, left), (left, right)):
        try:
            return Test("", ast.unparse(call), ast.literal_eval(expected))
        except ValueError:
            continue
    return None


def _plain(value: Any) -> Any:
    """Turn tuples into lists, for JSON has no tuples."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return {key: _plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
