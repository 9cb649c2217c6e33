"""The live page as its Deployment serves it, of a run on the cluster while it goes on, in a real browser."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.browser import needs_chromium, open_browser
from tests.cluster.conftest import ROOT, STORE, forwarded, kubectl
from tests.cluster.making import finish, submit_workflow, toy
from tests.cluster.volumes import apply
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow, needs_chromium]


@pytest.fixture
def site(cluster: Connection, tmp_path: Path) -> Iterator[str]:
    """The component of manifests/ over the store of these tests; yields its address."""
    component = os.path.relpath(ROOT / "manifests" / "components" / "ui", tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        json.dumps({"kind": "Kustomization", "components": [component]})
    )
    objects = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    words[words.index("--store") + 1] = STORE
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    try:
        apply(made)
        kubectl(
            "-n", cluster.namespace, "rollout", "status", "deployment/tuneloop-ui", "--timeout=600s"
        )
        with forwarded(cluster.namespace, "tuneloop-ui", 8090) as place:
            yield f"http://{place}"
    finally:
        apply(made, "delete")


def test_a_run_is_seen_while_it_goes_on(cluster: Connection, site: str, run: str) -> None:
    """The page is opened once; that a stage runs, and what stages have committed, comes to it by itself."""
    submit_workflow(cluster, toy(run, iterations=2, held=["rollout"]), run=run, store=STORE)
    with open_browser() as page:
        page.open(f"{site}/", run)
        page.open(f"{site}/runs/{run}", "running")
        page.wait(r"rollout\s+runs")
        assert finish(cluster, run, "rollout") == 0
        page.wait(r"succeeded[\s\S]*rollout\s+committed\s+2")
        page.open(f"{site}/runs/{run}/weights", "Checkpoints")
        assert page.errors == []
