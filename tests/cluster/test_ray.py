"""`data_prep` by Ray Data on the nodes of a RayJob. Needs KubeRay, and the image `ray`."""

from pathlib import Path

import pytest

from tests.cluster.test_jobset import SMALL
from tests.cluster.test_trainjob import launched
from tuneloop.core.artifacts import Artifact
from tuneloop.extensions.trainers.trainjob import prepare_rayjob
from tuneloop.kube.connection import Connection
from tuneloop.stages.data_prep import data_prep

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_rows_examined_by_a_head_and_a_worker(
    cluster: Connection, root: str, run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {"source_args": {"digits": 5}, "train": 9000, "eval": 100, "sft": 2000}
    roomy = SMALL.adjust_role("cpu", memory="3Gi")
    job = prepare_rayjob(
        {**given, "prompts": f"{root}/prompts"}, f"{run}-rows", roomy, nodes=2, run=run
    )
    assert launched(cluster, job) == 0
    assert "data_prep: 9,000 prompts, 100 held out; 2,000 demonstrations" in capfd.readouterr().out
    data_prep(out=str(tmp_path / "here"), **given)
    found = Artifact(f"{root}/prompts").manifest
    assert found.digest == Artifact(str(tmp_path / "here")).manifest.digest
    assert len(found.facts["examined"]) == 2 and sum(found.facts["examined"].values()) == 11100
    few = prepare_rayjob(
        {**given, "train": 1, "eval": 10**6, "prompts": f"{root}/few"}, f"{run}-few", roomy, run=run
    )
    assert launched(cluster, few) == 2
    assert "digits has only 100000 distinct prompts left; ask for fewer" in capfd.readouterr().out
