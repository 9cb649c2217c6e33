"""Trackio: SQLite files below ``TRACKIO_DIR`` or, by ``trackio+DIRECTORY``, there. Rows go to its storage directly:
`trackio.init` chooses the run's id, `trackio.log` each row's time, and with a token or a Space both call the Hub."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory, in which each project is a file."""

    def _find_storage(self) -> Any:
        """Return Trackio's storage, which is one of the whole process, set to this tracker's directory."""
        from trackio import sqlite_storage, utils

        self.directory = Path(self.address or utils.TRACKIO_DIR).absolute()
        sqlite_storage.TRACKIO_DIR = self.directory
        sqlite_storage.SQLiteStorage._dataset_import_attempted = (
            True  # else it downloads what TRACKIO_BUCKET_ID names
        )
        return sqlite_storage.SQLiteStorage

    def open_run(
        self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float
    ) -> None:
        """Delete what an earlier mirror wrote of the run that has this key as its id."""
        self.project, self.key, storage = pipeline, key, self._find_storage()
        self.given: dict[str, Any] = {
            "project": pipeline,
            "run": name,
            "run_id": key,
            "config": dict(settings),
        }
        storage.init_db(
            pipeline
        )  # a file of earlier releases has no ids of runs, and would lose all of this name
        storage.delete_run(pipeline, name, key)

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log each row under an id of its own, which Trackio takes once, also of two mirrors at a time."""
        values = [
            {
                k: {"_type": "trackio.table", "_value": v} if isinstance(v, list) else v
                for k, v in row.items()
            }
            for row in rows.values()
        ]
        ids = [f"{self.key}/{axis}/{step}/{at}" for axis, step, at in rows]
        steps = [step for _, step, _ in rows]
        times = [datetime.fromtimestamp(at, UTC).isoformat() for _, _, at in rows]
        self._find_storage().bulk_log(
            metrics_list=values, steps=steps, timestamps=times, log_ids=ids, **self.given
        )

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        shown = f"`TRACKIO_DIR={quote(str(self.directory))} trackio show` shows it"
        return f"{self.directory}, project {self.project}; {shown}"
