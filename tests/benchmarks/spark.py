"""The data source against Spark's own JDBC source, on the same table in the same run.

Both read into the ``noop`` sink and write new tasks from the same two partitions, in turns, on ``local[2]``. JDBC has a
fetch size and a batch size of 10,000 and the driver's ``reWriteBatchedInserts``, and appends in as many transactions as
there are partitions and batches; ours is one. The driver is Debian's: ``apt-get install libpostgresql-jdbc-java``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source.source import open_snapshot, read_tasks, write_tasks
from django_dbtaskqueue.pipeline.spark.session import spark_session
from tests.benchmarks.report import table
from tests.benchmarks.server import Server, serving

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JAR = Path("/usr/share/java/postgresql.jar")
THREE = ["id", "status", "finish_time"]
TASKS = '"dbtaskqueue_task"'
# Finished tasks as a queue leaves them, with payloads of some 150 bytes.
FILL = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, status, final_status, attempt, total_attempt, payload,
    result, poller_instance, ready_time, start_time, finish_time)
SELECT 'queue' || i %% 5, md5(i::text), 'COMPLETED', 'COMPLETED', 1, 1,
    jsonb_build_object('flight', i, 'origin', 'JFK', 'destination', 'SFO', 'text', md5(i::text) || md5(i::text)),
    jsonb_build_object('delay', i %% 100), 'host-1', NULL, now() - interval '1 minute', now()
FROM generate_series(1, %(rows)s) AS i
"""


@dataclass
class Contest:
    """One thing done in several ways; the first way is JDBC's."""

    name: str
    ways: dict[str, Callable[[], object]]
    before: Callable[[], object] = lambda: None
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def run(self, runs: int) -> None:
        """Do each way once to warm up and then ``runs`` times, in turns."""
        for number in range(runs + 1):
            for name, way in self.ways.items():
                self.before()
                start = perf_counter()
                way()
                took = perf_counter() - start
                print(f"{self.name}: {name}: {took:.2f} s{'' if number else ' (warming up)'}", file=sys.stderr)
                if number:
                    self.seconds.setdefault(name, []).append(took)

    def rows(self, count: int) -> list[list[str]]:
        """Return the table's rows: way, seconds, rows a second, times JDBC."""
        medians = {name: statistics.median(values) for name, values in self.seconds.items()}
        base = next(iter(medians.values()))
        return [
            [f"{self.name}: {name}", f"{seconds:.2f}", f"{count / seconds:,.0f}", f"{base / seconds:.2f}"]
            for name, seconds in medians.items()
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print a table."""
    options = _options(arguments)
    with serving() as server:
        database = Database.from_url(server.url)
        spark = spark_session(master="local[2]", memory=options.memory, conf={"spark.jars": str(options.jar)})
        lines = []
        for contest_of in (_reading, _writing):
            contest = contest_of(spark, server, database, options.rows)
            contest.run(options.runs)
            lines += contest.rows(options.rows)
        spark.stop()
    print(f"{options.rows:,} tasks, PostgreSQL {server.version}, local[2] on {os.cpu_count()} cores, median of")
    print(f"{options.runs} runs in turns. `python -m tests.benchmarks.spark --rows {options.rows}`\n")
    print(table(["", "seconds", "rows/s", "times JDBC"], lines))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Tasks read and written (%(default)s).")
    parser.add_argument("--runs", type=int, default=3, help="Readings of each way, after one to warm up (%(default)s).")
    parser.add_argument("--memory", default="2g", help="The driver's memory (%(default)s).")
    parser.add_argument("--jar", type=Path, default=JAR, help="PostgreSQL's JDBC driver (%(default)s).")
    options = parser.parse_args(arguments)
    if not options.jar.exists():
        parser.error(f"no JDBC driver at {options.jar}: apt-get install libpostgresql-jdbc-java, or give --jar")
    return options


def _jdbc(database: Database) -> dict[str, str]:
    place = database.conninfo
    return {
        # jsonb is sent as text, and the server finds its type.
        "url": f"jdbc:postgresql://{place['host']}:{place['port']}/{place['dbname']}"
        "?stringtype=unspecified&reWriteBatchedInserts=true",
        "user": place["user"],
        "password": place["password"],
        "driver": "org.postgresql.Driver",
        "dbtable": TASKS,
        "batchsize": "10000",
        "fetchsize": "10000",
    }


def _sink(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def _reading(spark: SparkSession, server: Server, database: Database, rows: int) -> Contest:
    server.run(FILL, {"rows": rows})
    server.calm("dbtaskqueue_task")
    slices = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(rows), "numPartitions": "2"}

    def jdbc(columns: list[str]) -> None:
        _sink(spark.read.format("jdbc").options(**_jdbc(database), **slices).load().select(*columns))

    def ours(columns: list[str] | None) -> None:
        with open_snapshot(database) as snapshot:
            _sink(read_tasks(spark, database, columns, snapshot=snapshot))

    return Contest(
        "read",
        {
            "JDBC, all columns": lambda: jdbc(["*"]),
            "ours, all columns": lambda: ours(None),
            "JDBC, three columns": lambda: jdbc(THREE),
            "ours, three columns": lambda: ours(THREE),
        },
    )


def _writing(spark: SparkSession, server: Server, database: Database, rows: int) -> Contest:
    payload = "to_json(named_struct('flight', id, 'origin', 'JFK', 'text', md5(string(id)))) AS payload"
    new = spark.range(0, rows, numPartitions=2).selectExpr("md5(string(id)) AS reference", payload)

    def empty() -> None:
        server.run("TRUNCATE dbtaskqueue_task")
        server.calm("dbtaskqueue_task")

    def jdbc() -> None:
        named = new.selectExpr("'other' AS queue_name", "reference AS reference_number", "payload")
        named.write.format("jdbc").options(**_jdbc(database)).mode("append").save()

    return Contest(
        "write",
        {
            "JDBC, append": jdbc,
            "ours, atomic": lambda: write_tasks(new, database, queue="other"),
            "ours, atomic, on_duplicate=ignore": lambda: write_tasks(
                new, database, queue="other", on_duplicate="ignore"
            ),
        },
        before=empty,
    )


if __name__ == "__main__":
    main()
