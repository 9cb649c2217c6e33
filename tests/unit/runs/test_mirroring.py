"""A tracker of somebody else's, named by a dotted path, whose library refuses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.runs.mirroring import Mirror
from tuneloop.runs.run_record import Run
from tuneloop.trackers import Rows, Tracker

REFUSING = f"{__name__}:RefusingTracker"
ACCEPTING = f"{__name__}:AcceptingTracker"


class QuotaExceeded(Exception):
    """What the library of a tracker raises."""


class AcceptingTracker(Tracker):
    """Takes what it is told."""

    def open_run(
        self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float
    ) -> None:
        """Take a run."""


class RefusingTracker(AcceptingTracker):
    """Refuses all rows."""

    def log_rows(self, rows: Rows) -> None:
        """Refuse."""
        raise QuotaExceeded("no room\nleft")


def test_what_the_library_of_any_tracker_refuses_is_one_line(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/x", 1)
    mirror = Mirror(Run("x", str(tmp_path)), f"{REFUSING}+there")
    with pytest.raises(UserError, match=r"^[\w.]+:RefusingTracker: 'there': no room left$"):
        mirror.update()


def test_what_the_store_lacks_is_not_the_trackers_fault(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/x", 1)
    run = Run("x", str(tmp_path))
    mirror = Mirror(run, ACCEPTING)
    Store(run.url).delete(f"{run.with_role('evaluator')[0].path}/samples.parquet")
    with pytest.raises(Corrupt, match="is missing; restore it from a copy"):
        mirror.update()
