"""What the local executor is held against (`tests/unit/local/parity`) is what the controller makes of it, now.

``TUNELOOP_RECORD=1 pytest tests/cluster/test_parity.py`` writes the recordings anew, of the workflows that they hold.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.local.test_parity import RECORDED
from tuneloop.cluster import submit as argo
from tuneloop.cluster.run_workflows import find_workflows, get_workflow_phase
from tuneloop.cluster.watch import read_nodes
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.workflow.pod_settings import RESTRICTED_POD
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SMALL = {"requests": {"cpu": "50m", "memory": "64Mi"}}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recording_is_what_the_controller_does(cluster: Connection, run: str, path: Path) -> None:
    recorded = json.loads(path.read_text())
    name = recorded["workflow"]["metadata"]["name"]
    cluster.create(*WORKFLOWS, fit_to_cluster(recorded["workflow"], run))
    argo.wait_for_run(cluster, run)
    (seen,) = find_workflows(cluster, run)
    nodes = {}
    for node in read_nodes(seen).values():
        shown = node.display_name.replace(run, name)
        nodes[node.name.replace(run, name)] = [shown, node.type, node.phase, node.outputs]
    found = {"phase": get_workflow_phase(seen), "nodes": dict(sorted(nodes.items()))}
    if "TUNELOOP_RECORD" in os.environ:
        path.write_text(json.dumps({"workflow": recorded["workflow"], **found}, indent=1) + "\n")
    else:
        assert found == {key: recorded[key] for key in found}


def fit_to_cluster(workflow: dict[str, Any], run: str) -> dict[str, Any]:
    """Return a recording's workflow as the namespace takes it, with longer sleeps: pods take seconds to start there."""
    made: dict[str, Any] = json.loads(json.dumps(workflow).replace("sleep 0.5", "sleep 20"))
    accounts = {
        "serviceAccountName": "tuneloop-stage",
        "executor": {"serviceAccountName": "tuneloop-executor"},
    }
    wait, init = ([{"name": name, "securityContext": SAFE}] for name in ("wait", "init"))
    patch = {"containers": wait, "initContainers": init}
    made |= {"apiVersion": "/".join(WORKFLOWS[:2]), "kind": "Workflow"}
    made["metadata"] = {"name": run, "labels": {RUN_LABEL: run}}
    made["spec"] |= {
        **accounts,
        "automountServiceAccountToken": False,
        "securityContext": RESTRICTED_POD,
    }
    made["spec"] |= {"podSpecPatch": json.dumps(patch), "podMetadata": {"labels": {RUN_LABEL: run}}}
    for template in made["spec"]["templates"]:
        if "container" in template:
            template["container"] |= {
                "imagePullPolicy": "IfNotPresent",
                "securityContext": SAFE,
                "resources": SMALL,
            }
    return made
