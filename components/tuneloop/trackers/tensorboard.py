"""TensorBoard: a directory of event files for each run, below ``./tensorboard`` or, by ``tensorboard+DIRECTORY``,
there. An earlier mirror's files are deleted, as one may end inside a record. TensorBoard has float32, and no tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory of event files."""

    def open_run(
        self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float
    ) -> None:
        """Begin a file in place of those that are there."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.directory = Path(self.address or "tensorboard").absolute() / f"{name}-{key[:8]}"
        for old in self.directory.glob("events.*"):
            old.unlink()
        self.writer = EventFileWriter(str(self.directory))
        self.file = max(self.directory.glob("events.*"))

    def log_rows(self, rows: trackers.Rows) -> None:
        """Write one event for each row, and wait until all are in the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if not self.file.exists():
            raise FileNotFoundError(
                f"{self.file} was deleted: another mirror of this run has begun"
            )
        for (_, step, at), row in rows.items():
            values = [
                Summary.Value(tag=k, simple_value=v) for k, v in row.items() if isinstance(v, float)
            ]
            self.writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=values)))
        self.writer.flush()

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        self.writer.close()
        return str(self.directory)
