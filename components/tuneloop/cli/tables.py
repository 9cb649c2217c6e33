"""Tables on a terminal. What identifies a row is shown whole; only messages are cut."""

import shutil
import sys
from collections.abc import Iterable, Sequence

import typer

GAP = "  "
LEAST = 12
"""A message is cut to no fewer columns, also on a terminal that is too narrow for the names beside it."""


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), cut: str = ""
) -> None:
    """Print a table as wide as the terminal, or in full where the output is not a terminal.

    Args:
        columns: their headings.
        rows: one text a column.
        right: columns of numbers.
        cut: the column of messages, which gives way to the others.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    head, *lines = format_rows(columns, rows, right=right, cut=cut, width=width)
    typer.echo("\n".join(("", typer.style(head, bold=True), *lines, "")))


def format_rows(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    cut: str = "",
    width: int | None = None,
) -> list[str]:
    """Format the lines of a table: headings, a rule, the rows. Without `width` nothing is cut."""
    from rich.cells import cell_len, set_cell_size

    cells = [[" ".join(map(str.strip, text.splitlines())) for text in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells)]
    if width is not None and cut in columns:
        at = columns.index(cut)
        left = width - sum(widths) - len(GAP) * (len(widths) - 1) + widths[at]
        widths[at] = min(widths[at], max(left, LEAST))

    def line(texts: Sequence[str]) -> str:
        parts = []
        for name, text, room in zip(columns, texts, widths):
            if cell_len(text) > room:
                text = set_cell_size(text, room - 1).rstrip() + "…"
            pad = " " * (room - cell_len(text))
            parts.append(pad + text if name in right else text + pad)
        return GAP.join(parts).rstrip()

    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return [line(columns), rule, *map(line, cells)]
