"""Pollers on a Spark cluster, one worker against two: ``python -m tests.benchmarks.cluster``.

A standalone cluster of workers of one core each, on this machine; a poller with ``--executor spark``; processors that
keep a core busy. The rate is that of the middle eight tenths of the tasks, so that neither the start of executors nor
the last partition counts. The workers share the machine's cores with Spark's driver, its daemons, the poller and
PostgreSQL. With ``--nap MS`` the processors wait so long instead of working: whether two workers have tasks at the same
time shows on a busier machine, too.
"""

import argparse
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.children import manage
from tests.benchmarks.server import REPOSITORY, Server, serving

FILL = """
INSERT INTO dbtaskqueue_task (queue_name, reference_number, payload)
SELECT %(queue)s, i::text, to_jsonb(%(work)s::int) FROM generate_series(1, %(tasks)s) AS i
"""
RATE = """
SELECT count(*)::float8 / extract(epoch FROM max(finish_time) - min(finish_time)) FROM (
    SELECT finish_time, ntile(10) OVER (ORDER BY finish_time) AS tenth
    FROM dbtaskqueue_task WHERE status = 'COMPLETED'
) AS finished WHERE tenth BETWEEN 2 AND 9
"""
WORK = 1_000_000  # how far a task counts


def main() -> None:
    """Measure, and print a line for each run and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--nap", type=int, default=0, metavar="MS", help="tasks wait so many milliseconds instead")
    options = parser.parse_args()
    queue, work = ("nap", options.nap) if options.nap else ("grind", WORK)
    with serving() as server:
        one, two = (measured(server, workers, options.tasks, queue, work) for workers in (1, 2))
    print(f"two workers: {two / one:.2f} x one")


def measured(server: Server, workers: int, tasks: int, queue: str, work: int) -> float:
    from tests.contrib.clusters import SETTINGS, Cluster  # its helpers need models

    server.run("TRUNCATE dbtaskqueue_task")
    server.run(FILL, {"tasks": tasks, "queue": queue, "work": work})
    server.calm("dbtaskqueue_task")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = Cluster(stack, Path(folder), workers)
        poller = manage("runtaskpoller", "--queue", queue, "--drain", "--executor", "spark", "--master", cluster.url)
        settings = [part for setting in SETTINGS for part in ("--conf", f"spark.{setting}")]
        subprocess.run([*poller, "--worker-env", "DATABASE_URL", *settings], cwd=REPOSITORY, check=True)
    rate = float(server.run(RATE)[0][0])
    print(f"{workers} worker(s): {rate:.1f} tasks/s", flush=True)
    return rate


if __name__ == "__main__":
    main()
