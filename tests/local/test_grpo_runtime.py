"""The runtime ``tuneloop-grpo``: its containers, one after the other, as a TrainJob starts them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.local.loops import SMALL, finish
from tuneloop.core.artifacts import Artifact
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep

pytestmark = [
    pytest.mark.local,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("kubectl") is None, reason="needs kubectl, which renders the runtime"
    ),
]
GRPO = Path(__file__).parents[2] / "manifests/components/trainer/grpo"
PROGRAMS = {"python": [sys.executable], "tuneloop": [sys.executable, "-m", "tuneloop.cli"]}


def test_a_trainjob_of_the_runtime_trains_the_model_on_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, model = f"{tmp_path}/data-prep", f"{tmp_path}/base-model"
    data_prep(out=prompts, train=64, sft=0, eval=0, source_args={"digits": 2}, chat=True)
    base_model(out=model, prompts=Artifact(prompts).ref, model="tiny-qwen3")
    uris = {
        "dataset-initializer": f"{Artifact(prompts).ref}#train.parquet",
        "model-initializer": f"{Artifact(model).ref}#model",
    }
    given = {name: SMALL[name] for name in SMALL if name.startswith(("engine", "rollout"))}
    given |= {"data.eval": 16, "data.train": 40, "loop.iterations": 2}
    runtime = yaml.safe_load(subprocess.check_output(["kubectl", "kustomize", GRPO], text=True))
    monkeypatch.chdir(tmp_path)
    for job in [
        *runtime["spec"]["template"]["spec"]["replicatedJobs"]
    ] * 2:  # then all again: nothing is left to do
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        program, *words = container["command"]
        words = [
            word.replace("/workspace", f"{tmp_path}/workspace").replace("$(RUN)", "mine")
            for word in words
        ]
        if job["name"] == "node":
            words += ["--no-track", *(f"--set={key}={value}" for key, value in given.items())]
        else:
            monkeypatch.setenv("STORAGE_URI", uris[job["name"]])
        said = finish([*PROGRAMS[program], *words])
    assert "mine: finished already" in said
    run = tmp_path / "workspace/runs/mine"
    assert (
        Artifact(str(run / "base-model")).manifest.params["model"] == f"{tmp_path}/workspace/model"
    )
    assert Artifact(str(run / "data-prep")).manifest.facts["rows"] == {
        "eval": 16,
        "sft": 0,
        "train": 40,
    }
    assert Artifact(str(run / "iterations/2/policy-update")).manifest.facts["version"] == 2
    assert (run / "export/manifest.json").is_file()
