"""Reports read each closed day of the lake once: the figures are those of a report that reads every task."""

import json
import random
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from django_dbtaskqueue.pipeline import reports
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Job, Objective, result_json
from django_dbtaskqueue.pipeline.lake import LAKE_ATTEMPTS, LAKE_TASKS, DataFile, Lake
from django_dbtaskqueue.pipeline.lake.erase_job import delete_replaced
from django_dbtaskqueue.pipeline.lake.export import Export, key_of, remove_out_of_date
from django_dbtaskqueue.pipeline.reports.forecast import Forecast
from django_dbtaskqueue.pipeline.reports.report import Report
from django_dbtaskqueue.pipeline.source import arrow_schema
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.pipeline.commands import CHEAP, in_turn
from tests.pipeline.lakes import Bucket, flip

FIRST = datetime(2026, 1, 5, tzinfo=UTC)
DAY, HOUR, SECOND = timedelta(days=1), timedelta(hours=1), timedelta(seconds=1)
DAYS = ("2026-01-05", "2026-01-06", "2026-01-07", "2026-01-08")
TASKS_OF_A_DAY = 700  # of all days fewer than a sketch holds: every percentile is exact
PAYLOAD_BYTES = 9_000  # random, so that a lake is not a small one, nor its last three days
UNTIL = FIRST + 10 * DAY
ASIDE = {"days_kept": 0, "written": None}


def fill(place: Path | str, *, days: int = len(DAYS), span: timedelta = DAY) -> Lake:
    """Make a lake of tasks that end within ``span`` of the start of each day, some of them created a day before."""
    lake, chance = Lake.at(place, create=True), random.Random(7)
    for number in range(days):
        add(lake, FIRST + number * DAY, TASKS_OF_A_DAY, chance, span)
    return lake


def add(lake: Lake, day: datetime, count: int, chance: random.Random, span: timedelta = DAY) -> None:
    """Add a file of tasks that ended on a day, and one of their failed attempts."""
    tasks = [task(number, day + chance.random() * span, chance) for number in range(count)]
    attempts = [attempt(one, chance) for one in tasks if one["status"] != "COMPLETED"]
    token = f"{chance.getrandbits(128):032x}"
    for table, rows, fields in (("tasks", tasks, LAKE_TASKS), ("attempts", attempts, LAKE_ATTEMPTS)):
        found = pa.Table.from_pylist(rows, arrow_schema(one for one in fields if one.name != "finished_date"))
        lake.commit(table, [Export(lake, token).write_day(table, str(day.date()), found, "0")], once=(token, 1))


def task(number: int, ended: datetime, chance: random.Random) -> dict[str, Any]:
    ran, waited = chance.random() * 60 * SECOND, chance.choice((SECOND, HOUR, DAY)) * chance.random()
    status = chance.choice(("COMPLETED",) * 8 + ("ERROR", "POISON"))
    return {
        "location": "dbtaskqueue.task", "id": chance.getrandbits(60), "queue_name": chance.choice(("claims", "mails")),
        "status": status, "tag": chance.choice((None, "fast", "bad")), "attempt": 1, "reenqueue_attempt": 0,
        "reference_number": None if number % 3 else f"{chance.choice('ab')}/{number}",
        "total_attempt": chance.choice((1, 1, 1, 2, 4)), "payload": chance.randbytes(PAYLOAD_BYTES).hex(),
        "process_result": None if status == "COMPLETED" else f"Traceback\nValueError: no order {number}",
        "create_time": ended - ran - waited, "start_time": ended - ran, "finish_time": ended,
    }  # fmt: skip


def attempt(of: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    began = of["start_time"] - chance.random() * 2 * DAY  # an attempt may be older than the day its task ended
    return {
        "location": of["location"], "id": chance.getrandbits(60), "task_id": of["id"], "queue_name": of["queue_name"],
        "attempt": 1, "total_attempt": 1, "start_time": began,
        "finish_time": chance.choice((None, *[began + 7 * SECOND] * 9)),
        "error_type": "builtins.ValueError", "message": f"no order {chance.randrange(100)}",
    }  # fmt: skip


def figures(job: type[Job], spark: SparkSession, lake: Path | str, **options: Any) -> dict[str, Any]:
    return dict(job().run(job.context(spark=spark, lake=lake, **{"until": UNTIL, "store": False, **options})))


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two results have the same figures; sums of floats may differ in their last digits."""
    one, other = (
        json.loads(result_json({**figures, **ASIDE}), parse_float=lambda digits: f"{float(digits):.9g}")
        for figures in (found, expected)
    )
    return bool(one == other)


@pytest.fixture
def lake(folder: Path) -> Lake:
    return fill(folder)


@pytest.mark.slow
@pytest.mark.parametrize("job", [Report, pytest.param(Forecast, marks=pytest.mark.soak)])
def test_a_day_that_is_kept_is_not_read_again(spark: SparkSession, lake: Lake, folder: Path, job: type[Job]) -> None:
    whole = figures(job, spark, folder, dry_run=True)
    assert whole["days_kept"] == 0, "a dry run writes nothing"
    first = figures(job, spark, folder)
    assert first["days_kept"] == len(DAYS) and same(first, whole)
    for file in (*lake.files("tasks"), *lake.files("attempts")):
        Path(lake.path(file)).unlink()
    assert same(figures(job, spark, folder), whole)


MAILS = {"objective": (Objective("mails", 0.9, timedelta(minutes=30)), Objective("*", 0.5))}
PERIOD = {"since": FIRST + 1.4 * DAY, "until": FIRST + 3.2 * DAY}
ALL = {"since": FIRST + DAY, "queue": ("claims",), "objective": (Objective("*", 0.9, HOUR),)}


@pytest.mark.soak
@pytest.mark.usefixtures("lake")
@pytest.mark.parametrize("options", [PERIOD, {"queue": ("mails",)}, MAILS, ALL])
def test_options_choose_equally(spark: SparkSession, folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    shutil.copytree(folder, tmp_path / "plain")
    figures(Report, spark, folder, **{name: one for name, one in options.items() if name == "objective"})
    found = figures(Report, spark, folder, **options)
    assert found["days_kept"] > 0
    assert same(found, figures(Report, spark, tmp_path / "plain", dry_run=True, **options))


@pytest.mark.slow
def test_a_day_that_changed_or_is_damaged_is_read_again(spark: SparkSession, lake: Lake, folder: Path) -> None:
    figures(Report, spark, folder)
    kept = {one.day: one for one in lake.files("summaries")}
    assert [*kept] == [*DAYS]
    add(lake, FIRST + DAY, 20, random.Random(8))
    flip(Path(lake.path(kept[DAYS[2]])), kept[DAYS[2]].bytes // 2)
    whole = figures(Report, spark, folder, dry_run=True)
    assert (whole["days_kept"], whole["everything"]["ended"]) == (2, len(DAYS) * TASKS_OF_A_DAY + 20)
    assert same(figures(Report, spark, folder), whole)
    now = {one.day: one for one in lake.files("summaries")}
    assert [*now] == [*DAYS] and lake.sound(now.values()) == [*now.values()]
    assert [day for day in DAYS if now[day] != kept[day]] == [DAYS[1]], "a summary out of date is gone, the others not"
    add(lake, FIRST + 3 * DAY, 20, random.Random(9))
    damaged = next(one for one in lake.files("tasks") if one.day == DAYS[3])
    flip(Path(lake.path(damaged)), damaged.bytes // 2)
    found = figures(Report, spark, folder)
    assert found["days_kept"] == 3 and found["summary"].endswith("Damaged files of the lake were left out: 1.")


@pytest.mark.soak
@pytest.mark.usefixtures("lake")
def test_a_day_with_a_task_in_the_database_is_read(spark: SparkSession, pg: Database, folder: Path) -> None:
    ended = FIRST + 2 * DAY + HOUR
    make_task("COMPLETED", queue="claims", create_time=ended - HOUR, start_time=ended - 2 * SECOND, finish_time=ended)
    expected = figures(Report, spark, folder, database=pg, dry_run=True)
    found = figures(Report, spark, folder, database=pg)
    assert found["days_kept"] == 3 and same(found, expected)
    assert found["everything"]["ended"] == len(DAYS) * TASKS_OF_A_DAY + 1


@pytest.mark.soak
@pytest.mark.usefixtures("lake")
@pytest.mark.parametrize("place", ["summaries", f"summaries/finished_date={DAYS[0]}"], ids=["table", "files"])
def test_a_lake_that_cannot_be_written_to_is_read_whole(spark: SparkSession, folder: Path, place: str) -> None:
    """Also if only Spark's tasks notice it: the table is there, and its files cannot be written."""
    whole = figures(Report, spark, folder, dry_run=True)
    shutil.rmtree(folder / place, ignore_errors=True)
    (folder / place).write_text("no folder")
    said: list[str] = []
    found = figures(Report, spark, folder, progress=lambda text, _done, _total: said.append(text))
    assert found["days_kept"] == 0 and same(found, whole)
    (reason,) = {one for one in said if one.startswith("the summaries of days are not kept: ")}
    assert "summaries" in reason.partition(": ")[2] and "\n" not in reason


@pytest.mark.soak
def test_a_short_span_has_the_days_that_are_kept_too(spark: SparkSession, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(reports, "MAX_FEW_LAKE_ROWS", 0)
    fill(folder, days=1, span=HOUR)
    whole = figures(Report, spark, folder, since=FIRST, dry_run=True)
    found = figures(Report, spark, folder, since=FIRST)
    assert found["days_kept"] == 1 and same(found, whole)
    first, second, *_ = found["over_time"]["times"]
    assert second - first < HOUR


def test_a_summary_of_files_that_were_changed_meanwhile_is_deleted(folder: Path) -> None:
    """A report sums up a day, ``erase`` writes the day again, then the report commits what it made."""
    lake = fill(folder, days=1)
    late = _summary(lake, [*lake.files("tasks"), *lake.files("attempts")])
    add(lake, FIRST, 5, random.Random(3))
    remove_out_of_date(lake, [late])
    assert lake.files("summaries") == [] and not Path(lake.path(late)).exists()


def test_erase_deletes_the_summaries_of_the_days_it_changes(folder: Path) -> None:
    """Also those which a killed run left: the tasks are gone from the lake, and the summary still counts."""
    lake = fill(folder, days=2)
    kept = [_summary(lake, [one for one in lake.files("tasks") if one.day == day]) for day in DAYS[:2]]
    lake.commit("attempts", (), lake.files("attempts"))
    lake.commit("summaries", kept)
    changed, other = kept
    lake.commit("tasks", (), [one for one in lake.files("tasks") if one.day == changed.day])
    remove_out_of_date(lake)
    delete_replaced(lake)
    assert lake.files("summaries") == [other] and not Path(lake.path(changed)).exists()


def _summary(lake: Lake, files: list[DataFile]) -> DataFile:
    rows = pa.table({"part": ["failures"], "queue": ["mails"], "message": ["no mail for Ada"]})
    return Export(lake, key_of(files, "")).write_day("summaries", files[0].day, rows, "0")


@pytest.mark.soak
def test_in_s3_a_day_is_kept_too(sqlite_process_database: ProcessDatabase, bucket: Bucket) -> None:
    fill(bucket.lake)
    words = ("report", "--lake", bucket.lake, "--no-store", "--until", UNTIL.date(), "--json", "-")
    with in_turn(sqlite_process_database, *CHEAP) as run:
        whole, *found = (json.loads(run(*words, *more)[1]) for more in (("--dry-run",), (), ()))
    assert [one["days_kept"] for one in (whole, *found)] == [0, len(DAYS), len(DAYS)]
    assert all(same(one, whole) for one in found)
