"""How many tasks a second ``archive`` moves into a lake: ``python -m tests.benchmarks.archive --rows 1000000``.

End to end, on ``local[2]`` and the same machine's PostgreSQL: freeze, export, verify (the files are read again),
publish, delete what is unchanged, close. Spark's start is left out: a first, small archive is done before. The tasks
are finished ones of five queues and two days, one in fifty with a failed attempt on record. Below each run stand the
seconds of its steps, and the seconds of CPU that Spark's processes and PostgreSQL's took, which hold on a busy machine
as well.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import psutil

from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake.archive import Archive
from django_dbtaskqueue.pipeline.spark.session import spark_session
from tests.benchmarks.server import Server, cpu_of, serving
from tests.benchmarks.spark import FILL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ATTEMPTS = """
INSERT INTO dbtaskqueue_attempt (location, task_id, queue_name, attempt, total_attempt, poller_instance, start_time,
    finish_time, error_type, message, traceback)
SELECT 'dbtaskqueue.task', id, queue_name, 1, 1, 'host-1', start_time, finish_time, 'ValueError', 'no flight', ''
FROM dbtaskqueue_task WHERE id %% 50 = 0
"""
OLDER = """
UPDATE dbtaskqueue_task SET start_time = start_time - interval '1 day', finish_time = finish_time - interval '1 day'
WHERE id % 2 = 0
"""
SMALL = 2000


class Steps:
    """Counts the seconds of each step of a run, as its progress tells them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._name, self._since = "begin", perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Begin a step."""
        now = perf_counter()
        self.seconds[self._name] += now - self._since  # type: ignore[assignment]
        self._name, self._since = stage, now


def main() -> None:
    """Fill, archive, print the rate of each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="tasks archived in each run (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="runs (%(default)s)")
    parser.add_argument("--memory", default="2g", help="the driver's memory (%(default)s)")
    options = parser.parse_args()
    with serving() as server:
        spark = spark_session(master="local[2]", memory=options.memory)
        archived(server, spark, SMALL)
        for _ in range(options.runs):
            archived(server, spark, options.rows)


def archived(server: Server, spark: SparkSession, rows: int) -> None:
    """Fill the table with so many tasks, archive them all, and print what it took."""
    server.run("TRUNCATE dbtaskqueue_task, dbtaskqueue_attempt RESTART IDENTITY")
    server.run(FILL, {"rows": rows})
    server.run(OLDER)
    server.run(ATTEMPTS, {})
    server.calm("dbtaskqueue_task", "dbtaskqueue_attempt")
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder, used(server) as cpu:
        lake, database = Path(folder) / "lake", Database.from_url(server.url)
        began = perf_counter()
        context = Archive.context(
            database=database, lake=lake, spark=spark, progress=steps, older_than=timedelta(0), batch_size=rows // 2
        )
        done = Archive().run(context)
        took = perf_counter() - began
        steps("end", 0, 0)
    assert done["tasks"] == rows, done
    print(f"{rows:,} tasks in {took:.1f} s: {rows / took:,.0f} tasks/s")
    print("  " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in steps.seconds.items()))
    print("  CPU: " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cpu.items()), flush=True)


@contextmanager
def used(server: Server) -> Iterator[dict[str, float]]:
    """Yield what will hold, afterwards, the seconds of CPU used by this process and its children, and the server."""
    found: dict[str, float] = {}
    spark, postgresql = _ours(), server.cpu()
    yield found
    found.update({"Spark": _ours() - spark, "PostgreSQL": server.cpu() - postgresql})


def _ours() -> float:
    me = psutil.Process()
    family = [one for one in (me, *me.children(recursive=True)) if one.name() != "postgres"]
    return sum(map(cpu_of, family))


if __name__ == "__main__":
    main()
