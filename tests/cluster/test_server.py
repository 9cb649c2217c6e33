"""Through an Argo server: Hera's `create`, and the exit status."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import ROOT, STORE, forwarded, sleeper
from tests.cluster.test_queue import until
from tests.waiting import LIMIT_S
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.argo_server import Server
from tuneloop.cluster.watch import read_status
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import Connection

pytestmark = pytest.mark.cluster

SETTINGS = {"data": {"source": "/nowhere.jsonl"}}


@pytest.fixture
def server(cluster: Connection) -> Iterator[str]:
    with forwarded("argo", "argo-server", 2746) as place:
        yield place


def test_a_run_is_submitted_to_a_server_that_returns_how_it_ended(
    cluster: Connection, server: str, run: str, tmp_path: Path
) -> None:
    """Its first stage has no data to read: the user's mistake, exit code 2."""
    config = tmp_path / "settings.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    flags = ["--run", run, "--store", STORE, "-c", str(config), "--server", f"http://{server}"]
    command = [sys.executable, "-m", "tuneloop.cli", "submit", "sft", *flags, "--wait"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        2,
        f"{run}: submitted as workflow {run} to http://{server}",
    )
    rendered = find_pipeline("sft").build(find_pipeline("sft").configure(config))
    (live,) = run_workflows.find_workflows(cluster, run)
    wanted = run_workflows.prepare_workflow(rendered, run=run, store=STORE)
    assert live["spec"]["arguments"] == wanted["spec"]["arguments"]
    # The server writes down empty fields, too.
    mine, theirs = (
        [t.get("container", {}).get("args") for t in w["spec"]["templates"]] for w in (wanted, live)
    )
    assert mine == theirs

    assert subprocess.run(command[:-1], cwd=ROOT, capture_output=True).returncode == 0
    until(lambda: read_status(cluster, run).workflows == [run, f"{run}-2"])


def test_a_run_that_is_under_way_is_refused(cluster: Connection, server: str, run: str) -> None:
    made = run_workflows.prepare_workflow(sleeper(3600, queue=""), run=run, store=STORE)
    assert Server(f"http://{server}").submit(made, run) == run
    with pytest.raises(UserError, match=f"is under way as workflow {run}"):
        Server(f"http://{server}").submit(made, run)
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1


def test_a_server_that_does_not_answer(run: str) -> None:
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9': does not answer"):
        Server("http://127.0.0.1:9").workflows(run)
