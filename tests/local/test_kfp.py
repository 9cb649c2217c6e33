"""Compiled pipelines, whole, under kfp's own local runner: equal to `tuneloop run`, resumed, and ended early."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp import compiler, components
from kfp.local import config as kfp_config

from tests.local.loops import SMALL, command, digests, finish
from tests.warm import python
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import Artifact
from tuneloop.kfp.local import init_local_runner

pytestmark = pytest.mark.local

LOOP = {k: v for k, v in SMALL.items() if not k.startswith("sft")} | {"loop.iterations": 2}
AFTER_THE_LOOP = ("evaluate-after", "export")


class Here:
    """A place for runs, and what kfp keeps of them."""

    def __init__(self, directory: Path) -> None:
        self.store, self.root, self.package = directory / "store", directory / "root", directory / "grpo.yaml"

    def run(self, run: str, *, cache: bool = False, target_reward: float = 2.0, unroll: int = 8, pod: int = 0) -> None:
        """Compile `grpo`, load what was compiled, and run that."""
        pipeline = find_pipeline("grpo")
        sets = {**LOOP, "kfp.retries": 0, "kfp.unroll": unroll, "loop.iterations_per_pod": pod}
        config = pipeline.configure(None, [f"{k}={v}" for k, v in sets.items()])
        compiler.Compiler().compile(pipeline.module.build_kfp(config), str(self.package))
        init_local_runner(self.root, cache=cache)
        component = components.load_component_from_file(str(self.package))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", python())  # by which kfp starts its tasks
            component(store=str(self.store), run=run, target_reward=target_reward)

    @property
    def started(self) -> list[str]:
        """The tasks of the newest run that were started and ended well: not those that kfp's cache knew."""
        newest = max(self.root.glob("grpo-*"))
        return sorted(path.parent.name for path in newest.rglob("executor_output.json"))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """kfp's local mode is a state of the process."""
    yield
    kfp_config.LocalExecutionConfig.instance = None


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Here:
    """With the run `ours` by `tuneloop run`, and the run `theirs` by kfp, which failed in iteration 2 first."""
    place = Here(tmp_path_factory.mktemp("kfp"))
    line = [word for word in command("run", "grpo", "--run", "ours", store=place.store) if "--set" not in word]
    finish([*line, *(f"--set={k}={v}" for k, v in LOOP.items())])
    obstacle = place.store / "theirs/iterations/2/policy-update"
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()  # a file where the stage needs a directory
    with pytest.raises(RuntimeError, match="policy-update-2"):
        place.run("theirs", cache=True)
    assert {"rollout-2", "reward-2", "report"} <= set(place.started)
    obstacle.unlink()
    place.run("theirs", cache=True)
    return place


def test_resumed_from_where_it_failed(here: Here) -> None:
    assert here.started == ["evaluate-2", "export", "policy-update-2", "report"]


def test_equal_to_tuneloop_run(here: Here) -> None:
    assert digests(here.store, "theirs") == digests(here.store, "ours")


@pytest.mark.slow
def test_the_long_form_goes_on_from_what_is_committed(here: Here) -> None:
    for name in ("iterations/2/policy-update", *AFTER_THE_LOOP):
        shutil.rmtree(here.store / "theirs" / name)
    here.run("theirs", unroll=0)
    assert [name for name in here.started if name.startswith("rollout")] == ["rollout"], "one iteration was left to do"
    assert digests(here.store, "theirs") == digests(here.store, "ours")


@pytest.mark.slow
def test_a_reached_target_ends_the_loop(here: Here) -> None:
    early = here.store / "early"
    shutil.copytree(here.store / "ours", early)
    for name in ("iterations/2", *AFTER_THE_LOOP):
        shutil.rmtree(early / name)
    here.run("early", target_reward=-1.0)
    assert not (early / "iterations/2").exists(), "the second iteration did nothing"
    policy = Artifact(str(early / "export")).manifest.inputs["policy"]
    assert policy.endswith(Artifact(str(early / "iterations/1/policy-update")).manifest.digest)


@pytest.mark.slow
def test_several_iterations_in_one_task(here: Here) -> None:
    """Both in one, written out; then an iteration a task, in a loop that its target ends."""
    store = here.store / "pods"
    shutil.copytree(here.store / "ours", store)
    for name in ("iterations", *AFTER_THE_LOOP):
        shutil.rmtree(store / name)
    here.run("pods", pod=2)
    assert "iterations" in here.started and "rollout" not in here.started
    assert digests(here.store, "pods") == digests(here.store, "ours")

    for name in ("iterations/2", "iterations/1/policy-update", *AFTER_THE_LOOP):
        shutil.rmtree(store / name)
    here.run("pods", pod=1, unroll=0, target_reward=-1.0)
    assert not (store / "iterations/2").exists(), "the second task did nothing"
    policy = Artifact(str(store / "export")).manifest.inputs["policy"]
    assert policy.endswith(Artifact(str(store / "iterations/1/policy-update")).manifest.digest)
