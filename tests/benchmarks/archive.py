"""How many tasks a second ``archive`` moves into a lake: ``python -m tests.benchmarks.archive --rows 1000000``.

End to end, on ``local[2]`` and the same machine's PostgreSQL: freeze, export, verify (the files are read again),
publish, delete what is unchanged, close. Spark's start is left out: a first, small archive is done before. The tasks
are finished ones of five queues and two days, one in fifty with a failed attempt on record. Below stands how long each
step took.
"""

import argparse
import tempfile
from datetime import timedelta
from pathlib import Path
from time import perf_counter

from pyspark.sql import SparkSession

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake.archive_job import Archive
from django_dbtaskqueue.pipeline.spark import spark_session
from tests.benchmarks.server import Server, serving
from tests.benchmarks.spark import FILL

ATTEMPTS = """
INSERT INTO dbtaskqueue_attempt (location, task_id, queue_name, attempt, total_attempt, poller_instance, start_time,
    finish_time, error_type, message, traceback)
SELECT 'dbtaskqueue.task', id, queue_name, 1, 1, 'host-1', start_time, finish_time, 'ValueError', 'no flight', ''
FROM dbtaskqueue_task WHERE id % 50 = 0
"""
OLDER = """
UPDATE dbtaskqueue_task SET start_time = start_time - interval '1 day', finish_time = finish_time - interval '1 day'
WHERE id % 2 = 0
"""
SMALL = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="tasks archived (%(default)s)")
    options = parser.parse_args()
    with serving() as server:
        spark = spark_session(master="local[2]", memory="2g")
        for rows in (SMALL, options.rows):
            archive(server, spark, rows)


def archive(server: Server, spark: SparkSession, rows: int) -> None:
    server.run("TRUNCATE dbtaskqueue_task, dbtaskqueue_attempt RESTART IDENTITY")
    server.run(FILL, {"rows": rows})
    server.run(OLDER)
    server.run(ATTEMPTS)
    server.calm("dbtaskqueue_task", "dbtaskqueue_attempt")
    steps: dict[str, float] = {}  # when each began
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        context = Archive.context(
            database=Database.from_url(server.url), lake=Path(folder) / "lake", spark=spark, older_than=timedelta(0),
            batch_size=rows // 2, progress=lambda step, _done, _total: steps.setdefault(step, perf_counter()),
        )  # fmt: skip
        done = Archive().run(context)
        ended = perf_counter()
    assert done["tasks"] == rows, done
    print(f"{rows:,} tasks in {ended - began:.1f} s: {rows / (ended - began):,.0f} tasks/s")
    print("  begins after: " + ", ".join(f"{step} {at - began:.1f} s" for step, at in steps.items()), flush=True)


if __name__ == "__main__":
    main()
