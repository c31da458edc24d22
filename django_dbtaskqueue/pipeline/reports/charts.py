"""Charts drawn as SVG on the spot. Each carries its title and what it shows as text, for those who do not see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

WIDTH, HEIGHT = 900, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 28
COLOURS = 8
MOST_POINTS = 400
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Scale:
    """From values to places on the paper."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        span = self.high - self.low
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1) if span else self.start


def line_chart(
    title: str,
    series: Mapping[str, Points],
    *,
    value: Callable[[float], str],
    place: Callable[[float], str] | None = None,
) -> str:
    """Return lines over time (seconds since 1970, unless ``place`` names the places of x). A None breaks its line."""
    shown = {name: thinned(points) for name, points in list(series.items())[:COLOURS]}
    every = [point for points in shown.values() for point in points]
    heights = [y for _, y in every if y is not None]
    if not heights:
        return ""
    xs = [x for x, _ in every]
    x = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y = Scale(0, ceiling(max(heights)), HEIGHT - BOTTOM, TOP)
    lines = [
        f'<path d="{path(points, x, y)}" fill="none" stroke="var(--c{number})" stroke-width="1.8"><title>{escape(name)}'
        f"</title></path>"
        for number, (name, points) in enumerate(shown.items())
    ]
    drawn = [*grid(y, value), *labels(x, place or moments(x)), *lines]
    highest = "; ".join(
        f"{name}: at most {value(max((one for _, one in points if one is not None), default=0))}"
        for name, points in shown.items()
    )
    return figure(title, highest, drawn, list(shown))


def bar_chart(
    title: str, groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, value: Callable[[float], str]
) -> str:
    """Return stacked bars: for each group, the values of ``names`` from below."""
    if not groups or not any(sum(values) for _, values in groups):
        return ""
    y = Scale(0, ceiling(max(sum(values) for _, values in groups)), HEIGHT - BOTTOM, TOP)
    step = (WIDTH - LEFT - RIGHT) / len(groups)
    bars = []
    for number, (group, values) in enumerate(groups):
        so_far = 0.0
        for colour, (name, amount) in enumerate(zip(names, values, strict=True)):
            top, bottom = y(so_far + amount), y(so_far)
            so_far += amount
            if amount:
                bars.append(
                    f'<rect x="{LEFT + number * step + step * 0.1:.1f}" y="{top}" width="{max(step * 0.8, 0.8):.1f}" '
                    f'height="{max(bottom - top, 0.5):.1f}" fill="var(--c{colour})">'
                    f"<title>{escape(f'{group}: {value(amount)} {name}')}</title></rect>"
                )
    every = max(1, math.ceil(len(groups) / 10))
    texts = [
        f'<text x="{LEFT + (number + 0.5) * step:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(group)}</text>'
        for number, (group, _) in enumerate(groups)
        if number % every == 0
    ]
    totals = "; ".join(f"{name}: {value(sum(v[i] for _, v in groups))}" for i, name in enumerate(names))
    return figure(title, totals, [*grid(y, value), *bars, *texts], list(names))


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]],
    *, value: Callable[[float], str],
) -> str:  # fmt: skip
    """Return a field for each row and column, the darker the higher."""
    most = max((one for row in values for one in row), default=0)
    if not most:
        return ""
    wide, high = (WIDTH - LEFT - RIGHT) / len(columns), 26
    fields = [
        f'<rect x="{LEFT + j * wide:.1f}" y="{TOP + i * high}" width="{wide - 1:.1f}" height="{high - 1}" '
        f'fill="var(--c0)" fill-opacity="{0.04 + 0.96 * one / most:.2f}"><title>'
        f"{escape(f'{rows[i]} {columns[j]}: {value(one)}')}</title></rect>"
        for i, row in enumerate(values)
        for j, one in enumerate(row)
    ]
    names = [
        f'<text x="{LEFT - 8}" y="{TOP + i * high + 17}" text-anchor="end">{escape(name)}</text>'
        for i, name in enumerate(rows)
    ]
    names += [
        f'<text x="{LEFT + (j + 0.5) * wide:.1f}" y="{TOP + len(rows) * high + 16}" text-anchor="middle">'
        f"{escape(name)}</text>"
        for j, name in enumerate(columns)
        if j % 2 == 0
    ]
    return figure(title, f"at most {value(most)}", [*fields, *names], [], height=TOP + len(rows) * high + BOTTOM)


def figure(title: str, about: str, drawn: Sequence[str], names: Sequence[str], *, height: int = HEIGHT) -> str:
    """Return a drawing with its title, its description and its legend."""
    legend = "".join(
        f'<li><i style="background:var(--c{number})"></i>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(f"{title}. {about}", quote=True)}">{"".join(drawn)}</svg>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + "</figure>"
    )


def thinned(points: Points) -> Points:
    """Return at most `MOST_POINTS` points: of each stretch the highest, for a peak is what one looks for."""
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / MOST_POINTS)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [max(stretch, key=lambda point: -1 if point[1] is None else point[1]) for stretch in stretches]


def path(points: Points, x: Scale, y: Scale) -> str:
    """Return the points as the data of an SVG path; a single one becomes a dash."""
    words, pen = [], "M"
    for place, height in points:
        if height is None:
            pen = "M"
            continue
        words.append(f"{pen}{x(place):g} {y(height):g}")
        pen = "L"
    return " ".join(words) + (" h3" if len(words) == 1 else "")


def grid(y: Scale, value: Callable[[float], str]) -> list[str]:
    """Return horizontal lines with their values."""
    ticks = [y.high * step / 4 for step in range(5)]
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{escape(value(tick))}</text>'
        for tick in ticks
    ]


def labels(x: Scale, name: Callable[[float], str]) -> list[str]:
    """Return the names of places along the x axis."""
    steps = 6 if x.high > x.low else 0
    found = [x.low + (x.high - x.low) * (step + 0.5) / max(steps, 1) for step in range(max(steps, 1))]
    return [
        f'<text x="{x(one) if steps else LEFT}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name(one))}</text>'
        for one in found
    ]


def moments(x: Scale) -> Callable[[float], str]:
    """Return how times of this scale are written: days where it is long, hours where it is short."""
    form = "%d %b" if x.high - x.low > 4 * 86_400 else "%a %H:%M"
    return lambda seconds: datetime.fromtimestamp(seconds, UTC).strftime(form)


def ceiling(value: float) -> float:
    """Return the least round number that is not below ``value``."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 2.5, 4, 5, 8, 10) if step * size >= value * 0.999_999)
