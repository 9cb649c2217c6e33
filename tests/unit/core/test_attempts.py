"""The budget of attempts: those without progress count, others are free, and no clock is looked at."""

from pathlib import Path

import pytest

from tests.unit import toy
from tuneloop.core.attempts import (
    ATTEMPT,
    LAST_END,
    MORE_MEMORY,
    RECORD,
    Record,
    admit_attempt,
    record_progress,
)
from tuneloop.core.ends import AWAY_BUDGET, BUDGET
from tuneloop.core.errors import Exhausted, UserError
from tuneloop.core.store import Store

KILLED, DELETED, OUT_OF_MEMORY = (
    "Failed 139 exit code 139",
    "Error -1 pod deleted",
    "Failed 137 main: OOMKilled (exit ",
)


class Attempts:
    """Attempts of one stage, one after another."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.store, self.patch, self.number = Store(str(directory)), patch, 0

    def next(self, last: str | None, progress: str = "") -> None:
        """Begin the next attempt, after one that ended like `last`."""
        self.number += 1
        self.patch.setenv(ATTEMPT, str(self.number))
        if last is not None:
            self.patch.setenv(LAST_END, last)
        admit_attempt(self.store, lambda: progress)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path, monkeypatch)


def test_kills_without_progress_use_up_the_budget(stage: Attempts) -> None:
    for _ in range(BUDGET.limit):
        stage.next(KILLED)
    told = r"4 attempts in a row ended without progress; the last one: killed by a signal, exit code 139 \(SIGSEGV"
    with pytest.raises(Exhausted, match=told):
        stage.next(KILLED)


def test_preemptions_are_free(stage: Attempts) -> None:
    for _ in range(168):
        stage.next(DELETED)
        stage.next("Failed 75 main: Error (exit code 75): interrupted: sft: stopped by a signal")


def test_what_is_away_for_hours_ends_a_stage(stage: Attempts) -> None:
    away = "Failed 75 exit code 75: unavailable: store: s3://bucket: error sending request"
    for _ in range(AWAY_BUDGET.limit):
        stage.next(away)
    with pytest.raises(Exhausted, match="101 attempts in a row"):
        stage.next(away)


def test_progress_gives_the_whole_budget_back(stage: Attempts) -> None:
    for step in range(20):
        stage.next(KILLED, f"{step:08d}")
    for _ in range(BUDGET.limit - 1):
        stage.next(KILLED, "19")
    stage.next(KILLED, "19")  # the first of these was another text
    with pytest.raises(Exhausted):
        stage.next(KILLED, "19")


def test_free_ends_between_do_not_give_it_back(stage: Attempts) -> None:
    with pytest.raises(Exhausted):
        for _ in range(BUDGET.limit + 1):
            stage.next(KILLED)
            stage.next(DELETED)


def test_a_job_that_says_nothing_of_its_ends_counts_them_all(stage: Attempts) -> None:
    """A JobSet starts its pods again, and they know only how often."""
    with pytest.raises(Exhausted, match="failed for now"):
        for _ in range(BUDGET.limit + 1):
            stage.next(None)


def test_a_first_attempt_leaves_nothing_and_reads_nothing(stage: Attempts) -> None:
    stage.store.put(RECORD, b"not even JSON")
    stage.number = -1
    stage.next(KILLED)
    assert stage.store.get(RECORD) == b"not even JSON"
    stage.next(KILLED)  # damaged: as if there were none
    assert b'"without_progress":1' in (stage.store.get(RECORD) or b"")


def test_a_record_of_an_earlier_session_is_not_this_ones(stage: Attempts) -> None:
    for _ in range(BUDGET.limit):
        stage.next(KILLED)
    stage.number = 0
    for _ in range(BUDGET.limit):
        stage.next(KILLED)


def test_out_of_memory_is_tried_once_with_more(
    stage: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UserError, match=r"memory: None: the last attempt ran out of memory; set a higher"
    ):
        stage.next(OUT_OF_MEMORY)
    monkeypatch.setenv(MORE_MEMORY, "8Gi")
    stage.number = 0
    stage.next(OUT_OF_MEMORY)
    with pytest.raises(UserError, match=r"memory_on_retry: '8Gi': was not enough either"):
        stage.next(OUT_OF_MEMORY)


def test_other_ends_do_not_use_up_the_attempt_with_more_memory(
    stage: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MORE_MEMORY, "8Gi")
    stage.next(DELETED)
    stage.next(DELETED)
    stage.next(OUT_OF_MEMORY)
    stage.next(DELETED)
    # What was reached since then is progress, which gives this budget back, too.
    stage.next(OUT_OF_MEMORY, "00000008")
    stage.next(KILLED, "00000008")
    with pytest.raises(UserError, match=r"memory_on_retry: '8Gi': was not enough either"):
        stage.next(OUT_OF_MEMORY, "00000008")


def test_a_server_that_answered_begins_anew(stage: Attempts) -> None:
    for _ in range(10):
        for _ in range(BUDGET.limit):
            stage.next("Failed 101 main: Error (exit code 101)")
        record_progress(stage.store)


def test_a_stage_gives_up_with_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """70, which is not tried again; the termination message says why. Once it has committed, the record is gone."""
    words = tmp_path / "words"
    words.touch()
    monkeypatch.setenv("TUNELOOP_TERMINATION_LOG", str(words))
    monkeypatch.setenv(LAST_END, KILLED)
    resume = tmp_path / "out" / "resume"
    resume.mkdir(parents=True)
    (resume / RECORD).write_text(
        Record(attempt=BUDGET.limit, without_progress=BUDGET.limit, progress="").model_dump_json()
    )
    argv = ["--checkpoint", str(tmp_path / "out")]
    monkeypatch.setenv(ATTEMPT, str(BUDGET.limit + 1))
    assert toy.sft.run(argv) == 70
    assert words.read_text().startswith("gave up: 4 attempts in a row ended without progress")
    assert "gave up: 4 attempts" in capsys.readouterr().err
    monkeypatch.setenv(ATTEMPT, "1")
    assert toy.sft.run(argv) == 0
    assert not resume.exists()
