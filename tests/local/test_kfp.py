"""Compiled pipelines, whole, under kfp's own local runner: equal to `tuneloop run`, resumed, and ended early."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kfp import compiler, components
from kfp.local import config as kfp_config

from tests.local.loops import SMALL, command, digests, finish
from tuneloop.config import find
from tuneloop.kfp.local import local

pytestmark = pytest.mark.local

LOOP = {k: v for k, v in SMALL.items() if not k.startswith("sft")} | {"loop.iterations": 2}
LAST = "iterations/2/policy-update"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """kfp's local mode is a state of the process."""
    yield
    kfp_config.LocalExecutionConfig.instance = None


def run_compiled(tmp_path: Path, run: str, *, cache: bool = False, target_reward: float = 2.0, **kfp: int) -> Path:
    """Compile `grpo`, load what was compiled, run it; the directory with what kfp kept of each task that it started."""
    pipeline = find("grpo")
    sets = {**LOOP, "kfp.retries": 0, **{f"kfp.{k}": v for k, v in kfp.items()}}
    config = pipeline.configure(None, [f"{k}={v}" for k, v in sets.items()])
    package = str(tmp_path / "grpo.yaml")
    compiler.Compiler().compile(pipeline.module.build_kfp(config), package)
    root = tmp_path / "root"
    before = set(root.glob("grpo-*"))
    local(root, cache=cache)
    try:
        components.load_component_from_file(package)(
            store=str(tmp_path / "store"), run=run, target_reward=target_reward
        )
    finally:
        (made,) = set(root.glob("grpo-*")) - before
        run_compiled.made = made  # type: ignore[attr-defined] - also of a run that failed
    return made


def started(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/executor_output.json"))


def test_failed_resumed_and_equal_to_tuneloop_run(tmp_path: Path) -> None:
    store = tmp_path / "store"
    flags = [f"--set={k}={v}" for k, v in LOOP.items()]
    line = [w for w in command("run", "grpo", "--run", "here", store=store) if not w.startswith("--set")]
    finish([*line, *flags])

    obstacle = store / "there" / LAST
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()  # a file where the stage needs a directory
    with pytest.raises(RuntimeError, match="policy-update"):
        run_compiled(tmp_path, "there", cache=True)
    assert "rollout-2" in started(run_compiled.made)  # type: ignore[attr-defined]
    obstacle.unlink()
    again = run_compiled(tmp_path, "there", cache=True)
    assert started(again) == ["evaluate-2", "export", "policy-update-2", "report"]
    assert digests(store, "there") == digests(store, "here")
