"""KFP cannot tell 75 from 2, so the stage's own process tries again."""

import os
import signal

import pytest

from tuneloop.core.ends import AWAY_BUDGET, BUDGET
from tuneloop.core.errors import (
    EXIT_RETRY,
    FAILED_FOR_NOW,
    INTERRUPTED,
    UNAVAILABLE,
    Unavailable,
    print_diagnostic,
)
from tuneloop.kfp.retry import retry_in_process


class Program:
    """Ends in turn as it was told; its progress is how often it was run, or nothing."""

    def __init__(self, *ends: int | str, moves: bool = False) -> None:
        self.ends, self.moves, self.runs = list(ends), moves, 0

    def run(self) -> int:
        self.runs += 1
        end = self.ends.pop(0)
        return end if isinstance(end, int) else print_diagnostic(f"{end}: because", EXIT_RETRY)

    def start(self) -> int:
        return retry_in_process(self.run, lambda: str(self.runs) if self.moves else "", pause_s=0.0)


def test_a_mistake_and_a_bug_are_run_once() -> None:
    for code in (0, 1, 2):
        program = Program(code, 0)
        assert (program.start(), program.runs) == (code, 1)


def test_what_may_pass_is_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(UNAVAILABLE, FAILED_FOR_NOW, 0)
    assert (program.start(), program.runs) == (0, 3)
    assert "failed for now: retrying in 0 s" in capsys.readouterr().err


def test_the_budget_counts_ends_without_progress() -> None:
    program = Program(*[FAILED_FOR_NOW] * 20, 0)
    assert (program.start(), program.runs) == (EXIT_RETRY, BUDGET.limit + 1)
    program = Program(*[FAILED_FOR_NOW] * 20, 0, moves=True)
    assert (program.start(), program.runs) == (0, 21)
    program = Program(*[UNAVAILABLE] * 20, 0)
    assert (program.start(), program.runs) == (0, 21)
    program = Program(*[UNAVAILABLE] * 2 * AWAY_BUDGET.limit, 0)
    assert (program.start(), program.runs) == (EXIT_RETRY, AWAY_BUDGET.limit + 1), (
        "what is away is not waited for for ever"
    )


def test_a_store_that_is_away_hides_progress_and_ends_nothing() -> None:
    program = Program(UNAVAILABLE, UNAVAILABLE, 0)

    def read_progress() -> str:
        raise Unavailable("store: away")

    assert (retry_in_process(program.run, read_progress, 0.0), program.runs) == (0, 3)


def test_who_was_asked_to_end_is_not_run_again() -> None:
    program = Program(INTERRUPTED, 0)
    run = program.run

    def stopped() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return run()

    program.run = stopped  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGTERM)
    assert (program.start(), program.runs) == (EXIT_RETRY, 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    program = Program(UNAVAILABLE, 0)
    assert (program.start(), program.runs) == (EXIT_RETRY, 1)
