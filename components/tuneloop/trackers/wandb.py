"""Weights & Biases: an offline run below ``./wandb``, or ``DIRECTORY/wandb`` by ``wandb+DIRECTORY``, for `wandb sync`.
Of offline runs of one id the server keeps the one synced last, so each has the whole run, and what an earlier mirror
left is deleted. ``WANDB_DIR`` and ``WANDB_PROJECT`` are honoured."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory of offline runs."""

    def open_run(
        self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float
    ) -> None:
        """Begin an offline run in place of those that have this key as their id."""
        import wandb

        root = Path(self.address or os.environ.get("WANDB_DIR") or ".").absolute()
        (root / "wandb").mkdir(
            parents=True, exist_ok=True
        )  # else W&B would write to the temporary folder
        for old in root.glob(f"wandb/offline-run-*-{key}"):
            shutil.rmtree(
                old.rename(old.with_name(f"deleted-{old.name}")), ignore_errors=True
            )  # W&B may write there
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True
        )
        self.defined, project = set[str](), os.environ.get("WANDB_PROJECT") or pipeline
        given: dict[str, Any] = {
            "dir": root,
            "id": key,
            "project": project,
            "name": name,
            "config": dict(settings),
        }
        self.run = wandb.init(mode="offline", settings=quiet, **given)

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log each row; the x of a curve is its own axis, as W&B's step counts rows."""
        import wandb

        for (axis, step, at), row in rows.items():
            values: dict[str, Any] = {axis: step, "_timestamp": at, **row}
            for name, value in row.items():
                if name not in self.defined:
                    self.run.define_metric(name, step_metric=axis)
                if isinstance(value, list):
                    values[name] = wandb.Table(
                        columns=[*value[0]], data=[[*each.values()] for each in value]
                    )
            self.defined |= row.keys()
            self.run.log(values)

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Finish the run, and W&B's own process, which until then may not have written it all."""
        import wandb

        self.run.notes = notes
        self.run.finish(exit_code=int(phase in ("failed", "interrupted")))
        wandb.teardown()
        return f"offline; `wandb sync {Path(self.run.dir).parent}` uploads it"
