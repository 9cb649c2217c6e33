"""Trackio: SQLite files below ``TRACKIO_DIR`` or the address.

Rows go to its storage directly: `trackio.init` chooses the run's id, `trackio.log` each row's time,
and with a token or a Space both call the Hub. The storage is no interface of Trackio:
``pyproject.toml`` allows one minor release, and `tests/unit/trackers/test_trackio.py` is to pass
before it allows the next.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory in which each project is a file, ``trackio+DIRECTORY``."""

    def _find_storage(self) -> Any:
        """Return Trackio's storage, which is one of the whole process, set to this tracker's
        directory.
        """
        from trackio import sqlite_storage, utils

        self.directory = Path(self.address or utils.TRACKIO_DIR).absolute()
        sqlite_storage.TRACKIO_DIR = self.directory
        # Otherwise it downloads what TRACKIO_BUCKET_ID names.
        sqlite_storage.SQLiteStorage._dataset_import_attempted = True
        return sqlite_storage.SQLiteStorage

    def open_run(
        self,
        key: str,
        name: str,
        pipeline: str,
        settings: Mapping[str, Any],
        started: float,
    ) -> None:
        """Delete what an earlier mirror wrote of the run that has this key as its id."""
        self.key = key
        self.name = name
        self.project = pipeline
        self.settings = dict(settings)
        storage = self._find_storage()
        # A file of earlier releases has no ids of runs: deleting would lose all runs of this name.
        storage.init_db(pipeline)
        storage.delete_run(pipeline, name, key)

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log each row under an id of its own, which Trackio takes once, also of two mirrors at a
        time.
        """
        # A row has one time, and no two rows have the same axis, step and time.
        metrics: list[dict[str, Any]] = []
        steps: list[int] = []
        times: list[str] = []
        ids: list[str] = []
        for (axis, step, at), row in rows.items():
            metrics.append({name: _encode_value(value) for name, value in row.items()})
            steps.append(step)
            times.append(datetime.fromtimestamp(at, UTC).isoformat())
            ids.append(f"{self.key}/{axis}/{step}/{at}")
        self._find_storage().bulk_log(
            project=self.project,
            run=self.name,
            run_id=self.key,
            config=self.settings,
            metrics_list=metrics,
            steps=steps,
            timestamps=times,
            log_ids=ids,
        )

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Return the directory and the project, and how to show them; Trackio keeps no state of a
        run.
        """
        command = f"`TRACKIO_DIR={quote(str(self.directory))} trackio show` shows it"
        return f"{self.directory}, project {self.project}; {command}"


def _encode_value(value: Any) -> Any:
    """Return a value as Trackio's storage takes it: a table is an object with its type."""
    if isinstance(value, list):
        return {"_type": "trackio.table", "_value": value}
    return value
