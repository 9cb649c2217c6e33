"""Programs (Python) that pass tests. Each test runs the program in the sandbox: see `sandbox` and
docs/rewards.md.

The row's metadata has the tests, in one of these forms:

- ``tests``, a list of ``{"stdin": "1 2\\n", "stdout": "3\\n"}`` (the whole program, and what it
  prints; blanks at the end of lines do not count), ``{"call": "add(1, 2)", "returns": 3}`` (an
  expression that is evaluated after the program, and its value), and of lines of assertions as
  MBPP has them, ``"assert add(1, 2) == 3"``;
- ``test`` and ``entry_point``, as HumanEval has them: ``check(candidate)`` is one test;
- ``stdin_tests``, a list of ``{"input", "output"}`` as APPS, TACO and LiveCodeBench have them: text
  of a whole program, or with ``fn_name`` the arguments and the result of a function.

``prelude`` is code before every program, and ``prompt`` the beginning of a program that the
completion may continue. What is expected never enters the sandbox of the program, so that it can
neither copy nor change it: see `programs.checks` for tests that are code.

``metadata["code"]`` may hold the limits: `seconds` (of all tests together, see `sandbox`, 4; tests
that are code may take as long again themselves; stay below the stage's `timeout_s`), `memory_mb`
(256) and `output_kb` (64).

A key of the metadata is read by `rewards/programs/tests.py: read_tests` and written by
`data/layouts/code.py`; docs/rewards.md has the table of forms. Tests are
`tests/unit/rewards/test_code.py` and `test_program_tests.py`.
"""

from collections import Counter
from dataclasses import replace

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.rewards.outcomes import Escape, Unverifiable
from tuneloop.rewards.programs.checks import run_check
from tuneloop.rewards.programs.completions import complete_program
from tuneloop.rewards.programs.tests import Tests, read_tests
from tuneloop.rewards.sandbox import (
    LEAST_MEMORY,
    Ending,
    Limits,
    check_sandbox,
    run_in_sandbox,
)

LIMITS = {"seconds": 4.0, "memory_mb": 256, "output_kb": 64}
"""The limits of a row that states none. The environment `environments/python.py` has defaults of
its own, and a remote sandbox its largest values (`inference/sandbox_server.py: Program`). The
seconds stay below those of a whole call: `timeout_s` of `stages/reward.py` and
`stages/data_prep.py`, `reward_timeout_s` of `stages/evaluate.py`."""
REASONS = ("error", "timeout", "memory", "output")
"""The kinds of `Ending` whose shares the breakdown has; a kind that is added is left out without a
word. ``done`` is none of them, and ``escape`` is an outcome of its own."""

check_sandbox("rewards", "code")


def score(
    completion: str, answer: str, metadata: JsonObject
) -> tuple[float, dict[str, float]] | None:
    """Judge the program in `completion`.

    Returns:
        The share of tests that it passes, and the shares of those that ended by each of `REASONS`.

    Raises:
        Unverifiable: there are no tests, one is none, or a limit is none.
        Escape: the program tried to get out; no further test is run.
    """
    tests = read_tests(metadata)
    limits = read_limits(metadata)
    program = complete_program(completion, tests.prompt, tests.function)
    if tests.prelude:
        program = f"{tests.prelude}\n\n{program}"
    successes, endings = run_tests(program, tests, limits)
    shares = {reason: endings[reason] / tests.number for reason in REASONS}
    return successes / tests.number, shares


def run_tests(program: str, tests: Tests, limits: Limits) -> tuple[int, Counter[str]]:
    """Run all tests on a program; return how many it passes, and counts of how they ended."""
    remaining_s = limits.seconds
    successes = 0
    endings: Counter[str] = Counter()
    for case in tests.cases:
        # Later tests get no more time because earlier ones took it all.
        if remaining_s <= 0:
            endings["timeout"] += 1
            continue
        share = replace(limits, seconds=remaining_s)
        ending = run_in_sandbox(program, case.stdin, case.call, share)
        _refuse_escape(ending)
        remaining_s -= ending.seconds
        endings[ending.kind] += 1
        successes += case.is_passed(ending)
    if tests.check is None:
        return successes, endings
    if remaining_s <= 0:
        endings["timeout"] += len(tests.check.statements)
        return successes, endings
    result = run_check(tests.check, program, replace(limits, seconds=remaining_s))
    _refuse_escape(result.ending)
    endings[result.ending.kind] += len(result.successes)
    return successes + sum(result.successes), endings


def read_limits(metadata: JsonMapping) -> Limits:
    """Read the limits of a program.

    Raises:
        Unverifiable: one is unknown, or no positive number, or Python does not start in the memory.
    """
    settings = LIMITS | metadata.get("code", {})
    for name, value in settings.items():
        if name not in LIMITS:
            raise Unverifiable(f"metadata['code'] has {name!r}; its limits are {', '.join(LIMITS)}")
        if not isinstance(value, int | float) or value <= 0:
            raise Unverifiable(f"metadata['code'][{name!r}] is {value!r}, not a positive number")
    memory = int(settings["memory_mb"] * 2**20)
    if memory < LEAST_MEMORY:
        least = LEAST_MEMORY >> 20
        value = settings["memory_mb"]
        raise Unverifiable(f"metadata['code']['memory_mb'] is {value!r}; Python needs {least}")
    return Limits(
        seconds=settings["seconds"],
        memory=memory,
        output=int(settings["output_kb"] * 2**10),
    )


def _refuse_escape(ending: Ending) -> None:
    if ending.kind == "escape":
        raise Escape(ending.door)
