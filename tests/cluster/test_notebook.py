"""The notebook about clusters runs from top to bottom against this one."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cluster.conftest import ROOT
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_runs(cluster: Connection) -> None:
    path = ROOT / "notebooks" / "02_on_a_cluster.ipynb"
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
