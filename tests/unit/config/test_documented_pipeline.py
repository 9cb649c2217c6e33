"""The pipeline that docs/stages.md shows with lm-eval is rendered, for Argo and for Kubeflow Pipelines."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuneloop.cli import run_cli

PAGE = Path(__file__).parents[3] / "docs" / "stages.md"
SERVED = ["--set", "lm_eval.engine=endpoint", "--set", "lm_eval.endpoint=http://model:8000/v1"]


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    (found,) = re.findall(
        r"^```python\n# my_evaluated\.py\n(.*?)^```", PAGE.read_text(), re.S | re.M
    )
    (tmp_path / "my_evaluated.py").write_text(found)
    return str(tmp_path / "my_evaluated.py")


def test_argo(pipeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a server has the model, the pod only asks it, and takes no accelerator."""

    def render(*more: str) -> dict[str, Any]:
        assert run_cli(["render", pipeline, "--set", "cluster.sampler.gpus=1", *more]) == 0
        templates = yaml.safe_load(capsys.readouterr().out)["spec"]["templates"]
        (found,) = (each for each in templates if each["name"] == "evaluate-lm-eval")
        return dict(found["container"])

    here, there = render(), render(*SERVED)
    assert json.loads(here["args"][here["args"].index("--tasks") + 1]) == ["gsm8k"]
    assert "http://model:8000/v1" in there["args"]
    assert "nvidia.com/gpu" in str(here["resources"]) and "nvidia.com/gpu" not in str(
        there["resources"]
    )


def test_kfp(pipeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["kfp", "render", pipeline, *SERVED]) == 0
    (found,) = (
        each for each in yaml.safe_load_all(capsys.readouterr().out) if "deploymentSpec" in each
    )
    assert "exec-evaluate-lm-eval" in found["deploymentSpec"]["executors"]
