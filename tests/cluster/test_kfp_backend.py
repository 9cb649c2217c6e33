"""Pipelines on a real Kubeflow Pipelines: its API server, driver, launcher and metadata store, by its own manifests.

The backend is what runs in namespace ``kubeflow`` of KUBECONFIG's cluster; without one these tests are skipped.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, forwarded, kubectl
from tests.cluster.test_queue import until
from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact
from tuneloop.core.store import Store
from tuneloop.kfp import client as kfp
from tuneloop.kfp.api import DONE
from tuneloop.kube.connection import Connection, connect_to_cluster
from tuneloop.local.executor import execute_parts
from tuneloop.workflow.settings import ROLES

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAMESPACE = "kubeflow"
STORE = os.environ.get("TUNELOOP_TEST_STORE", "s3://mlpipeline/tests")
"""As the pods reach it: KFP's own bucket."""
RUN_S = 3600.0
"""Seconds after which a run will not end any more: a task is two pods, one after the other."""
IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
DATA = [
    "data.source_args={digits: 2}",
    "data.train=40",
    "data.eval=8",
    "data.sft=40",
    "evaluate.limit=8",
]
SFT = ["sft.max_steps=20", "sft.save_steps=10", "trainer.per_device_train_batch_size=16"]
LOOP = [
    "engine.kind=transformers",
    "engine.args={}",
    "rollout.prompts_per_iteration=4",
    "rollout.n=4",
]
LOOP += ["loop.iterations=2", "loop.target_reward=2"]
SETTINGS = {"sft": [*DATA, *SFT], "grpo": [*DATA, *LOOP], "sft_then_grpo": [*DATA, *SFT, *LOOP]}
PODS = [f"cluster.{role}.{of}" for role in ROLES for of in ("cpu=100m", "memory=1500Mi")]
PODS += ['cluster.queue=""', f"cluster.images={IMAGES}"]


@pytest.fixture(scope="module")
def cluster() -> Connection:
    ready = "jsonpath={.status.readyReplicas}"
    if not kubectl("-n", NAMESPACE, "get", "deployment", "ml-pipeline", "-o", ready, check=False):
        pytest.skip(
            f"no API server of Kubeflow Pipelines is ready in namespace {NAMESPACE} of this cluster"
        )
    kubectl("apply", "-k", str(ROOT / "manifests/overlays/kfp"))
    return connect_to_cluster(NAMESPACE)


@pytest.fixture(scope="module")
def api(cluster: Connection) -> Iterator[Any]:
    with forwarded(NAMESPACE, "ml-pipeline", 8888) as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KF_PIPELINES_ENDPOINT", f"http://{place}")
        yield kfp.connect_to_kfp(f"http://{place}")


@pytest.fixture
def run(api: Any) -> Iterator[str]:
    """A new run's name; what is under way of it is stopped."""
    name = f"t{os.urandom(4).hex()}"
    yield name
    with contextlib.suppress(Exception):  # it may not have been submitted
        kfp.stop_run(api, name)


def send(verb: str, pipeline: str, *words: str, root: str, sets: list[str]) -> None:
    given = [word for each in [*SETTINGS[pipeline], *PODS, *sets] for word in ("--set", each)]
    assert run_cli(["kfp", verb, pipeline, "--store", root, *words, *given]) == 0


def wait_for_success(api: Any, run: str) -> None:
    until(lambda: kfp.find_run(api, run).state in DONE, RUN_S)
    found = kfp.find_run(api, run)
    assert found.state == "SUCCEEDED", [*kfp.read_logs(api, run)][-20:]


def list_keys(url: str) -> list[str]:
    return list(Store(url).keys())


def read_digests(url: str) -> dict[str, str]:
    """Artifact → digest, of all that is committed below `url` but trainers' states, which a kill may leave out."""
    names = [
        key.removesuffix("/manifest.json")
        for key in list_keys(url)
        if key.endswith("/manifest.json")
    ]
    return {n: Artifact(f"{url}/{n}").manifest.digest for n in names if not n.endswith("/state")}


def compute_digests(pipeline: str, directory: Path) -> dict[str, str]:
    """What the same settings commit on this machine."""
    found = find_pipeline(pipeline)
    here = execute_parts(
        found.build(found.configure(sets=SETTINGS[pipeline])),
        workdir=directory / "state",
        arguments={"run": "ours", "store": str(directory)},
    )
    assert here.phase == "Succeeded", here.message
    return read_digests(str(directory / "ours"))


@pytest.mark.parametrize(("pipeline", "unroll"), [("sft", 0), ("sft_then_grpo", 0), ("grpo", 2)])
def test_a_run_equals_this_machine_and_is_known_to_the_cache(
    api: Any, run: str, root: str, tmp_path: Path, pipeline: str, unroll: int
) -> None:
    sets = [f"kfp.unroll={unroll}"]
    send("submit", pipeline, "--run", run, root=root, sets=sets)
    wait_for_success(api, run)
    assert read_digests(f"{root}/{run}") == compute_digests(pipeline, tmp_path)
    tasks = {task.task: task.phase for task in kfp.list_tasks(kfp.find_run(api, run))}
    assert set(tasks.values()) == {"SUCCEEDED"} and {"data-prep", "export", "report"} <= set(tasks)
    lines = [line for name, line in kfp.read_logs(api, run) if name == "data-prep"]
    assert any("8 held out" in line for line in lines), lines
    send("submit", pipeline, "--run", run, root=root, sets=sets)
    wait_for_success(api, run)
    started = {name for name, _ in kfp.read_logs(api, run)}
    uncached = {"iterations", "report"} if pipeline != "sft" and not unroll else {"report"}
    assert uncached <= started <= uncached | {"evaluate-after", "export"}


def test_a_loop_whose_pod_was_deleted_goes_on_in_the_next_run(
    api: Any, run: str, root: str, tmp_path: Path
) -> None:
    """The task is tried again, or, with the retries of KFP's own manifests, the run is submitted again."""
    sets = ["loop.per_workflow=1"]
    send("submit", "grpo", "--run", run, root=root, sets=sets)
    first = kfp.find_run(api, run).run_id
    until(lambda: "iterations/1/rollout/manifest.json" in list_keys(f"{root}/{run}"), RUN_S)
    mine = [
        "-n",
        NAMESPACE,
        "-l",
        f"pipeline/runid={first}",
        "--field-selector=status.phase=Running",
    ]
    kubectl("delete", "pods", "--wait=false", *mine)
    until(lambda: (now := kfp.find_run(api, run)).run_id != first or now.state in DONE, RUN_S)
    if (now := kfp.find_run(api, run)).run_id == first and now.state == "FAILED":
        send("submit", "grpo", "--run", run, root=root, sets=sets)
    until(lambda: "export/manifest.json" in list_keys(f"{root}/{run}"), RUN_S)
    wait_for_success(api, run)
    assert read_digests(f"{root}/{run}") == compute_digests("grpo", tmp_path)


def test_a_tick_starts_a_run_where_the_data_is_new(api: Any, run: str, root: str) -> None:
    send("schedule", "sft", "--name", run, "--cron", "* * * * *", root=root, sets=["kfp.retries=0"])
    try:
        until(lambda: list_keys(root), RUN_S)
        name = list_keys(root)[0].partition("/")[0]
        assert name.startswith(f"{run}-")
        wait_for_success(api, name)
        until(lambda: any("no new data since" in line for line in read_ticks(api, run)), RUN_S)
    finally:
        assert (
            run_cli(
                [
                    "kfp",
                    "unschedule",
                    run,
                ]
            )
            == 0
        )
    assert len({key.partition("/")[0] for key in list_keys(root)}) == 1


def read_ticks(api: Any, schedule: str) -> list[str]:
    """Return what the ticks of a schedule printed."""
    names = [
        each.display_name for each in api.list_runs(page_size=100, sort_by="created_at desc").runs
    ]
    ticks = [
        name for name in names if name.startswith(schedule) and not name.startswith(f"{schedule}-")
    ]
    return [line for name in ticks for _, line in kfp.read_logs(api, name)]
