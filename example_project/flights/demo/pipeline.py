"""The demo's data engineer: Spark cleans the whole year, feeds the queue, reports on it and archives what is done."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from django_dbtaskqueue import codecs, conf
from django_dbtaskqueue.exceptions import TaskQueueError
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.pipeline.archive import Archive
from django_dbtaskqueue.pipeline.enqueue_job import Enqueue
from django_dbtaskqueue.pipeline.jobs import Context, Job
from django_dbtaskqueue.pipeline.lake import Lake, read_lake
from django_dbtaskqueue.pipeline.report import Report
from django_dbtaskqueue.pipeline.session import spark_session
from example_project.flights import data, timetable
from example_project.flights.demo import setup
from example_project.flights.desk import QUEUE, FlightClaim

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


class PipelineFailed(Exception):
    """A job of the pipeline could not do its work."""


@dataclass(slots=True)
class Engineer:
    """One Spark session, and what it found. ``lake`` is kept between runs; the session ends with the demo."""

    lake: Path
    say: Callable[[str, object], None]
    spark: SparkSession = field(init=False)
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spark = _tried(lambda: spark_session(app_name="flight desk", memory="1g"))

    def enqueue(self, references: Collection[str], passenger: str) -> int:
        """Clean all flights of the year and enqueue the claims of those named; return how many are new.

        One transaction. A claim that is in the queue already is passed over.
        """
        with tempfile.TemporaryDirectory() as folder:
            raw = timetable.read(self.spark, data.extract(Path(folder)))
            flights = timetable.cleaned(raw).cache()
            read, clean = raw.count(), flights.count()
            claims = Path(folder) / "claims.parquet"
            timetable.claims(flights, references, passenger).write.parquet(str(claims))
            flights.unpersist()
            self.found.update(flights_read=read, flights_clean=clean)
            self.say("Spark", f"read {read:,} flights of 2013, of which {clean:,} are sound")
            done = self._run(
                Enqueue,
                input=[str(claims)],
                queue=QUEUE,
                map=[("reference", "flight"), ("payload", "flight,passenger"), ("payload_type", _payload_type())],
                on_duplicate="ignore",
                require_reference=True,
                max_attempts=conf.queue_settings(QUEUE).max_attempts,
            )
        self.found["enqueue"] = done
        return int(done["enqueued"])

    def report(self, folder: Path) -> str:
        """Report on the queue; return it in a sentence. The page stands in ``folder`` and in the database."""
        done = self._run(Report, out=str(folder), since=timedelta(days=1))
        self.found["report"] = {"summary": done["summary"], "folder": str(folder)}
        return str(done["summary"])

    def archive(self) -> int:
        """Move what is completed to the lake; return how many tasks. What an operator has to look at stays."""
        done = self._run(Archive, older_than=timedelta(0), queue=[QUEUE], status=["COMPLETED"])
        self.found["archive"] = done
        return int(done["tasks"])

    def archived(self) -> dict[str, int]:
        """Count the tasks of the lake by status, by reading it."""
        tasks = _tried(lambda: read_lake(self.spark, self.lake)).where(f"queue_name = '{QUEUE}'")
        return {row["status"]: row["count"] for row in tasks.groupBy("status").count().collect()}

    def _run(self, kind: type[Job], **options: Any) -> dict[str, Any]:
        context: Context = kind.context(database=database_of_alias(None), lake=self.lake, spark=self.spark, **options)
        return dict(_tried(lambda: kind().run(context)))


@contextmanager
def engineer(say: Callable[[str, object], None]) -> Iterator[Engineer]:
    """Hire an engineer for a while."""
    lake = setup.lake()
    Lake.at(lake, create=True)
    hired = Engineer(lake, say)
    try:
        yield hired
    finally:
        hired.spark.stop()


def _payload_type() -> str:
    return f"'{codecs.type_name(FlightClaim)}'"


def _tried(work: Callable[[], T]) -> T:
    try:
        return work()
    except TaskQueueError as error:
        raise PipelineFailed(str(error)) from error
