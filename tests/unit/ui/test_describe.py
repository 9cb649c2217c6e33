"""The data of pages that are computed from long lists."""

from pathlib import Path

import pytest

from tuneloop.core.artifacts import Draft
from tuneloop.runs.run_record import Run
from tuneloop.ui.describe import SPARKLINE_POINTS, describe_run, thin_out


@pytest.mark.parametrize("count", [0, 1, 59, 60, 121, 1000])
def test_a_thinned_curve_ends_with_the_newest_reward(count: int) -> None:
    rewards = [float(number) for number in range(count)]
    thinned = thin_out(rewards)
    assert thinned[-1:] == rewards[-1:]
    assert len(thinned) <= 2 * SPARKLINE_POINTS


def test_a_program_that_a_manifest_does_not_state_is_not_listed(tmp_path: Path) -> None:
    """Artifacts of an older release had the package ``python None``."""
    draft = Draft(f"{tmp_path}/r/sft", attempt="data-test")
    draft.commit(stage="sft", provenance={"tuneloop": "0.1", "packages": {"torch": "2.0"}})
    packages = describe_run(Run.open("r", str(tmp_path)))["packages"]
    assert packages == [("torch", "2.0"), ("tuneloop", "0.1")]
