"""Notebooks carry no outputs, and run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.strip_notebooks import strip
from tests.waiting import LIMIT_S
from tests.warm import python

pytestmark = pytest.mark.local
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
NEED_A_CLUSTER = {"02_on_a_cluster"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stripped(path: Path) -> None:
    assert not strip(path, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem not in NEED_A_CLUSTER], ids=lambda p: p.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    stands_for_python = nbformat.v4.new_code_cell(f"import sys\n\nsys.executable = {python()!r}")
    book.cells.insert(0, stands_for_python)  # forks of the warm process in place of what a notebook, or kfp, starts
    NotebookClient(book, timeout=10 * LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
