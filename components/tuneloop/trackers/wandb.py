"""Weights & Biases: an offline run below ``./wandb``, or below the address, for `wandb sync`.

Of offline runs of one id the server keeps the one synced last, so each has the whole run, and what
an earlier mirror wrote is deleted. ``WANDB_DIR`` and ``WANDB_PROJECT`` are honoured. Nothing here
goes to a server.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop import trackers


class Tracker(trackers.Tracker):
    """A directory of offline runs, ``DIRECTORY/wandb`` by ``wandb+DIRECTORY``."""

    def open_run(
        self,
        key: str,
        name: str,
        pipeline: str,
        settings: Mapping[str, Any],
        started: float,
    ) -> None:
        """Begin an offline run in place of those that have this key as their id."""
        import wandb

        root = Path(self.address or os.environ.get("WANDB_DIR") or ".").absolute()
        # W&B would write to the temporary folder if this one did not exist.
        (root / "wandb").mkdir(parents=True, exist_ok=True)
        for old_run in root.glob(f"wandb/offline-run-*-{key}"):
            # A process of W&B may still write there: under another name its files are no run.
            renamed = old_run.rename(old_run.with_name(f"deleted-{old_run.name}"))
            shutil.rmtree(renamed, ignore_errors=True)
        self.defined: set[str] = set()
        self.run = wandb.init(
            mode="offline",
            dir=root,
            id=key,
            project=os.environ.get("WANDB_PROJECT") or pipeline,
            name=name,
            config=dict(settings),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
            ),
        )

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log each row; the x of a curve is its own axis, as W&B's step counts rows."""
        for (axis, step, at), row in rows.items():
            values: dict[str, Any] = {axis: step, "_timestamp": at}
            # W&B would draw a metric that is not defined over the number of its row.
            for name, value in row.items():
                if name not in self.defined:
                    self.run.define_metric(name, step_metric=axis)
                values[name] = _make_table(value) if isinstance(value, list) else value
            self.defined |= row.keys()
            self.run.log(values)

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Finish the run, and W&B's own process, which until then may not have written it all."""
        import wandb

        self.run.notes = notes
        has_failed = phase in ("failed", "interrupted")
        self.run.finish(exit_code=int(has_failed))
        wandb.teardown()
        return f"offline; `wandb sync {Path(self.run.dir).parent}` uploads it"


def _make_table(samples: list[dict[str, Any]]) -> Any:
    """Return samples as a table of W&B.

    All of them have the columns of the first, as they are the rows of one file.
    """
    import wandb

    rows = [list(sample.values()) for sample in samples]
    return wandb.Table(columns=list(samples[0]), data=rows)
