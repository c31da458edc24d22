"""``forecast`` and ``whatif`` from rows of a database."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError
from django_dbtaskqueue.models import PipelineReport, Poller, Task
from django_dbtaskqueue.operations.report_page import report_body
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.reports.forecast import Forecast
from django_dbtaskqueue.pipeline.reports.whatif import WhatIf
from tests.factories import make_task
from tests.pipeline.histories import HOUR, MONDAY, times


def busy_monday() -> None:
    """Store two weeks in which 400 tasks of 20 seconds arrive on Monday from nine to ten, and one at any other hour."""
    hours = [(MONDAY + HOUR * hour, 400 if hour % 168 == 9 else 1) for hour in range(2 * 168)]
    like = {"queue": "claims", "status": "COMPLETED", "ready_time": None, "final_status": "COMPLETED"}
    like |= {"attempt": 1, "total_attempt": 1}
    made = [times(start + timedelta(seconds=9 * number), ran=20) for start, count in hours for number in range(count)]
    Task.objects.bulk_create([Task(**like, **one) for one in made], batch_size=500)


def test_it_says_in_one_sentence_where_pollers_are_missing(spark: SparkSession, pg: Database) -> None:
    busy_monday()
    Poller.objects.create(instance="a", slots=2, state="RUNNING")
    found = Forecast().run(Forecast.context(spark=spark, database=pg, until="2026-01-19"))
    assert (found["pollers"], found["slots"], found["run_seconds"]) == (1, 2, pytest.approx(20))
    said = "Add 1 poller Monday 09-10 UTC, to keep 95 % of the waits within 30s: it needs 2"
    assert found["summary"].startswith(said) and {one["when"] for one in found["stretches"]} == {"Monday 09-10"}
    row = PipelineReport.objects.get()
    page = str(report_body(row.kind, row.data))
    assert ">Pollers needed<" in page and "How good the forecast is" in page
    text = Forecast().as_text(found)
    assert text.startswith(found["summary"])
    assert "mean error 0 an hour (same hour last week: 0); weeks tested: 1; hours in the 90 % interval: not" in text


def test_without_a_run_nothing_can_be_said(spark: SparkSession, sqlite: Database) -> None:
    make_task("CREATED")
    with pytest.raises(PipelineError, match="nothing says how long tasks run"):
        Forecast().run(Forecast.context(spark=spark, database=sqlite))


def test_a_replay_of_real_rows_shows_what_more_slots_would_do(spark: SparkSession, database: Database) -> None:
    for number in range(6):
        make_task("COMPLETED", queue="claims", **times(MONDAY, waited=10 * number, ran=10))
    found = WhatIf().run(WhatIf.context(spark=spark, database=database, slots=2))
    assert (found["tasks"], found["slots_now"], found["slots_then"]) == (6, 1, 2)
    assert found["recorded"] == {**found["now"], "mean_lead": 0.0}
    assert (found["now"]["max"], found["then"]["max"]) == (50, 20)
    assert "instead of 50s: shorter." in found["summary"]
    row = PipelineReport.objects.get(kind="whatif")
    assert "Longest wait by share of tasks" in str(report_body(row.kind, row.data))
    assert "wait max: 50s now, 20s then" in WhatIf().as_text(found)
    with pytest.raises(JobOptionError, match=r"no task of a queue 'mails'\. Queues: claims"):
        WhatIf().run(WhatIf.context(spark=spark, database=database, priority="mails=-1"))


def test_pollers_of_a_forecast_are_replayed_hour_by_hour(spark: SparkSession, sqlite: Database, tmp_path: Path) -> None:
    """Ten tasks of five minutes come at ten o'clock in Berlin: one slot until then, ten from then on."""
    ten = MONDAY + 9 * HOUR
    for at in [ten - timedelta(minutes=10)] * 2 + [ten] * 10:
        make_task("COMPLETED", **times(at, waited=0, ran=300))
    hours = [{"hour": hour, "servers": 10 if hour == 10 else 0} for hour in range(168)]
    figures = {"slots": 1, "hours": hours, "time_zone": "Europe/Berlin", "target_wait": 30.0, "share": 0.95}
    file = tmp_path / "forecast.json"
    file.write_text(json.dumps(figures))
    found = WhatIf().run(WhatIf.context(spark=spark, database=sqlite, forecast=str(file)))
    assert (found["slots_then"], found["then"]["max"]) == (10, 300)
    assert found["summary"].endswith("Started within 30s, as the forecast promises for 95 %: 91.67 %.")
    with pytest.raises(JobOptionError, match="give --slots or --forecast"):
        WhatIf().run(WhatIf.context(forecast=str(file), slots=3))
    file.write_text("{}")
    with pytest.raises(JobOptionError, match=r"is not the forecast\.json of this version's job forecast"):
        WhatIf.context(forecast=str(file))
