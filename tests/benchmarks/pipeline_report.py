"""How long ``report`` takes over a lake: ``python -m tests.benchmarks.pipeline_report --rows 5000000``.

The lake is made up by Spark: ten queues, ninety days, one in fifty tasks in ERROR, one in ten taken twice. It is kept
in ``--lake`` when that is given, and used again. The figure is that of a whole ``report`` with its page, its JSON and
its tables, in a process of its own with two cores and 2 GiB for the driver; Spark's start is told apart. The first
report sums up each day; with ``--runs 2`` the second one reads these summaries.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import perf_counter

import pyarrow as pa
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from django_dbtaskqueue.pipeline.lake import LAKE_TASKS, Lake
from django_dbtaskqueue.pipeline.lake.export import Export, described, pieces
from django_dbtaskqueue.pipeline.reports.report import Report
from django_dbtaskqueue.pipeline.source.task_reader import task_attempt_id
from django_dbtaskqueue.pipeline.spark import spark_session

DAYS = 90
BEGAN = 1_767_225_600  # 2026-01-01


def main() -> None:
    """Make the lake, unless it is there, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--lake", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    began = perf_counter()
    spark = spark_session(master="local[2]", memory="2g")
    print(f"Spark started in {perf_counter() - began:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        lake = options.lake or Path(folder) / "lake"
        if not lake.exists():
            began = perf_counter()
            make(spark, lake, options.rows)
            print(f"lake of {options.rows:,} tasks made in {perf_counter() - began:.1f} s")
        for number in range(options.runs):
            began = perf_counter()
            context = Report.context(spark=spark, lake=lake, out=Path(folder) / f"out-{number}")
            print(Report().run(context)["summary"])
            print(f"report in {perf_counter() - began:.1f} s")


def make(spark: SparkSession, path: Path, rows: int) -> None:
    """Write a lake of so many archived tasks with the archive's own writer."""
    lake = Lake.at(path, create=True)
    export = Export(lake, uuid.uuid4().hex)
    columns = values(rows)
    frame = spark.range(rows, numPartitions=max(4, rows // 500_000)).select(
        *(columns.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in LAKE_TASKS.fields)
    )

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for index, table in enumerate(pieces(batches)):
            yield from described(export.write("tasks", table, f"{task_attempt_id()}-{index}"))

    lake.commit("tasks", export.files_of(frame, write))


def values(rows: int) -> dict[str, Column]:
    """Return the columns that say something."""
    created = BEGAN + F.col("id") * (DAYS * 86_400 / rows)
    started = created - F.log1p(-F.rand(1)) * 20
    ended = started - F.log1p(-F.rand(2)) * 2
    failed = F.pmod(F.hash("id"), F.lit(50)) == 0
    queue = F.concat(F.lit("queue-"), F.pmod(F.xxhash64("id"), F.lit(10)).cast("string"))
    return {
        "id": F.col("id"),
        "location": F.lit("dbtaskqueue.task"),
        "queue_name": queue,
        "reference_number": F.concat(F.lit("2013-01-01/UA"), F.col("id")),
        "status": F.when(failed, "ERROR").otherwise("COMPLETED"),
        "attempt": F.lit(1),
        "reenqueue_attempt": F.lit(0),
        "total_attempt": F.when(F.pmod(F.hash("id"), F.lit(10)) == 1, 2).otherwise(1),
        "payload": F.concat(F.lit('{"flight": "UA'), F.col("id"), F.lit('", "delay": 12}')),
        "process_result": F.when(failed, F.concat(F.lit("Traceback\nValueError: no flight UA"), F.col("id"))),
        "create_time": F.timestamp_seconds(created),
        "start_time": F.timestamp_seconds(started),
        "finish_time": F.timestamp_seconds(ended),
        "finished_date": F.to_date(F.timestamp_seconds(ended)),
    }


if __name__ == "__main__":
    main()
