"""Rates count what was done now, from the first update on."""

import pytest

from tuneloop.core import progress
from tuneloop.core.progress import Progress


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display that shows every update, the first four seconds after its start."""
    times = iter([100.0, 104.0])
    monkeypatch.setattr(progress, "EVERY_S", 0)
    monkeypatch.setattr("time.monotonic", lambda: next(times))


@pytest.mark.parametrize(
    ("begun", "done", "said"), [(0, 256, "64.0 rows/s  4 s left"), (100, 256, "39.0 rows/s  7 s")]
)
def test_the_first_line_knows_the_rate(
    begun: int,
    done: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Progress("data_prep", 512, "rows", begun).update(done)
    assert f"data_prep: {done}/512 rows  {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("earlier", "done", "line"),
    [
        (0, 0, "evaluate: 0/4 prompts"),
        (2, 2, "evaluate: 2/4 prompts"),
        (0, 4, "evaluate: 4/4 prompts  1.0 prompts/s"),
    ],
)
def test_no_time_is_left_before_one_unit_or_after_the_last(
    earlier: int,
    done: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Progress("evaluate", 4, "prompts", earlier).update(done)
    assert capsys.readouterr().err == f"{line}\n"
