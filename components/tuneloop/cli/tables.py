"""Tables on a terminal. What identifies a row is shown whole; only messages are cut.

Commands and extensions print lists by it. The live table is `watch.py: draw_state`.
"""

import sys
from collections.abc import Iterable, Sequence

import typer

MIN_MESSAGE_WIDTH = 12
"""The minimum width of a message, even on a terminal that is too narrow for the names beside it."""
GAP = 2
"""Cells between two columns."""


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

    # A row is one line: rich would give a text with line breaks several.
    cells = [[" ".join(map(str.strip, text.splitlines())) for text in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    min_width = GAP * (len(columns) - 1)
    for index, name in enumerate(columns):
        width = max([cell_len(name)] + [cell_len(row[index]) for row in cells])
        min_width += min(width, MIN_MESSAGE_WIDTH) if name == cut else width
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != cut)
    for row in cells:
        # As `Text`: in a plain text rich would read square brackets as markup.
        table.add_row(*[Text(text, no_wrap=True, overflow="ellipsis") for text in row])
    console = Console()
    # In a file nothing is cut: `grep` and programs read it.
    console.width = max(console.width, min_width) if sys.stdout.isatty() else sys.maxsize
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    typer.echo("\n" + "\n".join(lines) + "\n")
