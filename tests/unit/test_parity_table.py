"""docs/parity.md: every point once, every state of the list, every test that it names a test, and counts that are so;
and that a row without a passing test fails `make parity`."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.parity import POINTS, STATES, TABLE, Row, read_rows

ROOT = Path(__file__).parents[2]
ROWS = read_rows(TABLE.read_text())


def test_every_point_is_there_once() -> None:
    assert [row.number for row in ROWS] == [
        f"{s}.{n + 1}" for s, points in POINTS.items() for n in range(points)
    ]


def test_the_counts_are_those_of_the_rows() -> None:
    told = {
        state: int(count)
        for state, count in re.findall(r"^\| ([\w ]+) \| (\d+) \|$", TABLE.read_text(), re.M)
    }
    counted = Counter(row.state for row in ROWS)
    assert set(counted) <= set(STATES)
    assert told == {state: counted[state] for state in STATES}


@functools.cache
def functions(file: str) -> set[str]:
    """The tests that a file defines."""
    nodes = ast.parse((ROOT / file).read_text()).body
    return {
        each.name
        for each in nodes
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_a_row_names_tests_that_exist(row: Row) -> None:
    assert row.tests or row.state != "shown"
    for name in row.tests:
        file, _, test = name.partition("::")
        assert test in functions(file), name


TOY = """
import pytest

def test_good(): ...
def test_other(): ...
def test_bad(): assert False
def test_left(): pytest.skip("not here")

@pytest.mark.parametrize("case", [0, 1])
def test_cases(case):
    if case: pytest.skip("one is enough")
"""


def run(directory: Path, table: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (directory / "toy.md").write_text(table)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.parity", "--parity-table=toy.md"]
    line = [sys.executable, "-m", "pytest", "-q", *plugins, *options]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins are half of what it takes to start
    return subprocess.run(line, cwd=directory, env=env, capture_output=True, text=True)


def test_a_row_without_a_passing_test_fails(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)

    def row(number: int, state: str, *tests: str) -> str:
        return f"| 1.{number} | it does | {state} | so | {' '.join(f'`toy.py::{name}`' for name in tests)} |\n"

    good = (
        row(1, "shown", "test_good", "test_cases")
        + row(2, "in part", "test_good")
        + row(3, "not here")
    )
    done = run(tmp_path, good + row(4, "shown", "test_good", "test_other"), "-k", "not other")
    assert done.returncode == 0 and "1.1   shown    passed" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "1.4   shown    left out" in done.stdout, done.stdout
    cases = {
        "test_bad": ("test_good", "test_bad"),
        "test_left": ("test_left",),
        "it names no test": (),
    }
    done = run(
        tmp_path,
        good + "".join(row(n, "shown", *tests) for n, tests in enumerate(cases.values(), 4)),
    )
    for number, said in enumerate(cases, 4):
        assert re.search(
            rf"^1\.{number}   shown    failed: .*{said}$", done.stdout, re.MULTILINE
        ), done.stdout
    assert done.returncode == 1 and "1.1   shown    passed" in done.stdout
    assert run(tmp_path, good + row(4, "shown", "test_gone")).returncode == 4, (
        "pytest knows no such test"
    )
