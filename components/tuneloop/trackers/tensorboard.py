"""TensorBoard: a directory of event files for each run, below ``./tensorboard`` or the address.

The files of an earlier process that copied the same run (`tuneloop track`) are deleted, as one may
end inside a record. TensorBoard has float32, and no tables: values that are no floats are passed
over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory of event files, ``tensorboard+DIRECTORY``."""

    def open_run(
        self,
        key: str,
        name: str,
        pipeline: str,
        settings: Mapping[str, Any],
        started: float,
    ) -> None:
        """Begin a file in place of those that are there."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        root = Path(self.address or "tensorboard").absolute()
        # Two stores may have runs of the same name.
        self.directory = root / f"{name}-{key[:8]}"
        for old_file in self.directory.glob("events.*"):
            old_file.unlink()
        self.writer = EventFileWriter(str(self.directory))
        self.file = max(self.directory.glob("events.*"))

    def log_rows(self, rows: trackers.Rows) -> None:
        """Write one event for each row, and wait until all are in the file."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        # The writer would go on into a file that nobody can open any more.
        if not self.file.exists():
            message = f"{self.file} was deleted: another mirror of this run has begun"
            raise FileNotFoundError(message)
        for (_, step, at), row in rows.items():
            summary = Summary()
            for name, value in row.items():
                if isinstance(value, float):
                    summary.value.add(tag=name, simple_value=value)
            event = Event(step=step, wall_time=at, summary=summary)
            self.writer.add_event(event)
        self.writer.flush()

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Close the file; return its directory."""
        self.writer.close()
        return str(self.directory)
