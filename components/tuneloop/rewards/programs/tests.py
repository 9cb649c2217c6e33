"""Read the tests of a programming task from the metadata of its row.

A `Case` is one run of the program: what goes in, and the literal or the text that must come out,
which never enters the sandbox. Tests that compute (``check`` of HumanEval, ``assert`` of another
form than ``call == literal``) are a `Check`, which `checks` runs apart from the program.

The layouts of `data/layouts/code.py` write such metadata. A form that is added is read by
`read_tests`, named in `FORMS`, and documented in docs/rewards.md and in `rewards/code.py`.
"""

import ast
from dataclasses import dataclass
from typing import Any

from tuneloop.core.json_types import JsonMapping
from tuneloop.rewards.outcomes import Unverifiable
from tuneloop.rewards.sandbox import Ending

FORMS = "`tests`, `test` with `entry_point`, or `stdin_tests`"
"""The keys of the metadata, for the error that there are no tests."""


@dataclass(frozen=True)
class Case:
    """One run of the program, by `rewards/code.py: run_tests`.

    Attributes:
        stdin: what the program reads.
        call: an expression that is evaluated after the program; None: its output counts.
        expected: the value of `call`, or the output.
        may_be_first: whether the only item of `expected`, a list, is expected, too (APPS).
    """

    stdin: str
    call: str | None
    expected: Any
    may_be_first: bool = False

    def is_passed(self, ending: Ending) -> bool:
        """Return whether a program that ended so passes. It never raises, whatever the program
        printed."""
        if ending.kind != "done":
            return False
        if self.call is None:
            return _split_lines(ending.stdout) == _split_lines(self.expected)
        # What a program makes of its results may be no literal, one that cannot be built ({[1]}),
        # one that is too large or too deep, or one that is not comparable. All of these fail the
        # test.
        try:
            value = _to_lists(ast.literal_eval(ending.result or ""))
            expected = _to_lists(self.expected)
            if self.may_be_first and isinstance(expected, list) and len(expected) == 1:
                return bool(value == expected or value == expected[0])
            return bool(value == expected)
        except Exception:
            return False


@dataclass(frozen=True)
class Check:
    """Tests that are code.

    Attributes:
        source: what is defined before the statements, as the function ``check``.
        statements: each is one test, passed if it raises nothing; all of HumanEval's ``check`` is
            one.
        entry_point: the function of the program that is called ``candidate``, if there is one.
    """

    source: str
    statements: tuple[str, ...]
    entry_point: str | None = None


@dataclass(frozen=True)
class Tests:
    """The tests of a row, and what its programs need.

    Attributes:
        cases: runs of the program.
        check: tests that are code.
        prelude: code before every program, such as imports.
        prompt: the beginning of a program that a completion may continue.
        function: the function that a program has to define, if it is known.
    """

    cases: tuple[Case, ...]
    check: Check | None
    prelude: str
    prompt: str
    function: str | None

    @property
    def number(self) -> int:
        return len(self.cases) + (len(self.check.statements) if self.check else 0)


def read_tests(metadata: JsonMapping) -> Tests:
    """Read the tests in `metadata`. Raises Unverifiable: there are none, or one is of no known
    form.

    Beside ``test``, the keys ``tests`` and ``stdin_tests`` are ignored.
    """
    prelude = _get_text(metadata, "prelude")
    prompt = _get_text(metadata, "prompt")
    if metadata.get("test"):
        return _read_check(metadata, prelude, prompt)
    cases: list[Case] = []
    statements: list[str] = []
    for number, test in enumerate(_get_list(metadata, "tests")):
        case = _read_test(test)
        if case is not None:
            cases.append(case)
        elif isinstance(test, str) and _is_code(test):
            statements.append(test)
        else:
            raise Unverifiable(f"metadata['tests'][{number}] is no test: {test!r:.80}")
    function = metadata.get("fn_name") or None
    for number, test in enumerate(_get_list(metadata, "stdin_tests")):
        if not isinstance(test, dict) or not {"input", "output"} <= test.keys():
            raise Unverifiable(
                f"metadata['stdin_tests'][{number}] needs input and output: {test!r:.80}"
            )
        cases.append(_read_input_output(test, function))
    if not cases and not statements:
        raise Unverifiable(f"metadata has no tests; the reward code needs {FORMS} in it")
    check = Check(prelude, tuple(statements)) if statements else None
    return Tests(
        cases=tuple(cases),
        check=check,
        prelude=prelude,
        prompt=prompt,
        function=function,
    )


def _read_check(metadata: JsonMapping, prelude: str, prompt: str) -> Tests:
    """Read tests in the form of HumanEval: ``test`` defines ``check``, which calls ``entry_point``."""
    test = _get_text(metadata, "test")
    entry_point = metadata.get("entry_point")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise Unverifiable(
            f"metadata['entry_point'] is {entry_point!r:.80}; `test` needs the name of the function"
        )
    if not _is_code(test):
        raise Unverifiable("metadata['test'] is not Python")
    # Tests may call what the prompt defines beside the function that it begins.
    sources = [part for part in (prelude, prompt, test) if part and _is_code(part)]
    check = Check(
        source="\n\n".join(sources),
        statements=(f"check({entry_point})",),
        entry_point=entry_point,
    )
    return Tests(
        cases=(),
        check=check,
        prelude=prelude,
        prompt=prompt,
        function=entry_point,
    )


def _get_text(metadata: JsonMapping, name: str) -> str:
    value = metadata.get(name) or ""
    if not isinstance(value, str):
        raise Unverifiable(f"metadata[{name!r}] is {value!r:.80}, which is no text")
    return value


def _get_list(metadata: JsonMapping, name: str) -> list[Any]:
    value = metadata.get(name) or []
    if not isinstance(value, list):
        raise Unverifiable(f"metadata[{name!r}] is {value!r:.80}, which is no list of tests")
    return value


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def _read_test(test: Any) -> Case | None:
    """Read one of `tests`; None if it is code that computes, or no test."""
    if isinstance(test, str):
        return _read_assertion(test)
    match test:
        case {"call": call, "returns": expected, **others}:
            case = Case(
                stdin="",
                call=str(call),
                expected=expected,
            )
        case {"stdout": stdout, **others}:
            case = Case(
                stdin=str(others.pop("stdin", "")),
                call=None,
                expected=str(stdout),
            )
        case _:
            return None
    # A misspelled key would leave a test without its input.
    return None if others else case


def _read_assertion(text: str) -> Case | None:
    """Read ``assert call == literal``, or with its sides exchanged."""
    if not _is_code(text):
        return None
    match ast.parse(text.strip()).body:
        case [ast.Assert(test=ast.Compare(left=first, ops=[ast.Eq()], comparators=[second]))]:
            pass
        case _:
            return None
    # The side that is a literal is what is expected.
    for expected, call in ((second, first), (first, second)):
        try:
            return Case(
                stdin="",
                call=ast.unparse(call),
                expected=ast.literal_eval(expected),
            )
        except ValueError:
            continue
    return None


def _read_input_output(test: JsonMapping, function: str | None) -> Case:
    """Read an input and its output.

    They are text of a whole program, or arguments and result of a function, which may be the method
    of a class ``Solution``.
    """
    if function is None:
        return Case(
            stdin=_to_text(test["input"]),
            call=None,
            expected=_to_text(test["output"]),
        )
    arguments = test["input"] if isinstance(test["input"], list) else [test["input"]]
    argument_list = ", ".join(map(repr, arguments))
    callee = f"(Solution().{function} if 'Solution' in globals() else {function})"
    return Case(
        stdin="",
        call=f"{callee}({argument_list})",
        expected=test["output"],
        may_be_first=True,
    )


def _to_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _to_lists(value: Any) -> Any:
    """Turn tuples into lists, for JSON has no tuples."""
    if isinstance(value, list | tuple):
        return [_to_lists(part) for part in value]
    if isinstance(value, dict):
        return {key: _to_lists(part) for key, part in value.items()}
    return value


def _split_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
