"""What the UI is given: a ROC curve, charts, tables."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tuneloop.kfp import previews


def area(points: list[dict[str, float]]) -> float:
    """Under a ROC curve, by trapezoids."""
    xy = [(p["falsePositiveRate"], p["recall"]) for p in points]
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(xy))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_roc_area_is_the_share_of_pairs_in_order(judged: list[tuple[int, bool]]) -> None:
    """The area is the Mann-Whitney statistic: of all (right, wrong) pairs, those with the right one surer."""
    points = previews.roc([(sure / 10, good) for sure, good in judged])
    pairs = [(a, b) for a, good in judged if good for b, bad in judged if not bad]
    if not pairs:
        assert points == []
    else:
        won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
        assert abs(area(points) - won / len(pairs)) < 1e-9


def test_a_long_roc_is_thinned_and_ends_at_one() -> None:
    points = previews.roc([(i / 5000, i % 3 == 0) for i in range(5000)])
    assert len(points) <= previews.POINTS + 2
    assert (points[0]["recall"], points[-1]["recall"], points[-1]["falsePositiveRate"]) == (0.0, 1.0, 1.0)


def test_a_chart_of_one_point_and_of_a_line() -> None:
    assert 'points="20.0,160.0"' in previews.chart("loss", [(3, 0.5)])
    drawn = previews.chart("a<b", [(0, 0.0), (1, 1.0)])
    assert 'points="20.0,160.0 400.0,40.0"' in drawn
    assert "a&lt;b" in drawn


def test_a_table_keeps_its_shape_whatever_is_in_it() -> None:
    text = previews.markdown(("a", "b"), [("x|y\nz", "<script>"), ("w" * 500, None)])
    lines = text.splitlines()
    assert len(lines) == 4
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in lines)
    assert "<script>" not in text and len(lines[3]) < 200
