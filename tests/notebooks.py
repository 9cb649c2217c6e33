"""Run notebooks and keep their outputs (`make notebooks`); ``--check`` names those whose cells have changed since."""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NEED_A_CLUSTER = {"02_on_a_cluster"}
LIMIT_BYTES = 150_000


def digest_cells(book: nbformat.NotebookNode) -> str:
    """SHA-256 of what the cells say, without what they printed."""
    cells = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in book.cells)
    return hashlib.sha256(cells.encode()).hexdigest()


def find_fault(path: Path) -> str | None:
    """Say in what a notebook's outputs are not those of its cells, as far as can be said without running it."""
    book = nbformat.read(path, as_version=4)
    if book.metadata.get("tuneloop", {}).get("cells") != digest_cells(book):
        return "its cells have changed since it was run"
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    if any(output.output_type == "error" for cell in cells for output in cell.outputs):
        return "a cell ended with an error"
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        return "its cells were not run from top to bottom"
    if named := re.search(
        rf"/tmp/(?!work\b)[\w.-]+|(?<!\w)/(home|root)\b|{ROOT}", path.read_text()
    ):
        return f"it names a path of the machine that ran it, {named.group()}"
    return f"it has more than {LIMIT_BYTES} bytes" if path.stat().st_size > LIMIT_BYTES else None


def describe_outputs(book: nbformat.NotebookNode) -> list[list[str]]:
    """Return the kinds of each code cell's outputs, the same on every machine: ``stdout``, ``image/svg+xml``."""
    return [
        sorted(
            {
                kind
                for output in cell.outputs
                for kind in [output.get("name"), *output.get("data", ())]
                if kind
            }
        )
        for cell in book.cells
        if cell.cell_type == "code"
    ]


def run_notebook(path: Path, folder: Path, timeout_s: float) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom in a folder; return it with its outputs, where paths of this machine are cut.

    Raises:
        CellExecutionError: a cell raised.
    """
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=timeout_s, resources=where, record_timing=False).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = _cut_paths(_join_streams(cell.outputs))
    book.metadata["tuneloop"] = {"cells": digest_cells(book)}
    return book


def _cut_paths(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Write ``/tmp/work`` for folders that the notebook made, and paths of the checkout from there on."""
    text = json.dumps(outputs).replace(f"{ROOT}/", "")
    return [
        nbformat.from_dict(each) for each in json.loads(re.sub(r"/tmp/[\w.-]+", "/tmp/work", text))
    ]


def _join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Make one output of a stream's pieces, whose borders are where the kernel happened to flush."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    flags = parser.parse_args()
    paths = flags.files or sorted(ROOT.glob("notebooks/*.ipynb"))
    if not flags.check:
        for path in paths:
            with tempfile.TemporaryDirectory() as empty:
                folder = path.parent if path.stem in NEED_A_CLUSTER else Path(empty)
                nbformat.write(run_notebook(path, folder, timeout_s=600), path)
    faults = [f"{path}: {fault}" for path in paths if (fault := find_fault(path))]
    if faults:
        sys.exit("\n".join([*faults, "run: make notebooks"]))
