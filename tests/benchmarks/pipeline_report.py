"""How long ``report`` takes over a lake: ``python -m tests.benchmarks.pipeline_report --rows 5000000``.

The lake is made up by Spark: ten queues, ninety days, one in fifty tasks in ERROR, one in ten taken twice. The figure
is that of a whole ``report`` with its page, its JSON and its tables, with two cores and 2 GiB for the driver; Spark's
start is told apart. The first report sums up each day; with ``--runs 2`` the second one reads these summaries.
"""

import argparse
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    spark = timed("Spark started", lambda: spark_session(master="local[2]", memory="2g"))
    with tempfile.TemporaryDirectory() as folder:
        lake = Path(folder) / "lake"
        timed(f"lake of {options.rows:,} tasks made", lambda: make(spark, lake, options.rows))
        for number in range(options.runs):
            out = Path(folder) / f"out-{number}"
            done = timed("report", lambda out=out: Report().run(Report.context(spark=spark, lake=lake, out=out)))
            print(done["summary"])


def timed(what: str, act: Callable[[], Any]) -> Any:
    began = perf_counter()
    done = act()
    print(f"{what} in {perf_counter() - began:.1f} s")
    return done


def make(spark: SparkSession, path: Path, rows: int) -> None:
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
    created = BEGAN + F.col("id") * (DAYS * 86_400 / rows)
    started = created - F.log1p(-F.rand(1)) * 20
    ended = started - F.log1p(-F.rand(2)) * 2
    failed = F.pmod(F.hash("id"), F.lit(50)) == 0
    same = {"location": "dbtaskqueue.task", "attempt": 1, "reenqueue_attempt": 0}
    return {
        **{name: F.lit(value) for name, value in same.items()},
        "id": F.col("id"),
        "queue_name": F.concat(F.lit("queue-"), F.pmod(F.xxhash64("id"), F.lit(10)).cast("string")),
        "reference_number": F.concat(F.lit("2013-01-01/UA"), F.col("id")),
        "status": F.when(failed, "ERROR").otherwise("COMPLETED"),
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
