"""A whole run with an engine of somebody else whose servers the run starts."""

from pathlib import Path

import pytest

from tests.local.loops import command, finish
from tests.served import install_engine
from tuneloop.core.artifacts import Artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]


def test_a_loop_samples_from_the_server_of_an_engine_that_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    settings = {
        "engine.kind": "simple",
        "engine.port": 8791,
        "sft.max_steps": 2,
        "evaluate.limit": 4,
        "loop.iterations": 2,
    }
    printed = finish(
        command("run", "sft_then_grpo", "--run", "served", store=tmp_path / "runs", **settings)
    )
    for iteration in (1, 2):
        rollout = Artifact(f"{tmp_path}/runs/served/iterations/{iteration}/rollout").manifest
        assert rollout.facts["engine"] == "simple", printed
        # A server of ours was asked: it read its tensors back after it had changed to this version.
        assert rollout.facts["proof"]["by"] == "tensors"
