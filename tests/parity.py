"""The rows of docs/parity.md, and a run of exactly the tests that they name: ``pytest -p tests.parity``, `make parity`.

A row that is shown fails unless each test that it names was run and passed: one that fails, is missing or is skipped
fails the row, and with it the run. So do the tests named by rows of another state. What ``-m`` or ``-k`` leaves out is
said, and fails nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "docs" / "parity.md"
STATES = ("shown", "in part", "not here", "GPU only")
POINTS = {1: 20, 2: 7, 3: 20, 4: 11, 5: 12}
"""System → how many points it has: 70 in all."""
ROW = re.compile(r"^\| (\d+\.\d+) \|(.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/.]+\.py::\w+)`")


@dataclass(frozen=True)
class Row:
    """A point: its number, its state, and the tests that show what there is, as ``file::function``."""

    number: str
    state: str
    tests: tuple[str, ...]


def read_rows(text: str) -> list[Row]:
    """Read the rows of a table: number, what the system does, state, what is here, and what shows it."""
    found = []
    for number, rest in ROW.findall(text):
        _, state, _, shown = (cell.strip() for cell in rest.split("|"))
        found.append(Row(number, state, tuple(NAMED.findall(shown))))
    return found


@dataclass(eq=False)  # pytest wants to hash it
class Outcomes:
    """What became of the tests that were named; a test of several cases has several outcomes."""

    rows: list[Row]
    seen: dict[str, set[str]] = field(default_factory=dict)

    def add(self, node: str, outcome: str) -> None:
        self.seen.setdefault(node.partition("[")[0], set()).add(outcome)

    def judge(self) -> Iterator[tuple[Row, str]]:
        """Yield each row that names tests, with ``passed``, ``left out`` or the tests that fail it."""
        for row in self.rows:
            of = {name: self.seen.get(name, set()) for name in row.tests}
            bad = [
                name
                for name, said in of.items()
                if "failed" in said or not said & {"passed", "left out"}
            ]
            if bad or (row.state == "shown" and not of):
                yield row, f"failed: {', '.join(bad) or 'it names no test'}"
            elif of:
                yield (
                    row,
                    "left out" if any("left out" in said for said in of.values()) else "passed",
                )

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self.add(item.nodeid, "left out")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (
            report.when == "call" or not report.passed
        ):  # a set-up that fails, or skips, is all that there is
            self.add(report.nodeid, report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if any(said.startswith("failed") for _, said in self.judge()) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("points")
        for row, said in self.judge():
            terminalreporter.line(f"{row.number:5} {row.state:8} {said}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-table", type=Path, default=TABLE, help="the table whose tests are run"
    )


def pytest_configure(config: pytest.Config) -> None:
    rows = read_rows(config.getoption("--parity-table").read_text())
    config.args[:] = dict.fromkeys(name for row in rows for name in row.tests)
    config.pluginmanager.register(Outcomes(rows))
