"""The job ``report`` on real databases and a lake: its figures, and every place it writes them to."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.core.exceptions import JobOptionError, PipelineError
from django_dbtaskqueue.core.masking import MASKED
from django_dbtaskqueue.models import Attempt, PipelineReport, TaskHistory
from django_dbtaskqueue.operations.report_page import html_file
from django_dbtaskqueue.pipeline import reports, source
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Job, Objective, result_json
from django_dbtaskqueue.pipeline.reports.quality import Check
from django_dbtaskqueue.pipeline.reports.report import Report
from django_dbtaskqueue.pipeline.source import few_tasks, schema_of
from tests.factories import make_task
from tests.pipeline.histories import HOUR, MONDAY, times
from tests.pipeline.lakes import archive, flip
from tests.support import output_of

SAID = "password=hunter for no <b>mailbox</b>"  # stored before there was a rule for it


def fill() -> None:
    """Store a small Monday: ten claims of which the last is in history, one failed mail, one that waits."""
    claims = [times(MONDAY + number * HOUR, waited=10 * number + 10, ran=2) for number in range(10)]
    for number, one in enumerate(claims[:9]):
        make_task("COMPLETED", queue="claims", reference=f"A{number}", **one)
    done = {**claims[9], "status": "COMPLETED", "attempt": 1, "total_attempt": 1}
    TaskHistory.objects.create(queue="claims", reference="A9", task_id=1, **done)
    bad = make_task("ERROR", queue="mails", process_result=f"ValueError: {SAID} 'x'", **times(MONDAY, ran=4))
    like = {"error_type": "builtins.ValueError", "message": f"{SAID} 'y'", "task_id": bad.pk}
    like |= {"start_time": MONDAY, "finish_time": MONDAY + timedelta(seconds=4), "queue": "mails"}
    for attempt in range(5):
        Attempt.objects.create(attempt=attempt, total_attempt=attempt, **like)
    make_task("CREATED", queue="mails", create_time=MONDAY)


def report(spark: SparkSession, database: Database | None, **options: Any) -> dict[str, Any]:
    return dict(Report().run(Report.context(spark=spark, database=database, **options)))


@pytest.mark.slow
def test_it_says_everywhere_how_queues_were_served(spark: SparkSession, database: Database, tmp_path: Path) -> None:
    fill()
    folder = tmp_path / "out"
    objective = (Objective("claims", 0.9, timedelta(seconds=95)),)
    found = report(spark, database, out=str(folder), objective=objective, render_page=html_file)
    everything = found["everything"]
    assert (everything["arrived"], everything["ended"], everything["completed"]) == (12, 11, 10)
    claims, mails = found["queues"]
    assert (claims["queue"], claims["ended"], claims["success_rate"]) == ("claims", 10, 1.0)
    assert [claims["wait_p50"], claims["wait_p95"]] == pytest.approx([50, 100], rel=0.01)
    assert (mails["arrived"], mails["errors"], mails["retries"]) == (2, 1, 4)
    budgets = {one["queue"]: one for one in found["budgets"]}
    assert (budgets["claims"]["bad"], budgets["claims"]["spent"]) == (1, pytest.approx(1.0))
    assert budgets["mails"]["spent"] == pytest.approx(100)
    assert "Beyond their error budget: mails." in found["summary"]
    (failure,) = found["failures"]
    assert failure["message"] == f"ValueError: password={MASKED} for no <b>mailbox</b> '…'"
    assert (failure["tasks_ended"], failure["attempts_failed"]) == (1, 5)
    assert found["retry_waste"][0]["wasted_seconds"] == 20.0
    assert json.loads((folder / "report.json").read_text())["everything"]["ended"] == 11
    levels = duckdb.sql(f"SELECT queue, sum(ended) FROM '{folder}/levels.parquet' GROUP BY queue ORDER BY queue")
    assert levels.fetchall() == [("claims", 10), ("mails", 1)]
    row = PipelineReport.objects.get(pk=found["report_id"])
    assert (row.kind, row.summary, row.location) == ("report", found["summary"], str(folder))
    assert row.data == json.loads((folder / "report.json").read_text())
    assert sum(row.data["over_time"]["completed"]) == 10
    shown = [*map(str, duckdb.sql(f"FROM '{folder}/failures.parquet'").fetchall()), json.dumps(row.data)]
    assert all("mailbox" in one and "hunter" not in one for one in shown)
    page = (folder / "report.html").read_text()
    assert page == html_file("report", row.data)
    assert "&lt;b&gt;mailbox" in page and "<b>mailbox" not in page
    assert Report().as_text(found).endswith(f"page: {folder}/report.html\nreport id: {row.pk}")


def test_a_dry_run_leaves_out_damaged_files_and_writes_nothing(spark: SparkSession, sqlite: Any, folder: Path) -> None:
    fill()
    archive(sqlite, folder, source="task", limit=6, batch_size=2)
    flipped, gone, *_sound = folder.glob("tasks/*/*.parquet")
    lost = {time.hour for one in (flipped, gone) for time in pq.read_table(one)["finish_time"].to_pylist()}
    gone.unlink()
    flip(flipped, flipped.stat().st_size // 2)
    period = {"since": "2026-01-05T01:00", "until": "2026-01-05T10:00"}
    options = {"lake": folder, "out": str(folder.with_name("out")), "dry_run": True, **period}
    context = Report.context(spark=spark, database=sqlite, **options)
    found = Report().run(context)
    assert (found["everything"]["ended"], found["since"]) == (len({*range(1, 10)} - lost), MONDAY + HOUR)
    assert found["summary"].endswith("Damaged files of the lake were left out: 2.")
    assert len(context.damaged) == 2 and all(str(one) in "".join(context.damaged) for one in (flipped, gone))
    assert context.session["short"] is False, "a session that it started would stay, and work for others"
    assert not folder.with_name("out").exists() and not PipelineReport.objects.exists()


@pytest.mark.slow
def test_a_report_on_few_tasks_asks_little_of_spark(spark: SparkSession, sqlite: Database, folder: Path) -> None:
    fill()
    archive(sqlite, folder, limit=5)
    tracker, name = spark.sparkContext.statusTracker(), "few"
    spark.sparkContext.setJobGroup(name, "a report")
    try:
        assert report(spark, sqlite, lake=folder, store=False)["everything"]["ended"] == 11
        jobs = [tracker.getJobInfo(one) for one in tracker.getJobIdsForGroup(name)]
        assert 9 <= len(jobs) <= 15  # 14; with a sort in Spark or adaptive plans, over 30
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        assert sum(stage.numTasks for stage in stages if stage) <= 30  # 20; over 90 where Spark reads the files
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


@pytest.mark.slow
def test_few_and_many_have_equal_figures(spark: SparkSession, pg: Database, tmp_path: Path, monkeypatch: Any) -> None:
    fill()
    archive(pg, tmp_path / "lake", limit=6)
    options = {"lake": tmp_path / "lake", "store": False, "since": "2026-01-05"}
    few = report(spark, pg, out=str(tmp_path / "few"), **options)
    monkeypatch.setattr(source, "MAX_FEW_BYTES", 0)
    monkeypatch.setattr(reports, "MAX_FEW_LAKE_ROWS", 0)
    many = report(spark, pg, out=str(tmp_path / "many"), **options)
    assert not (tmp_path / "few" / "report.html").exists(), "without Django there is no page"
    file = tmp_path / "few" / "report.json"
    assert Report().as_text(few).endswith(f"figures: {file}; for a page: manage.py runtaskpipeline page {file}")
    aside = {"folder", "days_kept"}
    assert {name: few[name] for name in few.keys() - aside} == {name: many[name] for name in many.keys() - aside}
    tables = {one.name: pq.read_table(one) for one in (tmp_path / "few").glob("*.parquet")}
    assert tables == {one.name: pq.read_table(one) for one in (tmp_path / "many").glob("*.parquet")}
    assert {"levels.parquet", "failures.parquet", "retry_waste.parquet"} <= tables.keys()


def test_an_empty_chunk_of_few_rows_hides_none_after_it(spark: SparkSession) -> None:
    chunks = [pa.table({"id": pa.array(ids, pa.int64())}) for ids in ([1, 2], [], [3])]
    found = reports.spark_frame(spark, [pa.concat_tables(chunks)], schema_of("task", ["id"]))
    assert sorted(row.id for row in found.collect()) == [1, 2, 3]


def test_what_is_too_large_for_the_driver_is_left_to_spark(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    fill()
    assert few_tasks(database, ["queue_name"], "task").num_rows == 11
    monkeypatch.setattr(source, "MAX_FEW_BYTES", 20)
    assert few_tasks(database, ["queue_name"], "task") is None


@pytest.mark.slow
@pytest.mark.parametrize("step", [timedelta(seconds=1), timedelta(minutes=1)])
def test_a_short_span_has_short_steps(spark: SparkSession, sqlite: Database, step: timedelta) -> None:
    apart = 20 * step
    for number in range(3):
        make_task("COMPLETED", **times(MONDAY + number * apart, waited=0, ran=1))
    found = report(spark, sqlite, store=False)
    charts = found["over_time"]
    assert charts["times"][1] - charts["times"][0] == step
    assert (len(charts["times"]), sum(charts["completed"])) == (2 * apart // step + (1 if step.seconds == 60 else 2), 3)
    assert max(one for one in charts["backlog"][0]["values"]) <= 1 and found["everything"]["arrived"] == 3
    assert "2026-01-05 00:00" in html_file("report", json.loads(result_json(found)))


@pytest.mark.usefixtures("spark", "sqlite")
@pytest.mark.parametrize(
    "words", ["whatif --slots 2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("report", "forecast"))]
)
def test_of_an_empty_database_a_command_says_so_and_succeeds(tmp_path: Path, words: str) -> None:
    said = output_of("runtaskpipeline", *words.split(), "--out", tmp_path / "out", "--quiet")
    assert said == "There is no task yet, so there is nothing to compute from.\n"
    assert not (tmp_path / "out").exists() and not PipelineReport.objects.exists()


@pytest.mark.slow
def test_an_unknown_queue_is_named_with_its_nearest(spark: SparkSession, pg: Database) -> None:
    fill()
    with pytest.raises(JobOptionError, match=r"no task of a queue 'claim'\. Did you mean 'claims'"):
        report(spark, pg, queue="claim")
    with pytest.raises(PipelineError, match="There is no task in the time from the beginning to 2020"):
        report(spark, pg, until="2020-01-01")


def test_what_cannot_be_is_said_before_anything_is_read(tmp_path: Path) -> None:
    (mine := tmp_path / "mine.txt").write_text("not a report")
    for options, reason in (
        ({"out": str(tmp_path)}, r"--out: .* holds other data\. Give --out a folder of its own"),
        ({"out": str(mine / "out")}, "--out: .* is not a file that can be written"),
        ({"since": "2026-02-01", "until": "2026-01-01"}, "--since: 2026-02-01 00:00 is not before the end"),
        ({"lake": None}, "there is nothing to read: name a lake, a database, or both"),
        ({"objective": "claims"}, "--objective: 'claims' is not an objective"),
        ({"top": -5}, "--top: '-5' is not a whole number of at least 1"),
        ({"store": "no"}, "--store: 'no' is not True or False"),
        ({"objectiv": "claims"}, r"objectiv: there is no such option. Did you mean 'objective'"),
    ):
        with pytest.raises(JobOptionError, match=reason):
            Report().run(Report.context(**{"lake": "nowhere", **options}))
    assert [*tmp_path.iterdir()] == [mine]


@pytest.mark.slow
@pytest.mark.parametrize("job", [Report, Check])
def test_an_archive_meanwhile_takes_nothing(spark: SparkSession, pg: Database, tmp_path: Path, job: type[Job]) -> None:
    """The archive moves every task between the job's first look at the lake and its reading of the database."""
    fill()
    TaskHistory.objects.all().delete()
    archive(pg, tmp_path / "lake", limit=2)
    expected = job().run(job.context(spark=spark, database=pg, lake=tmp_path / "lake"))
    moved = []

    def meddle(step: str, _done: int, _total: int) -> None:
        if step == "reading tasks" and not moved:
            moved.append(archive(pg, tmp_path / "lake", compact=1)["tasks"])

    found = job().run(job.context(spark=spark, database=pg, lake=tmp_path / "lake", progress=meddle))
    assert moved[0] > 0
    names = ("queues", "summary", "rows", "findings")
    assert {name: found.get(name) for name in names} == {name: expected.get(name) for name in names}
