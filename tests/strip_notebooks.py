"""Remove outputs and execution counts from notebooks; ``--check`` only says whether there are any."""

import argparse
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]


def strip(path: Path, check: bool) -> bool:
    """True if `path` carried something to remove."""
    book = nbformat.read(path, as_version=4)
    dirty = False
    for cell in book.cells:
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count):
            cell.outputs, cell.execution_count, dirty = [], None, True
    if dirty and not check:
        nbformat.write(book, path)
    return dirty


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    flags = parser.parse_args()
    dirty = [p for p in flags.files or sorted(ROOT.glob("notebooks/*.ipynb")) if strip(p, flags.check)]
    if flags.check and dirty:
        sys.exit(f"outputs in {', '.join(map(str, dirty))}; run python tests/strip_notebooks.py")
