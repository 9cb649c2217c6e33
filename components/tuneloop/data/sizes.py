"""The splits of data, and how many rows each gets where the user does not say it.

The tables below have a row for each split; `tuneloop.data` names the tables elsewhere. The numbers
are stated by docs/data.md and the options of `stages/data_prep.py`, too. A source has at most one
held-out split: `describe_rows` inverts `HELD_OUT`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["eval", "sft_eval", "sft", "preference_eval", "preference", "train"]
SPLITS: tuple[Split, ...] = get_args(Split)
"""The splits. Those with a number take rows from a source that they share in this order
(`data/splitting.py: Router._list_order`), so another order gives every split other rows.
`training/pairs.py: SPLITS` is another list: the splits with pairs."""
HELD_OUT: dict[Split, Split] = {
    "eval": "train",
    "sft_eval": "sft",
    "preference_eval": "preference",
}
"""Held-out split → the one whose rows it is taken from. `data/splitting.py` fills these first and
lets them grow, and `describe_rows` counts them beside the other."""
MADE_TO_ORDER: dict[Split, int] = {
    "eval": 256,
    "sft_eval": 0,
    "sft": 2000,
    "preference_eval": 0,
    "preference": 0,
    "train": 10_000,
}
"""Split → its rows by default, of a source that makes as many as are asked for. Pairs are 0, which
`pipelines/dpo.py: DEMO_SIZES` replaces for digits."""
MOST_HELD_OUT = 256
"""The most rows of a file that are held out: the mean of 256 right or wrong answers has a standard
error of about 3 %."""
HELD_OUT_SHARE = 0.05
"""The share of a file's rows that is held out, up to `MOST_HELD_OUT` rows."""
FEWEST_ROWS = 20
"""Rows from which on at least one is held out."""

ROW_NOUNS: dict[Split, str] = {
    "train": "prompt",
    "sft": "demonstration",
    "preference": "pair",
}
"""Split → what one of its rows is called, in the order in which `describe_rows` lists them.
Held-out splits have the noun of theirs in `HELD_OUT`."""

WantedRows = Mapping[Split, int | None]
"""Split → rows that the user asked for; None: by default."""


@dataclass(frozen=True)
class Size:
    """How many rows a split gets.

    Attributes:
        number: of rows; None: all that remain.
        is_exact: whether fewer rows are an error of `data/preparation.py: check_sizes`, since the
            user or `MADE_TO_ORDER` has set the number. A held-out split that is not exact also
            takes further rows of its prompts.
    """

    number: int | None
    is_exact: bool = False


def choose_sizes(
    requested: WantedRows, rows: int | None, separate: frozenset[str], is_endless: bool
) -> dict[Split, Size]:
    """Choose the size of each split.

    Args:
        requested: rows that the user asked for by split.
        rows: how many rows the source has; None: unknown.
        separate: splits with a table of their own, of which all rows are taken by default.
        is_endless: whether the source makes as many rows as are asked for.
    """
    sizes: dict[Split, Size] = {}
    for split in SPLITS:
        number = requested[split]
        if number is None and is_endless:
            number = MADE_TO_ORDER[split]
        if number is not None:
            # Of prompts to train on, fewer than were asked for are enough: epochs repeat them.
            sizes[split] = Size(number, is_exact=split != "train")
        elif split in HELD_OUT and split not in separate:
            sizes[split] = Size(_choose_held_out(split, requested, rows))
        else:
            sizes[split] = Size(None)
    return sizes


def count_wanted(requested: WantedRows) -> int:
    """Count the rows of all splits of a source that makes as many as are asked for: the argument
    `n` of its ``load_splits``. Files take no notice of it."""
    return sum(
        MADE_TO_ORDER[split] if number is None else number for split, number in requested.items()
    )


def count_held_out(rows: int | None) -> int:
    """Count the rows that are held out by default.

    Args:
        rows: of which a share is held out; None: unknown, so the most are held out.
    """
    if rows is None:
        return MOST_HELD_OUT
    if rows < FEWEST_ROWS:
        return 0
    return max(1, min(MOST_HELD_OUT, int(rows * HELD_OUT_SHARE)))


def _choose_held_out(split: Split, requested: WantedRows, rows: int | None) -> int:
    """Choose how many rows are held out: demonstrations and pairs are a share of those that the
    user asked for, and prompts, which are asked for by themselves, of all rows."""
    used = requested[HELD_OUT[split]]
    if split == "eval" or used is None:
        used = rows
    return count_held_out(used)


def describe_rows(rows: Mapping[Split, int]) -> str:
    """Describe how many rows splits have, such as ``57 demonstrations, 3 held out``.

    What there is none of is left out; ``no rows`` if there are none at all."""
    held_out_split = {source: held_out for held_out, source in HELD_OUT.items()}
    parts: list[str] = []
    for split, noun in ROW_NOUNS.items():
        number = rows.get(split, 0)
        held_out = rows.get(held_out_split[split], 0)
        if number:
            parts.append(f"{number:,} {_pluralize(noun, number)}")
            if held_out:
                parts[-1] += f", {held_out:,} held out"
        elif held_out:
            parts.append(f"{held_out:,} held-out {_pluralize(noun, held_out)}")
    return "; ".join(parts) or "no rows"


def _pluralize(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"
