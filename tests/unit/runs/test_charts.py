import math
import re

from hypothesis import given
from hypothesis import strategies as st

from tuneloop.runs.charts import Series, choose_ticks, render_chart


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_are_few_and_span_the_range(low: float, width: float) -> None:
    ticks = choose_ticks(low, low + width)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 7 and ticks == sorted(ticks)
    assert ticks[0] <= low + step * 0.01 and ticks[-1] > low + width - step * 1.01


def test_a_chart_says_its_numbers_and_leaves_out_what_is_not_finite() -> None:
    drawn = render_chart("a<b", [Series("reward: x", [(1, 0.5), (2, math.nan), (3, 1.0)])], "iteration")
    assert "<title>reward: x: 0.5 → 1</title>" in drawn and "a&lt;b" in drawn and "nan" not in drawn
    (line,) = re.findall(r'points="([^"]+)"', drawn)
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.split())
    assert x0 < x1 and y0 > y1, "up is up"
    assert len(re.findall("<circle", drawn)) == 2


def test_points_that_are_not_joined_and_a_chart_of_nothing() -> None:
    drawn = render_chart("t", [Series("evaluate", [(0, 0.1), (9, 0.2)], line=False)], "iteration")
    assert "<polyline" not in drawn and len(re.findall("<circle", drawn)) == 2
    assert render_chart("t", [Series("s", [(1, math.inf)])], "step") == ""


def test_of_many_points_the_least_and_the_greatest_are_drawn() -> None:
    """A spike that lasts one of 100,000 iterations is seen; the chart is no larger than a screen needs."""
    heights = [0.5] * 100_000
    heights[70_001], heights[20_003] = 1.0, 0.0
    chart = render_chart("reward", [Series("a", [*enumerate(heights)])], "iteration")
    (line,) = re.findall(r'points="(.*?)"', chart)
    across, down = zip(*(map(float, point.split(",")) for point in line.split()))
    assert max(down) == float(re.findall(r'<path d="M56 ([\d.]+)H', chart)[0]), "0 lies on the lowest line"
    assert min(down) == 30.0 and len(down) <= 500
    assert [*across] == sorted(across)
