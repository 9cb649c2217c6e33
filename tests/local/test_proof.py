"""A pretrained model in bfloat16, with steps of a learning rate of 1e-6: right weights pass, and the
version before under the same label does not, over a real server of vLLM and in process."""

from pathlib import Path

import pytest

from benchmarks.proof_loads import measure, open_subject, prepare_versions
from tuneloop.core.artifacts import Artifact

pytestmark = [pytest.mark.local, pytest.mark.slow]
LOADS = 6
VERSIONS = 4


@pytest.fixture(scope="module")
def versions(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    return prepare_versions(smollm2, tmp_path_factory.mktemp("versions"), VERSIONS)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_right_weights_pass_and_stale_ones_do_not(
    versions: list[Artifact], tmp_path: Path, engine: str
) -> None:
    with open_subject(engine, versions[0], tmp_path / "fault") as subject:
        result = measure(engine, subject, versions, LOADS, LOADS)
    counts = result["counts"]
    stale = (
        {"stale (ignored), refused": LOADS // 2, "stale (mislabelled), refused": LOADS // 2}
        if engine == "vllm"
        else {"stale (in process), refused": LOADS}
    )
    assert counts == stale | {
        "right, accepted by tensors": LOADS,
        # What the reading back is for.
        "log-probabilities cannot tell": LOADS,
    }
