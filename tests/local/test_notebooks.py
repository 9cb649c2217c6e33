"""Notebooks carry the outputs of their cells, and run from top to bottom."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests import notebooks
from tests.waiting import LIMIT_S
from tests.warm import python

pytestmark = pytest.mark.local
PATHS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
HERE = [path for path in PATHS if path.stem not in notebooks.NEED_A_CLUSTER]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_outputs_are_those_of_the_cells(path: Path) -> None:
    assert notebooks.find_fault(path) is None, "run: make notebooks"


def test_a_changed_cell_a_path_and_an_error_are_found(tmp_path: Path) -> None:
    def find_fault_after(**change: Any) -> str:
        book = nbformat.read(PATHS[0], as_version=4)
        next(cell for cell in book.cells if cell.cell_type == "code").update(change)
        nbformat.write(book, tmp_path / "changed.ipynb")
        return notebooks.find_fault(tmp_path / "changed.ipynb") or ""

    output = nbformat.v4.new_output
    assert "have changed" in find_fault_after(source="iterations = 7")
    assert "with an error" in find_fault_after(outputs=[output("error")])
    assert "from top to bottom" in find_fault_after(execution_count=7)
    assert "/tmp/abc" in find_fault_after(outputs=[output("stream", text="saved in /tmp/abc")])
    assert "more than" in find_fault_after(
        outputs=[output("stream", text="x" * notebooks.LIMIT_BYTES)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", HERE, ids=lambda p: p.stem)
def test_runs_and_gives_what_it_shows(path: Path, tmp_path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    shown = notebooks.describe_outputs(book)
    # Forks of the warm process in place of what a notebook, or kfp, starts.
    book.cells.insert(0, nbformat.v4.new_code_cell(f"import sys\n\nsys.executable = {python()!r}"))
    nbformat.write(book, tmp_path / path.name)
    ran = notebooks.run_notebook(tmp_path / path.name, tmp_path, timeout_s=10 * LIMIT_S)
    assert notebooks.describe_outputs(ran)[1:] == shown
