"""How fast Spark is with tasks: ``python -m tests.benchmarks.pipeline source|archive|report|cluster --rows N``.

``source``: the data source against Spark's own JDBC source, on the same table in the same run. Both read into the
``noop`` sink and write new tasks from the same two partitions, in turns. JDBC has a fetch size and a batch size of
10,000 and the driver's ``reWriteBatchedInserts``, and appends in as many transactions as there are partitions and
batches; ours is one. The driver is Debian's: ``apt-get install libpostgresql-jdbc-java``.

``archive``: how many tasks a second move into a lake, end to end: freeze, export, verify (the files are read again),
publish, delete what is unchanged, close. A first, small archive is done before. The tasks are finished ones of five
queues and two days, one in fifty with a failed attempt on record. Below stands how long each step took.

``report``: how long a whole report takes over a lake, with its page, its JSON and its tables, with 2 GiB for the
driver. The lake is written first, as archives of ninety days leave it: ten queues, one in fifty tasks in ERROR, one in
ten taken twice. The first report sums up each day; the second one reads these summaries; then comes one day more. The
command is then run as a user does, from its start to its end.

``cluster``: a poller with ``--executor spark`` and processors that keep a core busy, on a standalone cluster of one
worker and of two, each with a core of this machine, which also carries Spark's driver, its daemons, the poller and
PostgreSQL. The rate is that of the middle eight tenths of the tasks: no start of executors, no last partition. All
others are on ``local[2]``.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import numpy
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake import LAKE_SCHEMAS, PARTITION, Lake
from django_dbtaskqueue.pipeline.lake.archive_jobs import Archive
from django_dbtaskqueue.pipeline.lake.export import Export
from django_dbtaskqueue.pipeline.reports.report import Report
from django_dbtaskqueue.pipeline.source import arrow_schema, open_snapshot, read_tasks, write_tasks
from django_dbtaskqueue.pipeline.spark import spark_session
from tests.benchmarks.children import manage
from tests.benchmarks.report import table
from tests.benchmarks.server import REPOSITORY, Server, serving
from tests.contrib.clusters import SETTINGS, Cluster

JAR = Path("/usr/share/java/postgresql.jar")
# Finished tasks as five queues leave them on two days, with payloads of some 150 bytes.
FILL = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, status, final_status, attempt, total_attempt, payload,
    result, poller_instance, ready_time, create_time, start_time, finish_time)
SELECT 'queue' || i %% 5, md5(i::text), status, status, 1, CASE WHEN random() < 0.1 THEN 2 ELSE 1 END,
    jsonb_build_object('flight', i, 'origin', 'JFK', 'destination', 'SFO', 'text', md5(i::text) || md5(i::text)),
    jsonb_build_object('delay', i %% 100), 'host-1', NULL, started + ln(1 - random()) * interval '20 s', started,
    started - ln(1 - random()) * interval '2 s'
FROM generate_series(1, %(rows)s) AS i, LATERAL (SELECT
    now() - interval '1 minute' - i %% 2 * interval '1 day' AS started,
    CASE WHEN random() < 0.02 THEN 'ERROR' ELSE 'COMPLETED' END AS status) AS x
"""
ATTEMPTS = """
INSERT INTO dbtaskqueue_attempt (location, task_id, queue_name, attempt, total_attempt, poller_instance, start_time,
    finish_time, error_type, message, traceback)
SELECT 'dbtaskqueue.task', id, queue_name, 1, 1, 'host-1', start_time, finish_time, 'ValueError', 'no flight', ''
FROM dbtaskqueue_task WHERE id % 50 = 0
"""
WORK = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, payload)
SELECT 'grind', i::text, to_jsonb(1000000) FROM generate_series(1, %s) AS i
"""
RATE = """
SELECT count(*)::float8 / extract(epoch FROM max(finish_time) - min(finish_time)) FROM (
    SELECT finish_time, ntile(10) OVER (ORDER BY finish_time) AS tenth
    FROM dbtaskqueue_task WHERE status = 'COMPLETED'
) AS finished WHERE tenth BETWEEN 2 AND 9
"""
PAYLOAD = "to_json(named_struct('flight', id, 'origin', 'JFK', 'text', md5(string(id)))) AS payload"
Ways = dict[str, Callable[[], object]]  # the first one is JDBC's


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pipeline", description=__doc__)
    parser.add_argument("what", choices=["source", "archive", "report", "cluster"])
    parser.add_argument("--rows", type=int, default=1_000_000, help="Tasks (%(default)s).")
    parser.add_argument("--runs", type=int, default=3, help="Readings of each way of a source (%(default)s).")
    options = parser.parse_args()
    if options.what == "source" and not JAR.exists():
        parser.error(f"no JDBC driver at {JAR}: apt-get install libpostgresql-jdbc-java")
    with serving() as server:
        if options.what == "cluster":
            one, two = (on_cluster(server, workers, options.rows) for workers in (1, 2))
            print(f"two workers: {two / one:.2f} x one")
            return
        conf = {"spark.jars": str(JAR)} if options.what == "source" else {}
        spark = spark_session(master="local[2]", memory="2g", conf=conf)
        if options.what == "source":
            source(server, spark, options.rows, options.runs)
        elif options.what == "archive":
            archive(server, spark, 2000)
            archive(server, spark, options.rows)
        else:
            report(spark, options.rows // 90)


def filled(server: Server, rows: int) -> Database:
    server.run("TRUNCATE dbtaskqueue_task, dbtaskqueue_attempt RESTART IDENTITY")
    server.run(FILL, {"rows": rows})
    server.calm("dbtaskqueue_task")
    return Database.from_url(server.url)


def source(server: Server, spark: SparkSession, rows: int, runs: int) -> None:
    database = filled(server, rows)
    lines = contest(reading(spark, database, rows), rows, runs, lambda: None)
    lines += contest(writing(spark, database, rows), rows, runs, lambda: filled(server, 0))
    print(f"{rows:,} tasks, PostgreSQL {server.embedded.version}, local[2] on {os.cpu_count()} cores, median of")
    print(f"{runs} runs in turns. `python -m tests.benchmarks.pipeline source --rows {rows}`\n")
    print(table(["", "seconds", "rows/s", "times JDBC"], lines))


def contest(ways: Ways, rows: int, runs: int, before: Callable[[], object]) -> list[list[str]]:
    """Do each way once to warm up and then in turns; return the table's rows."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(runs + 1):
        for name, way in ways.items():
            before()
            start = perf_counter()
            way()
            seconds[name].append(perf_counter() - start)
            print(f"{name}: {seconds[name][-1]:.2f} s{'' if number else ' (warming up)'}", file=sys.stderr)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    return [[name, f"{one:.2f}", f"{rows / one:,.0f}", f"{base / one:.2f}"] for name, one in medians.items()]


def jdbc_options(database: Database) -> dict[str, str]:
    place = database.conninfo
    return {
        # jsonb is sent as text, and the server finds its type.
        "url": f"jdbc:postgresql://{place['host']}:{place['port']}/{place['dbname']}"
        "?stringtype=unspecified&reWriteBatchedInserts=true",
        "user": place["user"], "password": place["password"], "driver": "org.postgresql.Driver",
        "dbtable": '"dbtaskqueue_task"', "batchsize": "10000", "fetchsize": "10000",
    }  # fmt: skip


def reading(spark: SparkSession, database: Database, rows: int) -> Ways:
    slices = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(rows), "numPartitions": "2"}

    def sink(df: DataFrame) -> None:
        df.write.format("noop").mode("overwrite").save()

    def jdbc(columns: list[str] | None) -> None:
        sink(spark.read.format("jdbc").options(**jdbc_options(database), **slices).load().select(*columns or "*"))

    def ours(columns: list[str] | None) -> None:
        with open_snapshot(database) as snapshot:
            sink(read_tasks(spark, database, columns, snapshot=snapshot))

    selections = {"all columns": None, "three columns": ["id", "status", "finish_time"]}
    both = product(selections.items(), (("JDBC", jdbc), ("ours", ours)))
    return {f"read: {who}, {what}": partial(read, columns) for (what, columns), (who, read) in both}


def writing(spark: SparkSession, database: Database, rows: int) -> Ways:
    new = spark.range(0, rows, numPartitions=2).selectExpr("md5(string(id)) AS reference", PAYLOAD)
    named = new.selectExpr("'other' AS queue_name", "reference AS reference_number", "payload")
    ours = partial(write_tasks, new, database, queue="other")
    return {
        "write: JDBC, append": named.write.format("jdbc").options(**jdbc_options(database)).mode("append").save,
        "write: ours, atomic": ours,
        "write: ours, atomic, on_duplicate=ignore": partial(ours, on_duplicate="ignore"),
    }


def on_cluster(server: Server, workers: int, tasks: int) -> float:
    filled(server, 0)
    server.run(WORK, [tasks])
    server.calm("dbtaskqueue_task")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = Cluster(stack, Path(folder), workers)
        poller = manage("runtaskpoller", "--queue", "grind", "--drain", "--executor", "spark", "--master", cluster.url)
        settings = [part for setting in SETTINGS for part in ("--conf", f"spark.{setting}")]
        subprocess.run([*poller, "--worker-env", "DATABASE_URL", *settings], cwd=REPOSITORY, check=True)
    rate = float(server.run(RATE)[0][0])
    print(f"{workers} worker(s): {rate:.1f} tasks/s", flush=True)
    return rate


def archive(server: Server, spark: SparkSession, rows: int) -> None:
    database, steps = filled(server, rows), dict[str, float]()  # when each began
    server.run(ATTEMPTS)
    server.calm("dbtaskqueue_task", "dbtaskqueue_attempt")
    with tempfile.TemporaryDirectory() as folder:
        lake, began = Path(folder) / "lake", perf_counter()
        base = {"database": database, "lake": lake, "spark": spark, "older_than": timedelta(0), "batch_size": rows // 2}
        done = Archive().run(Archive.context(progress=lambda step, *_: steps.setdefault(step, perf_counter()), **base))
        seconds = perf_counter() - began
        assert done["tasks"] == rows, done
        print(f"{rows:,} tasks in {seconds:.1f} s: {rows / seconds:,.0f} tasks/s")
        print("  begins after: " + ", ".join(f"{step} {at - began:.1f} s" for step, at in steps.items()), flush=True)


def report(spark: SparkSession, a_day: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.at(Path(folder) / "lake", create=True)
        for number in range(91):
            archived_day(lake, number, a_day)
            for _ in range({89: 2, 90: 1}.get(number, 0)):
                began = perf_counter()
                said = Report().run(Report.context(spark=spark, lake=lake.root, out=Path(folder) / "out"))["summary"]
                print(f"report in {perf_counter() - began:.1f} s: {said}", flush=True)
        command, began = [sys.executable, "-m", "django_dbtaskqueue.pipeline", "report"], perf_counter()
        subprocess.run([*command, "--lake", lake.root, "--out", f"{folder}/own"], cwd=REPOSITORY, check=True)
        print(f"the command, with the start of Spark, in {perf_counter() - began:.1f} s", flush=True)


def archived_day(lake: Lake, number: int, tasks: int) -> None:
    """Write what an archive of one day would: tasks of some 150 bytes, and the attempts of those that failed."""
    chance, day = numpy.random.default_rng(number), datetime(2026, 8, 1, tzinfo=UTC) + timedelta(days=number)
    ids, ended = numpy.arange(tasks) + number * tasks, chance.integers(0, 86_400_000_000, tasks)
    begun = (ended := ended + int(day.timestamp() * 1e6)) - chance.exponential(2e6, tasks).astype(int)
    noise, failed = pa.array(chance.integers(10**17, 10**18, tasks)).cast("string"), chance.random(tasks) < 0.02
    text = pc.binary_join_element_wise('{"flight": "', *[noise] * 5, '"}', "")
    rows = {"id": ids, "task_id": ids, "reference_number": noise, "payload": text, "attempt": numpy.ones(tasks)}
    rows |= {"location": ["dbtaskqueue.task"] * tasks, "queue_name": [f"queue{one}" for one in ids % 10]}
    rows |= {"create_time": begun - chance.exponential(20e6, tasks).astype(int), "start_time": begun}
    rows |= {"finish_time": ended, "total_attempt": 1 + (chance.random(tasks) < 0.1)}
    rows |= {"status": numpy.where(failed, "ERROR", "COMPLETED"), "error_type": ["ValueError"] * tasks}
    for name, chosen in (("attempts", failed), ("tasks", failed | True)):
        schema, once = arrow_schema(one for one in LAKE_SCHEMAS[name] if one.name != PARTITION), (f"{number:032x}", 1)
        columns = [pa.array(rows.get(one.name, [None] * tasks)).cast(one.type) for one in schema]
        written = pa.table(columns, schema=schema).filter(chosen)
        lake.commit(name, [Export(lake, once[0]).write_day(name, str(day.date()), written, "0")], once=once)


if __name__ == "__main__":
    main()
