"""What grows: the backlog, other rows of the table, queues, groups, pollers. ``--size 10``: ten million tasks wait."""

from dataclasses import replace
from functools import partial

from tests.benchmarks.drains import TABLE, Drain
from tests.benchmarks.measure import Case, Scenario, Target
from tests.benchmarks.server import Server

FINISHED, LATER = "1,000,000 finished", "1,000,000 for later, ten priorities"
SLEEPING = "1,000,000 that sleep or wait for a signal"
QUEUES, SPREAD, FIVE = "1,000 queues polled, tasks in one", "tasks spread over 1,000 queues", "five priorities"
GROUPS, POLLERS = "10,000 groups, ten tasks of each at a time", "50 pollers"
FINISHED_SQL = f"""
INSERT INTO {TABLE} (queue_name, reference_number, payload, status, final_status, attempt, total_attempt,
    ready_time, start_time, finish_time)
SELECT 'nothing', 'f-' || i, jsonb_build_object('number', i), 'COMPLETED', 'COMPLETED', 1, 1, NULL,
    now() - interval '1 h', now() - interval '1 h' FROM generate_series(1, %s) AS i
"""
LATER_SQL = f"""
INSERT INTO {TABLE} (queue_name, reference_number, payload, priority, ready_time, next_process_time)
SELECT 'nothing', 'l-' || i, jsonb_build_object('number', i), i %% 10, now() + i * interval '1 s' + interval '1 h',
    now() + i * interval '1 s' + interval '1 h' FROM generate_series(1, %s) AS i
"""
SLEEPING_SQL = f"""
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


def rows(sql: str, number: int, server: Server) -> None:
    server.run(sql, [number])
    server.calm("dbtaskqueue_step")  # as the task table is before each drain


def scenario(server: Server, size: float) -> Scenario:
    tasks, others = int(100_000 * size), int(1_000_000 * size)
    plain, alone = Drain(server, tasks), f"{tasks:,} tasks"
    names = [f"queue-{number}" for number in range(1000)]
    thousand = Drain(server, tasks, queues=names, env={"BENCHMARK_QUEUES": "1000"})
    limit = {"QUEUES": {"nothing": {"max_running_per_group": 10}}}
    backlogs = {f"{number:,} tasks": Drain(server, number) for number in (tasks // 10, 10 * tasks)}
    growth = [alone, *backlogs, SPREAD, GROUPS, POLLERS]
    cases = [
        Case(alone, plain),
        Case(FINISHED, replace(plain, prepare=partial(rows, FINISHED_SQL, others))),
        Case(LATER, replace(plain, prepare=partial(rows, LATER_SQL, others))),
        Case(SLEEPING, replace(plain, prepare=partial(rows, SLEEPING_SQL, others))),
        Case(QUEUES, replace(thousand, queues=names[:1], polled=names)),
        Case(SPREAD, thousand),
        Case(FIVE, replace(plain, priorities=5)),
        *[Case(name, drain) for name, drain in backlogs.items()],
        Case(GROUPS, replace(plain, keys=10_000, settings=limit)),
        Case(POLLERS, replace(plain, processes=max(2, int(50 * min(1, 2 * size))))),
    ]
    rate = "tasks/s"
    targets = [
        Target("1,000,000 finished rows ≥ 0.95 times none", FINISHED, rate, 0.95, alone),
        Target("1,000,000 scheduled for later ≥ 0.9 times none", LATER, rate, 0.9, alone),
        Target("1,000,000 that sleep or wait ≥ 0.95 times none", SLEEPING, rate, 0.95, alone),
        Target("1,000 queues, tasks in one ≥ 0.9 times one queue", QUEUES, rate, 0.9, alone),
        Target("1,000 queues, tasks in all ≥ 0.9 times one queue", SPREAD, rate, 0.9, alone),
        Target("five priorities ≥ 0.8 times one", FIVE, rate, 0.8, alone),
    ]
    title = f"Growth: drains of {tasks:,} tasks, unless the row says otherwise, beside other rows (times {size:g})"
    return Scenario("volume", title, cases, targets, picture=growth)
