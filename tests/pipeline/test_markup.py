"""Numbers as people read them, and charts that say in words what they draw."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest

from django_dbtaskqueue.pipeline.reports import charts, markup
from django_dbtaskqueue.pipeline.reports.report_page import ended_bars
from tests.pipeline.histories import MONDAY


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12.3 ms"),
        (3.456, "3.46 s"),
        (119.0, "119 s"),
        (300.0, "5 min"),
        (9000.0, "2.5 h"),
        (864_000.0, "10 d"),
    ],
)
def test_times(value: float, text: str) -> None:
    assert markup.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "100 %"), (0.999_999, "> 99.99 %"), (0.97, "97 %"), (0.0, "0 %"), (0.12345, "12.35 %")]
)
def test_shares(value: float, text: str) -> None:
    """What is not quite all is not written as all."""
    assert markup.percent(value) == text


def test_numbers_stand_right_and_unknown_ones_are_a_dash() -> None:
    text = markup.table(
        "T", ["Name", "Count", "Share"], [["<a>", 12_345, markup.percent(None)], ["b", None, markup.percent(0.5)]]
    )
    assert "&lt;a&gt;" in text and "12,345" in text
    assert re.findall(r"<th [^>]*>", text) == [
        '<th scope="col">', '<th scope="col" class="number">', '<th scope="col" class="number">',
    ]  # fmt: skip
    assert markup.table("T", ["Name"], []) == '<p class="soft">None.</p>'


@pytest.mark.parametrize(("value", "top"), [(0, 1), (1, 1), (7, 8), (2.3, 2.5), (101, 200), (0.03, 0.04)])
def test_an_axis_ends_at_a_round_number(value: float, top: float) -> None:
    assert charts.ceiling(value) == pytest.approx(top)


def test_a_chart_keeps_its_peaks_and_breaks_where_nothing_is_known() -> None:
    points = [(float(place), 0.0) for place in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    thin = charts.thinned(points)
    assert len(thin) <= charts.MOST_POINTS and (77_777.0, 9.0) in thin
    chart = charts.line_chart("A & B", {"one": [(0, 1), (60, None), (120, 3), (180, 4)]}, value=str)
    assert 'aria-label="A &amp; B. one: at most 4"' in chart
    (drawn,) = re.findall(r'<path d="([^"]+)"', chart)
    assert drawn.count("M") == 2
    assert charts.line_chart("Empty", {"one": [(0, None)]}, value=str) == ""


def test_bars_stand_for_as_many_hours_as_can_be_told_apart() -> None:
    levels = [
        {"hour": MONDAY + timedelta(hours=hour), "ended": 2, "completed": 1, "errors": 1, "poisoned": 0}
        for hour in range(24 * 100)
    ]
    bars, names = ended_bars(levels)
    assert names == ["completed", "failed"]
    assert len(bars) == 50 and bars[0] == ("05 Jan", [48.0, 48.0])
    assert ended_bars([]) == ([], [])
    assert "completed: 2400; failed: 2400" in charts.bar_chart("Bars", bars, names, value=lambda one: f"{one:.0f}")
