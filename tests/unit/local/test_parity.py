"""The local executor beside the real controller: ``parity/`` has workflows, and the nodes Argo 3.7.6 made of them.

Recorded on a cluster from the workflows as they are here, with an image, a security context, and longer sleeps; that
of `values.json` also had loops over items, which the local executor refuses.
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
