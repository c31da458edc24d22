"""The yardstick: loops on psycopg without a library. ``python -m tests.benchmarks.raw WAY [ARGUMENT ...]``.

``drain LOOP N`` checks out and settles N rows at a time. ``each`` settles one row per commit, in four threads;
``insert`` also inserts a row in that transaction. ``enqueue`` inserts a row per commit, ``enqueue-task`` one of ours.

SIMPLE is the simplest loop: a narrow table, its primary key, and one partial index that a checkout leaves. Measured in
turns on PostgreSQL 18, PostgreSQL's CPU in µs a task, 500 rows per batch:

- 7.5: ``status`` in the predicate of the index, rows found by ``ctid = ANY`` or ``id = ANY`` of a subselect (SIMPLE)
- 10.5: the same by ``id IN``, which the planner makes a join
- 8: a boolean in the predicate and another for the end; 5.5 with fillfactor 50, which makes the second update HOT
- 5: ``DELETE`` as the settle
- 2: one transaction that locks rows and deletes them (BARE). A task that runs has no lease, and no row is kept.

SAME makes the promises that the package makes: a unique reference, a lease, a fence, finished rows with their times.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any

import psycopg

from tests.benchmarks.children import SECONDS, at_go, timed


@dataclass(frozen=True)
class Loop:
    table: str
    create: str
    fill: str
    checkout: str
    settle: str  # takes the first column of the checkout's rows, and the second one if it is fenced
    fenced: bool = False
    bare: bool = False  # both statements are one transaction


SIMPLE = Loop(
    "raw_simple",
    """CREATE TABLE raw_simple (id bigserial PRIMARY KEY, status smallint NOT NULL DEFAULT 0, payload jsonb);
    CREATE INDEX raw_simple_waiting ON raw_simple (id) WHERE status = 0""",
    """INSERT INTO raw_simple (payload) SELECT jsonb_build_object('number', i)
    FROM generate_series(1, %(tasks)s) AS i""",
    """UPDATE raw_simple SET status = 1 WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM raw_simple WHERE status = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
    )) RETURNING id, payload""",
    "UPDATE raw_simple SET status = 2 WHERE id = ANY(%s)",
)
LOCK = "SELECT id, payload FROM raw_simple WHERE status = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
BARE = replace(SIMPLE, checkout=LOCK, settle="DELETE FROM raw_simple WHERE id = ANY(%s)", bare=True)
SAME = Loop(
    "raw_same",
    """CREATE TABLE raw_same (
        id bigserial PRIMARY KEY, queue_name text NOT NULL, reference_number text, status smallint NOT NULL DEFAULT 0,
        token bigint NOT NULL DEFAULT 0, payload jsonb, ready_time timestamptz DEFAULT now(),
        lease_until timestamptz NOT NULL DEFAULT now(), start_time timestamptz, finish_time timestamptz,
        UNIQUE (reference_number, queue_name)
    ) WITH (fillfactor = 50);
    CREATE INDEX raw_same_ready ON raw_same (queue_name, ready_time, id) WHERE ready_time IS NOT NULL""",
    """INSERT INTO raw_same (queue_name, reference_number, payload)
    SELECT 'raw', 'r-' || i, jsonb_build_object('number', i) FROM generate_series(1, %(tasks)s) AS i""",
    """UPDATE raw_same SET status = 1, token = token + 1, start_time = now(), lease_until = now() + interval '60 s'
    WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM raw_same WHERE queue_name = 'raw' AND ready_time <= now() AND lease_until <= now()
        ORDER BY ready_time, id LIMIT %s FOR UPDATE SKIP LOCKED
    )) RETURNING id, token, payload""",
    """UPDATE raw_same SET status = 2, ready_time = NULL, finish_time = now()
    FROM unnest(%s::bigint[], %s::bigint[]) AS done(id, token)
    WHERE raw_same.id = done.id AND raw_same.token = done.token AND status = 1""",
    fenced=True,
)
LOOPS = {"simple": SIMPLE, "bare": BARE, "same": SAME}
INSERT = "INSERT INTO auth_group (name) VALUES (%s)"  # what ``Group.objects.create`` executes
SIMPLE_INSERT = """INSERT INTO raw_simple (payload) VALUES ('{"number": 1}')"""
TASK_INSERT = """INSERT INTO dbtaskqueue_task (queue_name, reference_number, payload)
VALUES ('nothing', %(reference)s, '{"number": 1}')"""
THREADS = 4  # as many as a poller has by default


def connect() -> psycopg.Connection[Any]:
    return psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=0)


def handle(task: Any) -> None:
    pass


def drain(name: str, limit: str) -> int:
    loop, done = LOOPS[name], 0
    with connect() as connection, connection.cursor() as cursor:
        while True:
            if loop.bare:
                cursor.execute("BEGIN")
            rows = cursor.execute(loop.checkout, [int(limit)]).fetchall()
            for row in rows:
                handle(row)
            if rows:
                cursor.execute(loop.settle, [[row[column] for row in rows] for column in range(1 + loop.fenced)])
            if loop.bare:
                cursor.execute("COMMIT")
            if not rows:
                return done
            done += len(rows)


def each(*, insert: bool = False) -> int:
    def one_by_one(_thread: int) -> int:
        done = 0
        with connect() as connection, connection.cursor() as cursor:
            while rows := cursor.execute(SIMPLE.checkout, [100]).fetchall():
                for row in rows:
                    handle(row)
                    with connection.transaction() if insert else nullcontext():
                        if insert:
                            cursor.execute(INSERT, [f"group {row[0]}"])
                        cursor.execute("UPDATE raw_simple SET status = 2 WHERE id = %s", [row[0]])
                done += len(rows)
        return done

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(one_by_one, range(THREADS)))


def enqueue(insert: str = SIMPLE_INSERT) -> int:
    done, end = 0, monotonic() + SECONDS
    with connect() as connection, connection.cursor() as cursor:
        while monotonic() < end:
            cursor.execute(insert, {"reference": f"r-{done}"})
            done += 1
    return done


WAYS: dict[str, Callable[..., int]] = {"drain": drain, "each": each, "insert": partial(each, insert=True)}
WAYS |= {"enqueue": enqueue, "enqueue-task": partial(enqueue, TASK_INSERT)}

if __name__ == "__main__":
    at_go(lambda: timed(lambda: WAYS[sys.argv[1]](*sys.argv[2:])))
