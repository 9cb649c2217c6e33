"""Tables on a terminal. What identifies a row is shown whole; only messages are cut."""

import sys
from collections.abc import Iterable, Sequence

import typer

LEAST = 12
"""The minimum width of a message, even on a terminal that is too narrow for the names beside it."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    cut: str = "",
) -> None:
    """Print a table as wide as the terminal, or in full where the output is not a terminal.

    Args:
        columns: their headings.
        rows: one text for each column.
        right: columns of numbers.
        cut: the column of messages, which is shortened to make room for the others.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[" ".join(map(str.strip, text.splitlines())) for text in row] for row in rows]
    table, console = (
        Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)),
        Console(),
    )
    least = -2  # the width of the gap between two columns
    for name, *texts in zip(columns, *cells):
        width = max(map(cell_len, (name, *texts)))
        least += 2 + (min(width, LEAST) if name == cut else width)
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != cut)
    for row in cells:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in row))
    console.width = max(console.width, least) if sys.stdout.isatty() else sys.maxsize
    with console.capture() as shown:
        console.print(table)
    typer.echo("\n".join(("", *map(str.rstrip, shown.get().splitlines()), "")))
