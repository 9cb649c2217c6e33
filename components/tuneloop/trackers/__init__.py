"""Trackers, which show curves and samples of runs; one file each, found by name (docs/tracking.md).

A mirror may be killed at any point and begun again, so a tracker takes the same thing only once,
or begins its copy of the run anew.

`runs/mirroring.py` calls a tracker, in a process of its own that imports its library
(`runs/tracking.py`). What its library raises is the user's mistake, and so is a place that cannot
be written to; any other error is a bug. They are told apart by the module of the error's class,
which has to begin with the tracker's name (`runs/mirroring.py: Mirror._blame_tracker`). So a file
here has the name of its library.

Tests of all of them: `tests/unit/trackers/test_trackers.py`.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from tuneloop.core.artifacts import Manifest
from tuneloop.core.errors import UserError
from tuneloop.core.plugins import load_variant

Rows = Mapping[tuple[str, int, float], Mapping[str, float | list[dict[str, Any]]]]
"""(axis, step, Unix seconds) → name → value, or table of samples. Axes are iteration,
optimizer_step and version.

`runs/mirroring.py` makes every value a float: MLflow and TensorBoard pass over an int.
"""
EXTRAS = ("mlflow", "tensorboard", "trackio", "wandb")
"""The trackers whose library of the same name comes with an extra of tuneloop.

A new one is also an extra of ``pyproject.toml``, whose rules for ruff, mypy and import-linter name
each library or module, and of ``requirements/compile.sh``.
"""


class Tracker(Protocol):
    """One tool at an `address`; empty: the tool's own default.

    A tracker extends this class, and need not have `find_trouble`, `log_artifact` and `log_report`,
    which do nothing by default: so a method that is added here breaks no tracker of a third party.
    `find_trouble` is called before `open_run`, and all others after it. The library is imported
    from `open_run` on, as a run is started where it may be missing.
    """

    address: str

    def __init__(self, address: str) -> None:
        self.address = address

    def find_trouble(self) -> str:
        """Return which address cannot be reached just now, and why; empty if it can."""
        return ""

    def open_run(
        self,
        key: str,
        name: str,
        pipeline: str,
        settings: Mapping[str, Any],
        started: float,
    ) -> None:
        """Find or make the place of a run.

        Args:
            key: always the same 32 hexadecimal digits for the same run.
            name: the run's, which other runs may have in other stores.
            pipeline: the name of its pipeline.
            settings: dotted key → value.
            started: Unix seconds.
        """

    def log_rows(self, rows: Rows) -> None:
        """Add what is new."""

    def log_artifact(self, ref: str, manifest: Manifest) -> None:
        """Note prompts that the run was given, or a model that it has exported, by reference."""

    def log_report(self, page: str) -> None:
        """Attach the run's report, an HTML page, in place of an earlier one."""

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Write how the run stands.

        Args:
            phase: as `Run.phase`.
            ended: Unix seconds.
            notes: Markdown about its curves.

        Returns:
            Where the run is shown.
        """


def find_tracker(choice: str) -> Tracker:
    """Find the tracker ``NAME`` or ``NAME+ADDRESS``. Raises UserError if it is unknown, or its
    library is missing.
    """
    # An address may have a plus, a name has none.
    name, _, address = choice.partition("+")
    tracker: type[Tracker] = load_variant("trackers", name, "Tracker")
    if name in EXTRAS:
        spec = find_spec(name)
        # A folder ./wandb, as W&B makes one, is found as a package, too, but without an origin.
        if spec is None or spec.origin is None:
            raise UserError("tracker", name, f"is not installed; install tuneloop[{name}]")
    return tracker(address)
