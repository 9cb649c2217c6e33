"""What docs/extending.md shows is run as it stands there: own data, reward, environment, engine, stage, pipeline."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]
DOCS = Path(__file__).parents[2] / "docs"


def test_the_smallest_of_each_kind_runs(tmp_path: Path) -> None:
    for page in ("extending.md", "stages.md"):
        for name, text in re.findall(r"^```\w+\n# (\w+\.\w+)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M):
            (tmp_path / name).write_text(text)
    script = Path(sys.executable).parent
    for command in re.findall(r"^((?:PYTHONPATH=\. )?tuneloop run .*)$", (DOCS / "extending.md").read_text(), re.M):
        env = {**os.environ, "PATH": f"{script}:{os.environ['PATH']}"}
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=10 * LIMIT_S
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert Artifact(str(tmp_path / "runs/mine/iterations/1/rollout")).manifest.facts["engine"] == "plain"
    assert Artifact(str(tmp_path / "runs/mine/data-prep")).manifest.facts["source"] == "my_data:load"
    longest = Artifact(str(tmp_path / "runs/lengths/measure")).manifest.results["longest"]
    assert longest == len("reverse 1234 =")
