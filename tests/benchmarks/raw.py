"""The yardstick: a bare loop on psycopg, on a narrow table with three indexes. No fence, no lease, no objects.

``python -m tests.benchmarks.raw batch`` checks out and settles 500 at a time; ``each`` settles one per commit, in four
threads; ``django`` does the same in a transaction of Django's for each task, as a processor's own writes need;
``enqueue`` inserts one row per transaction; ``listen`` takes what NOTIFY tells of, as an idle poller does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from time import monotonic, process_time
from typing import Any

import psycopg

from tests.benchmarks.children import begin, finish

TABLE = "raw_task"
CREATE = """
CREATE TABLE IF NOT EXISTS raw_task (
    id bigserial PRIMARY KEY, queue_name text NOT NULL, reference_number text, priority smallint NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'CREATED', next_process_time timestamptz NOT NULL DEFAULT now(), payload jsonb,
    UNIQUE (reference_number, queue_name)
);
CREATE INDEX IF NOT EXISTS raw_task_line ON raw_task (queue_name, priority, next_process_time, id)
    WHERE status IN ('CREATED', 'PROCESSING');
"""
FILL = """
INSERT INTO raw_task (queue_name, reference_number, payload)
SELECT 'raw', 'r-' || i, jsonb_build_object('number', i) FROM generate_series(1, %(tasks)s) AS i
"""
CHECKOUT = """
WITH due AS (
    SELECT id FROM raw_task WHERE queue_name = 'raw' AND status IN ('CREATED', 'PROCESSING')
        AND next_process_time <= now()
    ORDER BY priority, next_process_time, id LIMIT %s FOR UPDATE SKIP LOCKED
)
UPDATE raw_task SET status = 'PROCESSING', next_process_time = now() + interval '60 s'
FROM due WHERE raw_task.id = due.id RETURNING raw_task.id, raw_task.payload
"""
SETTLE = "UPDATE raw_task SET status = 'COMPLETED' WHERE id = ANY(%s)"
SETTLE_ONE = "UPDATE raw_task SET status = 'COMPLETED' WHERE id = %s"
ENQUEUE = "INSERT INTO raw_task (queue_name, reference_number, payload) VALUES ('raw', %s, %s)"
PUT = """
WITH task AS (INSERT INTO raw_task (queue_name, reference_number, payload) VALUES ('raw', %s, '{"number": 1}'))
SELECT pg_notify('raw_task', '')
"""
SETTLE_AT = "UPDATE raw_task SET status = 'COMPLETED', payload = to_jsonb(%s::float8) WHERE id = %s"
THREADS = 4  # as many as a poller has by default


def connect() -> psycopg.Connection[Any]:
    """Return an autocommit connection that prepares every statement at once."""
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)


def handle(task: Any) -> None:
    """Do nothing."""


def batches(limit: int = 500) -> int:
    """Check out and settle 500 at a time until nothing is due; return how many."""
    done = 0
    with connect() as connection:
        cursor = connection.cursor()
        while rows := cursor.execute(CHECKOUT, [limit]).fetchall():
            for row in rows:
                handle(row)
            cursor.execute(SETTLE, [[row[0] for row in rows]])
            done += len(rows)
    return done


def one_by_one(counts: list[int], act: Callable[[Any, Any], None]) -> None:
    """The same with a commit for each task."""
    done = 0
    with connect() as connection:
        cursor = connection.cursor()
        while rows := cursor.execute(CHECKOUT, [100]).fetchall():
            for row in rows:
                act(cursor, row)
            done += len(rows)
    counts.append(done)


def settle_one(cursor: Any, row: Any) -> None:
    """Handle and settle one."""
    handle(row)
    cursor.execute(SETTLE_ONE, [row[0]])


def settle_in_django(cursor: Any, row: Any) -> None:
    """Handle and settle one in a transaction of Django's."""
    from django.db import connection, transaction

    with transaction.atomic(), connection.cursor() as own:
        handle(row)
        own.execute(SETTLE_ONE, [row[0]])


def each(act: Callable[[Any, Any], None] = settle_one) -> int:
    """Settle one by one, in as many threads as a poller has."""
    counts: list[int] = []
    threads = [threading.Thread(target=one_by_one, args=[counts, act]) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts)


def django() -> int:
    """Settle one by one, in transactions of Django's."""
    import django

    django.setup()
    return each(settle_in_django)


def enqueue(seconds: float = 2.0) -> int:
    """Insert one row per transaction for so long; return how many."""
    done, end = 0, monotonic() + seconds
    with connect() as connection:
        cursor = connection.cursor()
        while monotonic() < end:
            cursor.execute(ENQUEUE, [f"r-{os.getpid()}-{done}", '{"number": 1}'])
            done += 1
    return done


def listen() -> int:
    """Take and settle what NOTIFY tells of until a task without a payload comes; store when each was started."""
    done = 0
    with connect() as connection, connect() as listener:
        cursor = connection.cursor()
        listener.execute("LISTEN raw_task")
        for _ in listener.notifies():
            for task_id, payload in cursor.execute(CHECKOUT, [100]).fetchall():
                if payload is None:
                    return done
                cursor.execute(SETTLE_AT, [monotonic(), task_id])
                done += 1
    return done


def main() -> None:
    """Begin at GO; say how many tasks, from when to when, and how much CPU they took."""
    work = {"batch": batches, "each": each, "django": django, "enqueue": enqueue, "listen": listen}[sys.argv[1]]
    begin()
    cpu, began = process_time(), monotonic()
    tasks = work()
    finish(tasks=tasks, began=began, ended=monotonic(), cpu=process_time() - cpu)


if __name__ == "__main__":
    main()
