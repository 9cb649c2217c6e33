"""Run tests that are code in a process of their own, apart from the program that they test.

A program that shared a process with its tests could change them. So a function that the tests call
is a stand-in: it notes its arguments, and returns what the program, in its own sandbox, returned
for them. The tests run once to note all calls, the program makes them, and the tests run again with
the results, which are literals and nothing else. Where later calls depend on earlier results, both
are repeated, up to `ROUNDS` times.

The reward `code` calls `run_check`. The text of `TEST_SIDE` and `PROGRAM_SIDE` runs in the sandbox,
which has the standard library alone. Neither type checks nor linters see that text: `_TestRunner`
calls its function `run_tests` by position, and `_write_calls` its function `make_calls`.
`tests/unit/rewards/test_program_tests.py` tests it.
"""

import ast
import builtins
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.programs.tests import Check
from tuneloop.rewards.sandbox import Ending, Limits, run_in_sandbox

ROUNDS = 6
"""How often the program may be asked, each time with more results known. Each round starts three
interpreters. If a call still has no result after the last round, all tests fail."""

ENCODE = '''
def encode(value):
    """Write a value as Python; floats without an end as literals."""
    if type(value) is float and value in (float("inf"), float("-inf")):
        return "1e999" if value > 0 else "-1e999"
    if type(value) is list:
        return "[" + ", ".join(map(encode, value)) + "]"
    if type(value) is tuple:
        return "(" + "".join(encode(part) + ", " for part in value) + ")"
    if type(value) in (set, frozenset) and value:
        return "{" + ", ".join(sorted(map(encode, value))) + "}"
    if type(value) is dict:
        return "{" + ", ".join(encode(k) + ": " + encode(v) for k, v in value.items()) + "}"
    return repr(value)
'''
PROGRAM_SIDE = (
    ENCODE
    + '''
def make_calls(calls, space):
    """Make calls, each written as Python; return the values, or the names of what they raised."""
    results = []
    for call in calls:
        try:
            results.append(["returned", encode(eval(call, space))])
        except Exception as error:
            results.append(["raised", type(error).__name__])
    return results
'''
)
TEST_SIDE = (
    ENCODE
    + '''
import ast, builtins, json, random


class Missing(Exception):
    """A call whose result is not known yet."""


class Tolerant(ast.NodeTransformer):
    """Have statements pass over what they raise, so that later calls are noted, too."""

    def visit_Assert(self, node):
        self.generic_visit(node)
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        return ast.Try([node], [handler], [], [])

    visit_Assign = visit_AugAssign = visit_Expr = visit_Assert
    visit_For = visit_While = visit_If = visit_With = visit_Assert


class Answers:
    """The results of the calls, taken in order. Calls that are noted but not made (for the message
    of an assertion that holds) are passed over."""

    def __init__(self, answered):
        self.answered = answered
        self.position = 0

    def take(self, call):
        for position in range(self.position, len(self.answered)):
            if self.answered[position][0] == call:
                self.position = position + 1
                return self.answered[position][1]
        raise Missing(call)


def make_stand_in(name, calls, answers):
    def stand_in(*args, **kwargs):
        named = [key + "=" + encode(value) for key, value in kwargs.items()]
        calls.append(name + "(" + ", ".join([*map(encode, args), *named]) + ")")
        kind, text = answers.take(calls[-1])
        if kind == "returned":
            return ast.literal_eval(text)
        error = getattr(builtins, text, Exception)
        is_error = isinstance(error, type) and issubclass(error, Exception)
        raise (error if is_error else Exception)("raised by the program")
    return stand_in


def run_tests(source, statements, functions, answered, is_collecting):
    calls = []
    successes = []
    missing = False
    space = {"__name__": "tests"}
    random.seed(0)
    # The names of the whole tests first, as they stand: a fault of theirs is the row's, and ends this.
    exec(compile(ast.parse(source), "<tests>", "exec"), space)
    answers = Answers(answered)
    stand_ins = {name: make_stand_in(name, calls, answers) for name in functions}
    if is_collecting:
        # Again with calls that forgive: each test is to make its calls, also after one that fails.
        tree = ast.fix_missing_locations(Tolerant().visit(ast.parse(source)))
        exec(compile(tree, "<tests>", "exec"), space)
        stand_ins = {name: forgive(function) for name, function in stand_ins.items()}
    random.seed(0)
    space.update(stand_ins)
    for statement in statements:
        try:
            exec(compile(statement, "<test>", "exec"), space)
            successes.append(True)
        except Missing:
            missing = True
            successes.append(False)
        except Exception:
            successes.append(False)
    return json.dumps({"calls": calls, "successes": successes, "missing": missing})


def forgive(function):
    def forgiving(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Missing:
            return None
    return forgiving
'''
)


class CheckResult(NamedTuple):
    """Which statements of a `Check` passed, and how the program ended."""

    successes: list[bool]
    ending: Ending


class _TestRun(NamedTuple):
    """What one run of the tests gives. The fields are the keys that `run_tests` in `TEST_SIDE`
    returns.

    Attributes:
        calls: of the program's functions, as Python.
        successes: whether each statement passed.
        missing: whether a call had no result yet.
    """

    calls: list[str]
    successes: list[bool]
    missing: bool


AnsweredCalls = list[tuple[str, list[str]]]
"""Calls, each with whether it returned or raised, and what."""


def run_check(check: Check, program: str, limits: Limits) -> CheckResult:
    """Run the tests of `check` on `program`.

    Args:
        limits: of the program, for all rounds together; all runs of the tests together have their
            time once more.

    Raises:
        Unverifiable: the tests fail, or take all their time, before they have a result of the
            program.
    """
    functions = list_functions(check)
    if not functions:
        raise Unverifiable("the tests in metadata call no function of the program")
    answered: AnsweredCalls = []
    ending = Ending("done", "")
    remaining_s = limits.seconds
    tests = _TestRunner(check, functions, limits)
    for _ in range(ROUNDS):
        collected = tests.run(answered, is_collecting=True)
        if collected is None and not answered:
            raise Unverifiable("the tests in metadata cannot be run: they fail by themselves")
        if collected is None or remaining_s <= 0:
            break
        share = replace(limits, seconds=remaining_s)
        # The program starts anew for each round, so it makes all calls again.
        ending = run_in_sandbox(program, "", _write_calls(collected.calls), share)
        remaining_s -= ending.seconds
        results = _read_results(ending, len(collected.calls))
        if results is None:
            break
        answered = list(zip(collected.calls, results))
        judged = tests.run(answered, is_collecting=False)
        if judged is None:
            break
        # Later calls may depend on results that are known only now.
        if not judged.missing:
            return CheckResult(judged.successes, ending)
    return CheckResult([False] * len(check.statements), ending)


def list_functions(check: Check) -> list[str]:
    """List the functions of the program that tests call: names that nothing else defines."""
    tree = ast.parse("\n\n".join([check.source, *check.statements]))
    defined = set(dir(builtins)) | {"__name__"}
    loaded: set[str] = set()
    for node in ast.walk(tree):
        defined.update(_list_definitions(node))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loaded.add(node.id)
    functions = loaded - defined
    if check.entry_point is not None:
        functions.add(check.entry_point)
    return sorted(functions)


def _list_definitions(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield (alias.asname or alias.name).split(".")[0]
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.ExceptHandler(name=str(name)):
            yield name


class _TestRunner:
    """Runs tests several times; all runs together have the time of `limits`."""

    def __init__(self, check: Check, functions: list[str], limits: Limits) -> None:
        self.check = check
        self.functions = functions
        self.limits = limits
        self.remaining_s = limits.seconds

    def run(self, answered: AnsweredCalls, is_collecting: bool) -> _TestRun | None:
        """Run the tests with the results that are there; None where they end or return
        otherwise."""
        if self.remaining_s <= 0:
            return None
        check = self.check
        arguments = (check.source, check.statements, self.functions, answered, is_collecting)
        share = replace(self.limits, seconds=self.remaining_s)
        ending = run_in_sandbox(TEST_SIDE, "", f"run_tests{arguments!r}", share)
        self.remaining_s -= ending.seconds
        if ending.kind != "done":
            return None
        # What the program returned decides how the tests end, and it may be made to end them badly.
        try:
            return _TestRun(**json.loads(ast.literal_eval(ending.result or "")))
        except Exception:
            return None


def _write_calls(calls: list[str]) -> str:
    """Write an expression that makes the calls with the names of the program.

    The names of `PROGRAM_SIDE` are kept apart, as the program may define the same.
    """
    calling = f"side['make_calls']({calls!r}, globals())"
    return f"(lambda side: (exec({PROGRAM_SIDE!r}, side), {calling})[1])({{}})"


def _read_results(ending: Ending, number: int) -> list[list[str]] | None:
    """Read the results of the calls; None where the program ended, or returned, otherwise."""
    if ending.kind != "done":
        return None
    try:
        results = ast.literal_eval(ending.result or "")
        texts = [[str(part) for part in result] for result in results]
    except Exception:
        return None
    is_whole = len(texts) == number and all(len(result) == 2 for result in texts)
    return texts if is_whole else None
