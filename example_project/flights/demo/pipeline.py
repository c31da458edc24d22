"""The demo's data engineer: Spark cleans the whole year, feeds the queue, reports on it and archives what is done."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import codecs
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.report_page import html_file
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.lake.archive_jobs import Archive
from django_dbtaskqueue.pipeline.reports.report import Report
from django_dbtaskqueue.pipeline.source.enqueue_job import Enqueue
from django_dbtaskqueue.pipeline.spark import spark_session
from example_project.flights import data, timetable
from example_project.flights.demo import setup
from example_project.flights.desk import QUEUE, FlightClaim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_KEPT_COMPLETED = 1_000  # tasks that stay in the table


@dataclass(slots=True)
class Engineer:
    """One Spark session, and what it found. ``lake`` is kept between runs, ``folder`` is not."""

    lake: Path
    folder: Path
    spark: SparkSession
    found: dict[str, Any] = field(default_factory=dict)

    def clean(self) -> tuple[int, int]:
        """Read all flights of the year and keep the sound ones, as Parquet; return the numbers of both."""
        raw = timetable.read(self.spark, data.extract(self.folder))
        timetable.cleaned(raw).write.parquet(self._flights)
        read, clean = raw.count(), self.spark.read.parquet(self._flights).count()
        self.found.update(flights_read=read, flights_clean=clean)
        return read, clean

    def select(self, references: Collection[str], passenger: str) -> None:
        """Choose the cleaned flights to claim for, as Parquet."""
        flights = self.spark.read.parquet(self._flights)
        timetable.claims(flights, references, passenger).write.parquet(self._claims)

    def enqueue(self) -> int:
        """Enqueue the chosen claims, in one transaction; return how many are new.

        A claim that is in the queue already is passed over.
        """
        self.found["enqueue"] = done = self._run(
            Enqueue,
            input=[self._claims],
            queue=QUEUE,
            map=[("reference", "flight"), ("payload", "flight,passenger"), ("payload_type", _payload_type())],
            on_duplicate="ignore",
            require_reference=True,
            max_attempts=conf.default_settings(QUEUE).max_attempts,
        )
        return int(done["enqueued"])

    def report(self, folder: Path) -> str:
        """Report on the queue and return the summary. The page is in ``folder``, the figures also in the database."""
        done = self._run(Report, out=str(folder), since=timedelta(days=1), render_page=html_file)
        self.found["report"] = {"summary": done["summary"], "folder": str(folder)}
        return str(done["summary"])

    def archive(self) -> int:
        """Move the first half of what is completed to the lake; return how many tasks.

        What an operator has to look at stays, and so do at most 1,000 completed tasks, to be seen in the admin.
        """
        completed = Task.objects.filter(queue=QUEUE, status=Status.COMPLETED).count()
        moved = completed - min(MAX_KEPT_COMPLETED, completed // 2)
        # By their number: by their age, a slow start of Spark would make the kept ones old enough, too.
        done = self._run(Archive, older_than=timedelta(0), limit=max(1, moved), queue=[QUEUE], status=["COMPLETED"])
        self.found["archive"] = done
        return int(done["tasks"])

    def archived(self) -> dict[str, int]:
        """Count the tasks of the lake by status, by reading it."""
        tasks = read_lake(self.spark, self.lake).where(f"queue_name = '{QUEUE}'")
        return {row["status"]: row["count"] for row in tasks.groupBy("status").count().collect()}

    @property
    def _flights(self) -> str:
        return str(self.folder / "flights.parquet")

    @property
    def _claims(self) -> str:
        return str(self.folder / "claims.parquet")

    def _run(self, kind: type[Job], **options: Any) -> dict[str, Any]:
        context: Context = kind.context(database=database_of_alias(None), lake=self.lake, spark=self.spark, **options)
        return dict(kind().run(context))


@contextmanager
def engineer() -> Iterator[Engineer]:
    """Hire an engineer for a while: starts Spark, and stops it at the end."""
    lake = setup.lake()
    Lake.at(lake, create=True)
    spark = spark_session(app_name="flight desk", memory="1g")
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Engineer(lake, Path(folder), spark)
    finally:
        spark.stop()


def _payload_type() -> str:
    return f"'{codecs.type_name(FlightClaim)}'"
