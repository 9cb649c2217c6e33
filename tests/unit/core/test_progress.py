"""Rates count what was done now, from the first update on."""

import pytest

from tuneloop.core import progress
from tuneloop.core.progress import Progress


@pytest.mark.parametrize(
    ("begun", "done", "said"), [(0, 256, "64.0 rows/s  4 s left"), (100, 256, "39.0 rows/s  7 s")]
)
def test_the_first_line_knows_the_rate(
    begun: int,
    done: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 104.0])
    monkeypatch.setattr(progress, "EVERY_S", 0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    Progress("data_prep", 512, "rows", begun).update(done)
    assert f"data_prep: {done}/512 rows  {said}" in capsys.readouterr().err
