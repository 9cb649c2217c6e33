"""The data of pages that are computed from long lists."""

import pytest

from tuneloop.ui.describe import SPARKLINE_POINTS, thin_out


@pytest.mark.parametrize("count", [0, 1, 59, 60, 121, 1000])
def test_a_thinned_curve_ends_with_the_newest_reward(count: int) -> None:
    rewards = [float(number) for number in range(count)]
    thinned = thin_out(rewards)
    assert thinned[-1:] == rewards[-1:]
    assert len(thinned) <= 2 * SPARKLINE_POINTS
