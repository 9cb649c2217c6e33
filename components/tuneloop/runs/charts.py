"""Line charts as SVG: readable where no script may run, as in the frame in which Kubeflow Pipelines show a page."""

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 30, 34
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
MARKED = 20
"""A line of at most so many points has a mark at each."""
STYLE = "svg.chart{font:11px system-ui,sans-serif;width:100%;max-width:560px;background:#fff}"


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        points: x and y; one whose y is not finite is left out.
        line: whether the points are joined.
    """

    name: str
    points: Sequence[tuple[float, float]]
    line: bool = True

    @property
    def is_constant(self) -> bool:
        """Whether it is several points of one height, which needs no chart."""
        return self.line and len(self.points) > 1 and len({y for _, y in self.points}) == 1

    @property
    def finite_points(self) -> list[tuple[float, float]]:
        """The points that can be drawn."""
        return [(x, y) for x, y in self.points if math.isfinite(y)]


def render_chart(title: str, series: Sequence[Series], x_label: str) -> str:
    """Render a chart with axes, ticks and a legend.

    Returns:
        an ``<svg>``; its first title says all in words, for those who do not see it.
    """
    if not (points := [point for each in series for point in each.finite_points]):
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks, y_ticks = choose_ticks(min(xs), max(xs)), choose_ticks(min(0.0, *ys), max(ys))
    bottom = TOP + HEIGHT - BOTTOM
    x0, x1, y0, y1 = min(xs), max(max(xs), min(xs) + 1e-9), y_ticks[0], max(y_ticks[-1], *ys)

    def locate_point(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x0) / (x1 - x0), (y - y0) / ((y1 - y0) or 1.0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), bottom - up * (HEIGHT - BOTTOM)

    words = "; ".join(f"{each.name}: {at[0][1]:.4g} → {at[-1][1]:.4g}" for each in series if (at := each.finite_points))
    parts = [f"<title>{html.escape(words)}</title>", _text(title, LEFT, 16, "start", 'font-size="13"')]
    for tick in y_ticks:
        _, y = locate_point(x0, tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts.append(_text(f"{tick:.6g}", LEFT - 6, y + 4, "end"))
    for tick in x_ticks:
        if x0 <= tick <= x1:
            parts.append(_text(f"{tick:.6g}", locate_point(tick, y0)[0], bottom + 15, "middle"))
    parts.append(_text(x_label, WIDTH - RIGHT, bottom + 30, "end"))
    for i, (each, color) in enumerate(zip(series, cycle(COLORS))):
        parts += _draw(each, color, locate_point)
        parts.append(_text(f"— {each.name}", LEFT, bottom + 46 + 14 * i, "start", f'fill="{color}"'))
    height = bottom + 38 + 14 * len(series)
    return f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'


def choose_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Choose round numbers from at most `low` to about `high`: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    return [(first + i) * step for i in range(most + 1) if (first + i) * step <= high + step * 0.001]


def _draw(series: Series, color: str, locate_point: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    points = series.finite_points
    size = max(2 * len(points) // WIDTH, 1)  # of many points the least and the greatest of each two pixels are drawn
    parts = (sorted(points[i : i + size], key=lambda point: point[1]) for i in range(0, len(points), size))
    at = [locate_point(x, y) for part in parts for x, y in sorted({part[0], part[-1]})]
    if series.line and len(at) > 1:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
    if not series.line or len(at) <= MARKED:
        radius = 2 if series.line else 4
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>' for x, y in at)


def _text(words: str, x: float, y: float, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{html.escape(words)}</text>'
