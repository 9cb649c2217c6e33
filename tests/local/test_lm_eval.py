"""lm-eval, as it is, asks vLLM's own OpenAI server for an exported model, which says what the checkpoint says here."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.lm_eval_tasks import count_said, write_tasks
from tests.policies import commit_policy
from tests.waiting import LIMIT_S, free_port, until
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.stages.evaluate_lm_eval import evaluate_lm_eval
from tuneloop.stages.export import export
from tuneloop.training.fetch import fetch_artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]
ALONE = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_PLUGINS": ""}
"""A server that has nothing of ours: AMX, which our plugin holds back where it is broken, is not for float32."""


def answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/models").status == 200)
    except OSError:
        return False


def test_a_served_model_scores_as_in_process(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    names = enumerate(("mine", "other"))
    policy, other = (commit_policy(tmp_path / name, version=k, family=LlamaConfig) for k, name in names)
    folder = write_tasks(tmp_path / "tasks", policy)
    exported = export(out=str(tmp_path / "export"), policy=policy.ref)
    fetch_artifact(f"{tmp_path / 'export'}@{exported.digest}", tmp_path / "plain")
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"

    def measure(name: str, policy: Artifact, **options: Any) -> dict[str, Any]:
        options |= {"tasks": ["digits"], "include_path": folder}
        return evaluate_lm_eval(out=str(tmp_path / name), policy=policy.ref, **options).facts

    here = measure("here", policy, model_args={"dtype": "float32"})
    line = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path / "plain")]
    line += ["--served-model-name", "tuneloop", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    line += ["--dtype", "float32", "--max-num-seqs", "8"]
    with subprocess.Popen(line, env={**os.environ, **ALONE}) as server:
        try:
            until(lambda: answers(url), 4 * LIMIT_S, server, pause=1)
            there = measure("there", policy, engine="endpoint", endpoint=url)
            several = {"num_concurrent": 4, "model": "tuneloop"}
            at_once = measure("at-once", policy, engine="endpoint", endpoint=url, model_args=several)
            with pytest.raises(UserError, match=r"--endpoint: 'http.*serves something else than .*/other: "):
                measure("wrong", other, engine="endpoint", endpoint=url)
            with pytest.raises(UserError, match=r"--endpoint: 'http.*The model `nobody` does not exist"):
                measure("nobody", policy, engine="endpoint", endpoint=url, model_args={"model": "nobody"})
        finally:
            server.terminate()
    assert there["canary"]["mean_abs_diff"] < 0.02
    assert at_once["tasks"] == there["tasks"] == here["tasks"]
    assert (here["tasks"]["digits_say"]["exact_match"], here["tasks"]["digits_choose"]["acc"]) == (
        count_said(folder),
        0.75,
    )
