"""Programming tasks with tests, in the forms that the reward `code` reads.

The metadata is read by `rewards/programs/tests.py: read_tests`. A key that it does not know is
ignored without a word, so another form of tests is added there first.
"""

from typing import Any

from tuneloop.core.json_types import JsonObject
from tuneloop.data import BadValue, Example
from tuneloop.data.columns import MISSING, get_path
from tuneloop.data.layouts import Layout, Values
from tuneloop.data.layouts._parts import (
    fence_program,
    get_optional_text,
    get_text_of,
    parse_list,
)
from tuneloop.data.messages import parse_text

CODE = {"code": 1.0}
"""The reward of these layouts, and its weight."""


def read_humaneval(values: Values) -> Example:
    """Read HumanEval: the program is the prompt and what follows it; ``check`` tests it."""
    prompt = get_text_of(values, "prompt")
    program = prompt + get_text_of(values, "canonical_solution")
    metadata = {
        "prompt": prompt,
        "test": get_text_of(values, "test"),
        "entry_point": get_text_of(values, "entry_point"),
    }
    return Example(prompt, program, fence_program(program), metadata=metadata)


def read_mbpp(values: Values) -> Example:
    """Read MBPP. The prompt shows the tests, as in its authors' paper: only they name the function."""
    # The column of the task is called otherwise in the sanitized version of the data set.
    column = "text" if values.get("text") else "prompt"
    tests = parse_list(values.get("test_list"), "test_list")
    if not tests or not all(isinstance(test, str) for test in tests):
        raise BadValue("column 'test_list' must hold assertions")
    listed = "\n".join(tests)
    prompt = f"{get_text_of(values, column)}\nYour code should pass these tests:\n\n{listed}\n"
    program = get_text_of(values, "code")
    setup = get_optional_text(values, "test_setup_code")
    prelude = "\n".join(values.get("test_imports") or [])
    if setup.strip():
        prelude = f"{prelude}\n{setup}" if prelude else setup
    metadata: JsonObject = {"tests": tests}
    if prelude:
        metadata["prelude"] = prelude
        program = f"{prelude}\n\n{program}"
    return Example(prompt, program, fence_program(program), metadata=metadata)


def read_apps(values: Values) -> Example:
    """Read APPS and TACO: inputs and outputs as JSON text, of a whole program or of a function."""
    cases = values.get("input_output")
    if isinstance(cases, str):
        cases = parse_text(cases, "column 'input_output'")
    if not isinstance(cases, dict):
        raise BadValue("column 'input_output' must hold inputs and outputs")
    inputs = cases.get("inputs")
    outputs = cases.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise BadValue("column 'input_output' has no inputs and outputs")
    if len(inputs) != len(outputs):
        raise BadValue(f"has {len(inputs)} inputs and {len(outputs)} outputs")
    tests = [{"input": text, "output": expected} for text, expected in zip(inputs, outputs)]
    metadata: JsonObject = {"stdin_tests": tests}
    # With a name, inputs are the arguments of a function, and else what a program reads.
    if cases.get("fn_name"):
        metadata["fn_name"] = cases["fn_name"]
    solutions = values.get("solutions")
    programs = parse_list(solutions, "solutions") if solutions else []
    prompt = _ask(get_text_of(values, "question"), get_optional_text(values, "starter_code"))
    return _make_task(prompt, programs[0] if programs else None, metadata)


def read_livecodebench(values: Values) -> Example:
    """Read LiveCodeBench: its public tests, and the private ones where they are JSON. It packs
    these as a pickle, which would run code of its author's here, and is not opened."""
    tests: list[JsonObject] = []
    for column in ("public_test_cases", "private_test_cases"):
        text = values.get(column)
        if isinstance(text, str) and not text.lstrip().startswith("["):
            continue
        tests += parse_list(text, column) if text else []
    if not tests or not all(isinstance(test, dict) for test in tests):
        raise BadValue("column 'public_test_cases' has no tests")
    metadata: JsonObject = {}
    has_metadata = bool(str(values.get("metadata") or "").strip())
    name = get_path(values, "metadata.func_name") if has_metadata else None
    if name and name is not MISSING:
        metadata["fn_name"] = name
    is_call = "fn_name" in metadata
    metadata["stdin_tests"] = [_convert_case(test, is_call) for test in tests]
    question = get_text_of(values, "question_content")
    prompt = _ask(question, get_optional_text(values, "starter_code"))
    return _make_task(prompt, None, metadata)


def _convert_case(test: JsonObject, is_call: bool) -> JsonObject:
    """Return a test of LiveCodeBench in the form of ``stdin_tests``.

    Args:
        is_call: whether a function is tested: then the input has its arguments as JSON values, one
            a line, and the output is a JSON value.
    """
    text = test.get("input")
    expected = test.get("output")
    if not isinstance(text, str) or not isinstance(expected, str):
        raise BadValue("has a test without the text of its input and output")
    if not is_call:
        return {"input": text, "output": expected}
    lines = [line for line in text.splitlines() if line.strip()]
    arguments = [parse_text(line, "the input of a test") for line in lines]
    return {"input": arguments, "output": parse_text(expected, "the output of a test")}


def _ask(question: str, starter: str) -> str:
    """Return a task as a prompt, with the code that the answer has to begin with."""
    if not starter.strip():
        return question
    return f"{question}\n\nUse this starter code:\n{fence_program(starter)}"


def _make_task(prompt: str, program: Any, metadata: JsonObject) -> Example:
    """Make an example of a task; `program` is a solution of its author's, None where there is none.
    Raises BadValue: it is no text."""
    if program is None:
        return Example(prompt, None, metadata=metadata)
    if not isinstance(program, str) or not program.strip():
        raise BadValue("column 'solutions' has a solution that is no program")
    return Example(prompt, program, fence_program(program), metadata=metadata)


LAYOUTS = (
    Layout(
        name="humaneval",
        title="HumanEval",
        columns=("prompt", "canonical_solution", "test", "entry_point"),
        read=read_humaneval,
        summary="prompt from prompt, tests from test and entry_point",
        rewards=CODE,
    ),
    Layout(
        name="mbpp",
        title="MBPP",
        columns=("code", "test_list"),
        read=read_mbpp,
        summary="prompt from text and test_list, tests from test_list",
        rewards=CODE,
    ),
    Layout(
        name="apps",
        title="APPS or TACO",
        columns=("question", "solutions", "input_output"),
        read=read_apps,
        summary="prompt from question, tests from input_output, demonstration from solutions",
        rewards=CODE,
    ),
    Layout(
        name="livecodebench",
        title="LiveCodeBench",
        columns=("question_content", "public_test_cases"),
        read=read_livecodebench,
        summary="prompt from question_content, tests from public_test_cases",
        rewards=CODE,
    ),
)
