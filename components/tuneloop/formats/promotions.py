"""The history of promotions of a store: names such as ``production`` for weight versions that
passed a gate.

``<store>/promoted.json`` lists all promotions, the newest last; it is only appended to, by
`runs/promotions.py`. `formats/stored_models.py` resolves ``run://NAME@promoted`` by it, and
`cluster/schedule.py` what a schedule's next run begins with.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from tuneloop.core.artifacts import load_checked_json
from tuneloop.core.store import Store

KEY = "promoted.json"

# The record of a promotion: the version that was named, and the evaluation whose results
# (`figures`) reached the minima (`least`). `runs/promotions.py` writes it. Its fields are keys of a
# file, so they are not renamed, and one that is added is `NotRequired`: older files lack it, and
# would be refused as damaged. `tuneloop promoted` prints them
# (`extensions/provenance/commands.py`).
Promotion = TypedDict(  # noqa: UP013
    "Promotion",
    {
        "name": str,
        "run": str,
        "version": int,
        "ref": str,
        "least": dict[str, float],
        "figures": dict[str, float | bool],
        "evaluation": str,
        "who": str,
        "time": FiniteFloat,
    },
)


def read_history(store: Store) -> tuple[list[dict[str, Any]], bytes | None]:
    """Read all promotions in a store.

    Returns:
        The promotions, oldest first, and the file's bytes; none and None if nothing was promoted.

    Raises:
        Corrupt: the file is damaged.
    """
    data = store.get(KEY)
    shape = {"promotions": list[Promotion]}
    history = load_checked_json(data, KEY, store.url, "restore it from a copy", shape)
    return history.get("promotions", []), data


def find_newest(
    history: Sequence[dict[str, Any]],
    name: str,
) -> dict[str, Any]:
    """Return the newest promotion of a name; an empty record if there is none."""
    for promotion in reversed(history):
        if promotion["name"] == name:
            return promotion
    return {}
