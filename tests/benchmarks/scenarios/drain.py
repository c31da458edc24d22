"""Drains of tasks that wait: in every way to process them, beside other rows, with limits, with another table."""

import os
import sqlite3
import subprocess
import tempfile
from dataclasses import replace
from functools import partial

from tests.benchmarks.children import Worker, manage, python, together
from tests.benchmarks.drains import TABLE, Drain, raw_drain
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.scenarios.pickup import churned, snapshot
from tests.benchmarks.server import REPOSITORY, Server

RATE = "tasks/s"
SQLITE_SPAN = f"""
SELECT (julianday(max(finish_time)) - julianday(min(start_time))) * 86400.0, count(*) FROM {TABLE}
WHERE status = 'COMPLETED'
"""
FINISHED = f"""
INSERT INTO {TABLE} (queue_name, reference_number, payload, status, final_status, attempt, total_attempt,
    ready_time, start_time, finish_time)
SELECT 'nothing', 'f-' || i, jsonb_build_object('number', i), 'COMPLETED', 'COMPLETED', 1, 1, NULL,
    now() - interval '1 h', now() - interval '1 h' FROM generate_series(1, %s) AS i
"""
LATER = f"""
INSERT INTO {TABLE} (queue_name, reference_number, payload, priority, ready_time, next_process_time)
SELECT 'nothing', 'l-' || i, jsonb_build_object('number', i), i %% 10, now() + i * interval '1 s' + interval '1 h',
    now() + i * interval '1 s' + interval '1 h' FROM generate_series(1, %s) AS i
"""
SLEEPING = f"""
WITH t AS (
    INSERT INTO {TABLE} (queue_name, reference_number, payload, total_attempt, ready_time, next_process_time,
        parked_by, signals)
    SELECT 'nothing', 's-' || i, jsonb_build_object('number', i), 1,
        CASE WHEN i %% 2 = 0 THEN now() + i * interval '1 s' + interval '1 h' END,
        now() + i * interval '1 s' + interval '1 h', CASE WHEN i %% 2 = 1 THEN 'signal' END, i %% 3
    FROM generate_series(1, %s) AS i RETURNING id, create_time, parked_by, ready_time)
INSERT INTO dbtaskqueue_step (task_id, task_time, position, name, kind, until_time)
SELECT id, create_time, 1, coalesce(parked_by, 'sleep'), CASE WHEN parked_by IS NULL THEN 'sleep' ELSE 'wait' END,
    ready_time FROM t ON CONFLICT (location, task_id, position) DO NOTHING
"""


def drain(server: Server, size: float) -> Scenario:
    """By one process, beside loops without a library. From a size of 0.5 on, the names say the numbers."""
    tasks, short, some, few = (int(number * min(1, 2 * size)) for number in (60_000, 20_000, 10_000, 4_000))
    raw, ours = partial(raw_drain, server), partial(Drain, server)

    def no_groups(server: Server) -> None:
        server.run("TRUNCATE auth_group CASCADE")

    def raw_insert() -> Reading:
        no_groups(server)
        return raw(few, way="insert")

    loop, ours_short = "simplest loop, 500", "ours, 20,000 tasks"
    loop_each, loop_insert = "simplest loop, a commit per task, 4 threads", "the same with an INSERT"
    ours_atomic, ours_insert = "ours, atomic", "ours, atomic, an ORM INSERT"
    cases = {
        loop: lambda: raw(tasks),
        "ours": ours(tasks),
        "loop with our promises, 500": lambda: raw(tasks, "same"),
        "loop of one transaction a batch, which deletes, 500": lambda: raw(tasks, "bare"),
        ours_short: ours(short),
        "ours, async": ours(tasks, queues=["nothing-async"]),
        "ours, 20 µs processor": ours(tasks, queues=["busy"]),
        "ours, atomic, batch=100": ours(tasks, queues=["nothing-atomic-100"]),
        loop_each: lambda: raw(some, way="each"),
        ours_atomic: ours(some, queues=["nothing-atomic"]),
        loop_insert: raw_insert,
        ours_insert: ours(few, queues=["insert"], prepare=no_groups),
    }
    targets = [
        Target("drain ≥ 1.4 times the simplest loop", "ours", RATE, 1.4, loop),
        Target("worker ≤ 7 µs a task", "ours", "µs CPU worker", 7, most=True),
        Target("PostgreSQL ≤ 14 µs a task", "ours", "µs CPU PostgreSQL", 14, most=True),
        Target("full speed within 10 ms of the first task", ours_short, "ms lost at the start", 10, most=True),
        Target("atomic ≥ 0.8 times a commit per task", ours_atomic, RATE, 0.8, loop_each),
        Target("an ORM INSERT per task ≥ 0.7 times psycopg's", ours_insert, RATE, 0.7, loop_insert),
    ]
    return Scenario("drain", "Drain", cases, targets)


def sqlite(server: Server, size: float) -> Scenario:
    cases = {"ours": lambda: sqlite_drain(server, int(20_000 * size))}
    return Scenario("sqlite", "SQLite, drain", cases, [Target("SQLite ≥ 5,000/s", "ours", RATE, 5000)])


def sqlite_drain(server: Server, tasks: int) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        env = {"DATABASE_URL": f"sqlite:///{folder}/tasks.sqlite3"}

        def run(*command: str) -> None:
            subprocess.run(manage(*command), cwd=REPOSITORY, env=os.environ | env, check=True)

        run("migrate", "--verbosity", "0")
        together(Worker(*python("producer", "many", str(tasks)), env=env))
        with server.span() as span:
            run("runtaskpoller", "--queue", "nothing", "--drain")
        with sqlite3.connect(f"{folder}/tasks.sqlite3") as connection:
            seconds, done = connection.execute(SQLITE_SPAN).fetchone()
    if done < tasks:
        raise RuntimeError(f"only {done} of {tasks} tasks were completed")
    return {RATE: done / seconds, **span.noise}


def volume(server: Server, size: float) -> Scenario:
    """What grows: pollers, queues, the backlog, groups, an open snapshot's age, other rows. 10: ten million tasks."""
    tasks, others = int(100_000 * size), int(1_000_000 * size)
    plain, alone = Drain(server, tasks), f"{tasks:,} tasks"

    def spread(number: int) -> Drain:
        names = [f"queue-{each}" for each in range(number)]
        return replace(plain, queues=names, env={"BENCHMARK_QUEUES": str(number)})

    def beside(sql: str) -> Drain:
        def insert(server: Server) -> None:
            server.run(sql, [others])
            server.calm("dbtaskqueue_step")  # as the task table is before each drain

        return replace(plain, prepare=insert)

    def pinned(churn: int) -> Drain:
        return replace(plain, first=churn, around=snapshot, prepare=partial(churned, tasks=churn))

    def grouped(number: int) -> Drain:
        return replace(plain, keys=number, settings={"QUEUES": {"nothing": {"max_running_per_group": 10}}})

    polled, in_all, thousand = "1,000 queues polled, tasks in one", "tasks spread over 1,000 queues", spread(1000)
    later, sleeping = "1,000,000 for later, ten priorities", "1,000,000 that sleep or wait for a signal"
    more, backlogs = (2, 4, 12, 50 if size >= 0.5 else 3), (tasks // 10, 10 * tasks)
    axes = {  # each begins with ``plain``, by the name that it has there
        "Pollers": {"1 poller": plain, **{f"{n} pollers": replace(plain, processes=n) for n in more}},
        "Queues": {
            "1 queue": plain,
            polled: replace(thousand, queues=thousand.queues[:1], polled=thousand.queues),
            "tasks spread over 100 queues": spread(100),
            in_all: thousand,
        },
        "Backlog": {alone: plain, **{f"{number:,} tasks": Drain(server, number) for number in backlogs}},
        "Groups, ten of each at a time": {
            "no group": plain,
            "100 groups": grouped(100),
            "10,000 groups": grouped(10_000),
        },
        "Done since a snapshot": {
            "no snapshot": plain,
            **{f"{n:,} tasks done": pinned(n) for n in (tasks, 10 * tasks)},
        },
    }
    drains = {
        alone: plain,
        "1,000,000 finished": beside(FINISHED),
        later: beside(LATER),
        sleeping: beside(SLEEPING),
        "five priorities": replace(plain, priorities=5),
        **{name: case for cases in axes.values() for name, case in cases.items() if case is not plain},
    }
    targets = [
        Target("1,000,000 finished rows ≥ 0.95 times none", "1,000,000 finished", RATE, 0.95, alone),
        Target("1,000,000 scheduled for later ≥ 0.9 times none", later, RATE, 0.9, alone),
        Target("1,000,000 that sleep or wait ≥ 0.95 times none", sleeping, RATE, 0.95, alone),
        Target("1,000 queues, tasks in one ≥ 0.9 times one queue", polled, RATE, 0.9, alone),
        Target("1,000 queues, tasks in all ≥ 0.9 times one queue", in_all, RATE, 0.9, alone),
        Target("five priorities ≥ 0.8 times one", "five priorities", RATE, 0.8, alone),
    ]
    title = f"Growth: drains of {tasks:,} tasks, unless the row says otherwise, beside other rows (times {size:g})"
    picture = {axis: {name: alone if one is plain else name for name, one in axes[axis].items()} for axis in axes}
    return Scenario("volume", title, drains, targets, picture)


def limits(server: Server, size: float) -> Scenario:
    """Of a queue with limits that are never reached, and of tasks with 10,000 keys: what the limits cost."""
    plain = Drain(server, int(100_000 * size))

    def limited(keys: int = 0, **limits: object) -> Drain:
        return replace(plain, keys=keys, settings={"QUEUES": {"nothing": limits}})

    both, unlimited, ten = "max_running and rate", "10,000 keys, no limit", "10,000 keys, ten of each at a time"
    cases = {
        "no limit": plain,
        "max_running": limited(max_running=5000),
        both: limited(max_running=5000, rate="1000000/s"),
        unlimited: replace(plain, keys=10_000, keyed=False),
        "10,000 keys, one of each at a time": replace(plain, keys=10_000),
        ten: limited(10_000, max_running_per_group=10),
    }
    targets = [
        Target("a number and a rate over all pollers ≥ 0.9 times no limit", both, RATE, 0.9, "no limit"),
        Target("ten at a time of each of 10,000 keys ≥ 0.9 times no limit", ten, RATE, 0.9, unlimited),
    ]
    return Scenario("limits", "Limits", cases, targets)
