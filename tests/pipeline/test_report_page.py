"""Reports as pages: numbers for people, charts from figures, and a file that needs nothing and runs nothing foreign."""

import base64
import hashlib
import json
import re
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from django.core.management import CommandError, call_command
from django.test.html import parse_html

from django_dbtaskqueue.core.durations import percent, seconds, thousands
from django_dbtaskqueue.operations.report_page import html_file, report_body
from django_dbtaskqueue.pipeline.reports.report import MAX_CHART_STEPS, over_time
from tests.operations.site import elements
from tests.pipeline.histories import HOUR, MONDAY
from tests.report_figures import forecast_figures, report_figures, whatif_figures

HOSTILE = "<script>alert(1)</script>\"'&"


def test_numbers_are_written_for_people() -> None:
    times = (0.0123, 3.456, 119.0, 300.0, 9000.0, 864_000.0)
    assert [*map(seconds, times)] == ["12.3ms", "3.45s", "1m59s", "5m", "2h30m", "10d"]
    assert [*map(percent, (1.0, 0.999_999, 0.97, 0.0, 0.12345))] == ["100 %", "> 99.99 %", "97 %", "0 %", "12.35 %"]
    assert [*map(thousands, (12_345, 0.12345, 1234.5, 7))] == ["12,345", "0.123", "1,234", "7"]


def level(hour: int, **columns: Any) -> dict[str, Any]:
    counts = {"ended": 2, "good": 1, "completed": 1, "errors": 1, "poisoned": 0, "wait_p95": None, "run_p95": None}
    return {"queue": "claims", "hour": MONDAY + HOUR * hour, "failure_rate": 0.5, **counts, **columns}


def backlog_of(values: dict[int, int]) -> pd.DataFrame:
    rows = {"queue": "claims", "hour": [MONDAY + HOUR * hour for hour in values], "backlog": list(values.values())}
    return pd.DataFrame(rows).astype({"hour": "datetime64[us, UTC]"})


def test_a_chart_keeps_the_peaks_in_few_steps_and_shows_what_was_spent_of_a_budget() -> None:
    levels = [level(hour, wait_p95=9.0 if hour == 77 else 1.0) for hour in range(24 * 100)]
    found = over_time(pd.DataFrame(levels), backlog_of({}), {}, HOUR)
    assert len(found["times"]) <= MAX_CHART_STEPS and found["times"][:2] == [MONDAY, MONDAY + timedelta(days=1)]
    assert (found["completed"][0], sum(found["completed"]), sum(found["failed"])) == (24, 2400, 2400)
    (waits,) = found["wait_p95"]
    assert (waits["name"], waits["values"][:5]) == ("claims", [1.0, 1.0, 1.0, 9.0, 1.0])
    assert found["run_p95"] == found["backlog"] == []
    levels = [level(0), level(2, ended=4, good=1), {**level(1), "queue": "exact"}]
    found = over_time(pd.DataFrame(levels), backlog_of({}), {"claims": 2.0, "exact": 0.0}, HOUR)
    assert found["budget_spent"] == [{"name": "claims", "values": [0.5, 0.5, 2.0]}]


def test_the_steps_of_a_short_span_are_those_of_its_rows() -> None:
    levels = [{**level(0), "hour": MONDAY + timedelta(seconds=10 * number)} for number in range(4)]
    second, minute = timedelta(seconds=1), timedelta(minutes=1)
    assert len(over_time(pd.DataFrame(levels), backlog_of({}), {}, shortest=second)["times"]) == 31
    assert len(over_time(pd.DataFrame(levels), backlog_of({}), {}, shortest=minute)["times"]) == 1
    figures = report_figures()
    _, *later = figures["over_time"]["times"]
    figures["over_time"]["times"] = ["2026-01-05T00:00:07+00:00", *later]
    assert "2026-01-05 00:00:07</time>" in str(report_body("report", figures))


def test_a_backlog_stays_as_it_was_where_nothing_happened() -> None:
    quiet = pd.DataFrame([level(0), level(4)])

    def shown(backlog: dict[int, int]) -> list[Any]:
        return [line["values"] for line in over_time(quiet, backlog_of(backlog), {}, HOUR)["backlog"]]

    assert shown({-9: 30, -8: 5, 1: 7, 3: 2}) == [[5, 7, 7, 2, 2]]
    assert shown({}) == []
    assert shown({2: 1}) == [[None, None, 1, 1, 1]]


def test_a_page_has_the_figures_as_people_write_them() -> None:
    page = str(report_body("report", report_figures(since=None)))
    assert '<td class="number">12,345</td>' in page and '<td class="number">1m1s</td>' in page
    assert "the beginning to 2026-01-12 00:00 UTC" in page
    assert '<td class="number">-</td>' in page, "what is unknown is a dash"
    assert page.count('class="dbtq-broken"') == 3, "two budgets and one noisy queue"
    assert "all, and there was none" in page and '<p class="quiet">None.</p>' in page
    assert '<time datetime="2026-01-05T01:00:00+00:00">2026-01-05 01:00</time>' in page
    assert re.search('<td class="number" data-value="2.4[0-9]*">2.4[0-9]* %</td>', page)
    charts = re.findall('id="dbtq-([a-z]+)-chart"', page)
    assert charts == ["ended", "wait", "backlog", "budget", "failures"], "none is empty"


def test_a_forecast_is_a_map_of_the_week_and_a_replay_shows_its_waits() -> None:
    page = str(report_body("forecast", forecast_figures()))
    assert page.count('<tr><th scope="row">Mon</th>') == 2 and "dbtq-heat-9" in page
    assert '<td class="number dbtq-heat-0"></td>' in page, "of an hour that was not seen nothing is said"
    assert "Sunday 10-14" in page
    page = str(report_body("whatif", whatif_figures()))
    assert re.findall('id="dbtq-([a-z]+)-chart"', page) == ["wait", "curve"]
    assert '<th scope="row"><data value="100">100 %</data></th>' in page
    row = '<th scope="row">p95</th><td class="number">3m</td><td class="number">2m</td><td class="number">30s</td>'
    assert row in page and "mean_lead" not in page


def test_names_are_text_and_secrets_are_masked() -> None:
    page = str(report_body("report", report_figures(HOSTILE)))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in page
    assert "sesame" not in str(report_body("report", report_figures("password=sesame")))
    assert "alert(1)</script>" not in html_file("report", report_figures(HOSTILE))


def test_figures_of_another_kind_or_version_are_no_page() -> None:
    for kind, found in (("other", {}), ("report", {}), ("whatif", {"over_time": []})):
        assert report_body(kind, found) is None
        with pytest.raises(ValueError, match="no figures of report or forecast or whatif"):
            html_file(kind, found)


def test_a_file_stands_alone_and_runs_no_script_but_its_own() -> None:
    page = html_file("report", report_figures(HOSTILE))
    found = [*elements(parse_html(page))]  # which refuses a page whose elements are not closed
    assert not {one.name for one in found} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    attributes = [dict(one.attributes) for one in found]
    assert not {*chain(*attributes)} & {"src", "href", "srcset", "style", "onload", "onclick"}
    assert not re.search(r"url\(|@import", page)
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    (policy,) = (one["content"] for one in attributes if "http-equiv" in one)
    scripts = re.findall("<script[^>]*>(.+?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes and len(hashes) == 2
    assert policy.startswith("default-src 'none';")


def test_a_command_makes_the_page_of_figures(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report_figures()))
    call_command("runtaskpipeline", "page", str(file))
    assert (tmp_path / "report.html").read_text() == html_file("report", report_figures())
    file.write_text(json.dumps({"rows": 1}))
    with pytest.raises(CommandError, match=r"report\.json cannot be made a page"):
        call_command("runtaskpipeline", "page", str(file))
    with pytest.raises(CommandError, match="page needs one file"):
        call_command("runtaskpipeline", "page")
