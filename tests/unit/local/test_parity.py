"""The local executor beside the real controller: ``parity/`` has workflows, and the nodes Argo 3.7.6 made of them.

``TUNELOOP_RECORD=1 pytest tests/cluster/test_parity.py`` records them on a cluster; without the variable it says
whether they are so still.
"""

import json
from pathlib import Path

import pytest

from tuneloop.local.executor import execute_workflow

RECORDED = sorted((Path(__file__).parent / "parity").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_nodes_are_those_of_the_controller(path: Path, tmp_path: Path) -> None:
    recorded = json.loads(path.read_text())
    outcome = execute_workflow(recorded["workflow"], workdir=tmp_path, warm=False)
    nodes = {n.name: [n.display_name, n.type, n.phase, n.outputs] for n in outcome.nodes.values()}
    assert outcome.phase == recorded["phase"]
    assert nodes == recorded["nodes"]
