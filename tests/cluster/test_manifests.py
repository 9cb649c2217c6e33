"""Every overlay is accepted by the API server and the admission of what runs there."""

from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, kubectl
from tuneloop.kube.connection import Connection

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("overlay", sorted((ROOT / "manifests" / "overlays").iterdir()), ids=lambda path: path.name)
def test_server_side_dry_run(cluster: Connection, overlay: Path) -> None:
    said = kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(overlay))
    assert "clusterqueue.kueue.x-k8s.io/tuneloop" in said
