"""Every overlay is accepted by the API server and the admission of what runs there."""

from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, kubectl
from tuneloop.cli import run_cli
from tuneloop.kube.connection import Connection

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "overlay", sorted((ROOT / "manifests" / "overlays").iterdir()), ids=lambda path: path.name
)
def test_server_side_dry_run(cluster: Connection, overlay: Path) -> None:
    if overlay.name == "kfp":  # of a Kubeflow Pipelines that is there already
        kubectl("create", "namespace", "kubeflow", check=False)
    said = kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-k", str(overlay)
    )
    assert (
        "secret/tuneloop-store" if overlay.name == "kfp" else "clusterqueue.kueue.x-k8s.io/tuneloop"
    ) in said


def test_rendered_servers_are_accepted(cluster: Connection, tmp_path: Path) -> None:
    sets = (
        "engine.weights.kind=pull",
        "engine.weights.url=s3://artifacts/weights",
        "cluster.sampler.gpus=1",
    )
    words = [word for item in sets for word in ("--set", item)]
    assert (
        run_cli(
            ["render", "grpo", "--servers", "rollout", *words, "-o", f"{tmp_path}/servers.yaml"]
        )
        == 0
    )
    said = kubectl(
        "-n", cluster.namespace, "apply", "--dry-run=server", "-f", f"{tmp_path}/servers.yaml"
    )
    assert said.splitlines() == [
        f"{kind}/rollout created (server dry run)" for kind in ("deployment.apps", "service")
    ]
