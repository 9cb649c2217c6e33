"""How many rows each split gets, where the user does not say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["eval", "sft_eval", "sft", "preference_eval", "preference", "train"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""The splits, in the order in which they take rows from a source that they share."""
HELD_OUT: dict[Split, Split] = {
    "eval": "train",
    "sft_eval": "sft",
    "preference_eval": "preference",
}
"""Held-out split → the one whose rows it is taken from."""
MADE_TO_ORDER: dict[Split, int] = {
    "eval": 256,
    "sft_eval": 0,
    "sft": 2000,
    "preference_eval": 0,
    "preference": 0,
    "train": 10_000,
}
"""Rows of a source that makes as many as are asked for."""
MOST_HELD_OUT = 256
HELD_OUT_SHARE = 0.05
FEWEST_ROWS = 20
"""Rows from which on at least one is held out."""


@dataclass(frozen=True)
class Size:
    """How many rows a split gets: `number`, or all that remain where it is None. `is_exact`: fewer
    are an error, as the user set the number."""

    number: int | None
    is_exact: bool = False


def choose_sizes(
    wanted: Mapping[Split, int | None], rows: int | None, own: frozenset[str], is_endless: bool
) -> dict[Split, Size]:
    """Choose the size of each split.

    Args:
        wanted: what the user set; None: by default.
        rows: how many rows the source has; None: unknown.
        own: splits with a table of their own, of which all rows are taken.
        is_endless: whether the source makes as many rows as are asked for.
    """
    sizes: dict[Split, Size] = {}
    for split in SPLITS:
        number = wanted[split]
        if number is not None or is_endless:
            size = MADE_TO_ORDER[split] if number is None else number
            sizes[split] = Size(size, is_exact=split != "train")
        elif split in HELD_OUT and split not in own:
            sizes[split] = Size(_choose_held_out(split, wanted, rows))
        else:
            sizes[split] = Size(None)
    return sizes


def count_wanted(wanted: Mapping[Split, int | None]) -> int:
    """Count the rows of all splits of a source that makes as many as are asked for."""
    return sum(
        MADE_TO_ORDER[split] if number is None else number for split, number in wanted.items()
    )


def count_held_out(rows: int | None) -> int:
    """Count the rows that are held out of so many: 5 %, at most 256."""
    if rows is None:
        return MOST_HELD_OUT
    if rows < FEWEST_ROWS:
        return 0
    return max(1, min(MOST_HELD_OUT, int(rows * HELD_OUT_SHARE)))


def _choose_held_out(split: Split, wanted: Mapping[Split, int | None], rows: int | None) -> int:
    """Choose how many rows are held out: demonstrations and pairs are a share of those that the user
    asked for, and prompts, which are asked for by themselves, of all rows."""
    used = wanted[HELD_OUT[split]]
    if split == "eval" or used is None:
        return count_held_out(rows)
    return count_held_out(used)
