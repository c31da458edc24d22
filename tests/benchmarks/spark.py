"""The data source against Spark's own JDBC source, on the same table in the same run.

Both read into the ``noop`` sink and write new tasks from the same two partitions, in turns, on ``local[2]``. JDBC has a
fetch size and a batch size of 10,000 and the driver's ``reWriteBatchedInserts``, and appends in as many transactions as
there are partitions and batches; ours is one. The driver is Debian's: ``apt-get install libpostgresql-jdbc-java``.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from pyspark.sql import DataFrame, SparkSession

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.source import open_snapshot, read_tasks, write_tasks
from django_dbtaskqueue.pipeline.spark import spark_session
from tests.benchmarks.report import table
from tests.benchmarks.server import Server, serving

JAR = Path("/usr/share/java/postgresql.jar")
THREE = ["id", "status", "finish_time"]
# Finished tasks as a queue leaves them, with payloads of some 150 bytes.
FILL = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, status, final_status, attempt, total_attempt, payload,
    result, poller_instance, ready_time, start_time, finish_time)
SELECT 'queue' || i %% 5, md5(i::text), 'COMPLETED', 'COMPLETED', 1, 1,
    jsonb_build_object('flight', i, 'origin', 'JFK', 'destination', 'SFO', 'text', md5(i::text) || md5(i::text)),
    jsonb_build_object('delay', i %% 100), 'host-1', NULL, now() - interval '1 minute', now()
FROM generate_series(1, %(rows)s) AS i
"""
PAYLOAD = "to_json(named_struct('flight', id, 'origin', 'JFK', 'text', md5(string(id)))) AS payload"
Ways = dict[str, Callable[[], object]]  # the first one is JDBC's


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="Tasks read and written (%(default)s).")
    parser.add_argument("--runs", type=int, default=3, help="Readings of each way, after one to warm up (%(default)s).")
    options = parser.parse_args()
    if not JAR.exists():
        parser.error(f"no JDBC driver at {JAR}: apt-get install libpostgresql-jdbc-java")
    with serving() as server:
        database = Database.from_url(server.url)
        spark = spark_session(master="local[2]", memory="2g", conf={"spark.jars": str(JAR)})
        server.run(FILL, {"rows": options.rows})
        server.calm("dbtaskqueue_task")
        lines = contest(reading(spark, database, options.rows), options, lambda: None)
        lines += contest(writing(spark, database, options.rows), options, lambda: empty(server))
        spark.stop()
    print(f"{options.rows:,} tasks, PostgreSQL {server.version}, local[2] on {os.cpu_count()} cores, median of")
    print(f"{options.runs} runs in turns. `python -m tests.benchmarks.spark --rows {options.rows}`\n")
    print(table(["", "seconds", "rows/s", "times JDBC"], lines))


def contest(ways: Ways, options: argparse.Namespace, before: Callable[[], object]) -> list[list[str]]:
    """Do each way once to warm up and then in turns; return the table's rows."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.runs + 1):
        for name, way in ways.items():
            before()
            start = perf_counter()
            way()
            seconds[name].append(perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.2f} s{'' if number else ' (warming up)'}", file=sys.stderr)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    return [[name, f"{one:.2f}", f"{options.rows / one:,.0f}", f"{base / one:.2f}"] for name, one in medians.items()]


def jdbc_options(database: Database) -> dict[str, str]:
    place = database.conninfo
    return {
        # jsonb is sent as text, and the server finds its type.
        "url": f"jdbc:postgresql://{place['host']}:{place['port']}/{place['dbname']}"
        "?stringtype=unspecified&reWriteBatchedInserts=true",
        "user": place["user"], "password": place["password"], "driver": "org.postgresql.Driver",
        "dbtable": '"dbtaskqueue_task"', "batchsize": "10000", "fetchsize": "10000",
    }  # fmt: skip


def sink(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def reading(spark: SparkSession, database: Database, rows: int) -> Ways:
    slices = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(rows), "numPartitions": "2"}

    def jdbc(*columns: str) -> None:
        sink(spark.read.format("jdbc").options(**jdbc_options(database), **slices).load().select(*columns))

    def ours(columns: list[str] | None) -> None:
        with open_snapshot(database) as snapshot:
            sink(read_tasks(spark, database, columns, snapshot=snapshot))

    return {
        "read: JDBC, all columns": lambda: jdbc("*"),
        "read: ours, all columns": lambda: ours(None),
        "read: JDBC, three columns": lambda: jdbc(*THREE),
        "read: ours, three columns": lambda: ours(THREE),
    }


def empty(server: Server) -> None:
    server.run("TRUNCATE dbtaskqueue_task")
    server.calm("dbtaskqueue_task")


def writing(spark: SparkSession, database: Database, rows: int) -> Ways:
    new = spark.range(0, rows, numPartitions=2).selectExpr("md5(string(id)) AS reference", PAYLOAD)

    def jdbc() -> None:
        named = new.selectExpr("'other' AS queue_name", "reference AS reference_number", "payload")
        named.write.format("jdbc").options(**jdbc_options(database)).mode("append").save()

    def ours(**options: str) -> None:
        write_tasks(new, database, queue="other", **options)

    return {
        "write: JDBC, append": jdbc,
        "write: ours, atomic": ours,
        "write: ours, atomic, on_duplicate=ignore": lambda: ours(on_duplicate="ignore"),
    }


if __name__ == "__main__":
    main()
