"""What a run's data is, by the facts of the stage `data_prep`: its layout, and how many rows.

It reads what the data source (`data/files.py`: ``recognised``) and `stages/data_prep.py` (``rows``)
leave in the facts, of earlier releases, too.
"""

from dataclasses import dataclass, field

from tuneloop.core.facts import Facts
from tuneloop.data.sizes import Split, describe_rows
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run

STAGE = "data_prep"


@dataclass(frozen=True, kw_only=True)
class PreparedData(Facts):
    """Facts of data that `data_prep` prepared.

    Attributes:
        rows: split → its number of rows.
        recognised: what was recognised, a line for each layout.
    """

    rows: dict[Split, int] = field(default_factory=dict)
    recognised: list[str] = field(default_factory=list)

    def describe_rows(self) -> str:
        """Describe in words how many rows of each kind there are; empty where that is not known."""
        return describe_rows(self.rows) if self.rows else ""


def read_prepared_data(entry: Entry) -> PreparedData | None:
    """Read the facts of an artifact of `data_prep`; None for one of any other stage."""
    return PreparedData.read(entry.manifest) if entry.manifest.stage == STAGE else None


def describe_data(run: Run) -> dict[str, str]:
    """Describe a run's data: ``data``, its layouts, and ``rows``, their number; empty where the
    facts do not state it.
    """
    data = find_prepared_data(run) or PreparedData()
    return {"data": "; ".join(data.recognised), "rows": data.describe_rows()}


def find_prepared_data(run: Run) -> PreparedData | None:
    """Find the newest data of a run; None if `data_prep` has prepared none."""
    for entry in reversed(run.entries):
        data = read_prepared_data(entry)
        if data is not None:
            return data
    return None
