"""The notebook about clusters runs from top to bottom against this one."""

import nbformat
import pytest

from tests.cluster.conftest import ROOT
from tests.notebooks import describe_outputs, run_notebook
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_runs_and_gives_what_it_shows(cluster: Connection) -> None:
    path = ROOT / "notebooks" / "02_on_a_cluster.ipynb"
    shown = describe_outputs(nbformat.read(path, as_version=4))
    assert describe_outputs(run_notebook(path, path.parent, timeout_s=600)) == shown
