"""A program that archives in children of one warm Spark session, each killed at a step its parent reads from stdin.

``python -m tests.pipeline.killed_archive DATABASE_URL LAKE``: for each line ``STEP`` a child runs ``archive`` and kills
itself with SIGKILL as it comes to that step; the program then writes how the child ended. ``end`` runs it to the end.
For ``count`` it writes how many tasks ``read_lake`` finds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from django_dbtaskqueue.pipeline.lake import read_lake
from django_dbtaskqueue.pipeline.lake.archive_job import Archive
from django_dbtaskqueue.pipeline.spark import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def child(spark: SparkSession, url: str, lake: str, last: str) -> int:
    """Archive in a forked process until ``last``; return its signal or exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def progress(step: str, _done: int, _total: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        Archive().run(Archive.context(spark=spark, database=url, lake=lake, older_than="0s", progress=progress))
        code = 0
    finally:
        os._exit(code)


def main(url: str, lake: str) -> None:
    """Obey stdin."""
    conf = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1", "spark.sql.shuffle.partitions": "2"}
    spark = spark_session(master="local[2]", conf=conf)
    spark.range(1).count()
    for line in sys.stdin:
        code = read_lake(spark, lake).count() if line == "count\n" else child(spark, url, lake, line.strip())
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
