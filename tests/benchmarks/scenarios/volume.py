"""What else lies in the table: finished tasks, tasks for later, other queues, other priorities."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.benchmarks.drains import TABLE, Drain
from tests.benchmarks.measure import Case, Scenario, Target
from tests.benchmarks.server import Server

EMPTY, FINISHED, LATER = "nothing else", "1,000,000 finished", "1,000,000 for later, ten priorities"
QUEUES, SPREAD, FIVE = "1,000 queues polled, tasks in one", "tasks spread over 1,000 queues", "five priorities"
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


def rows(sql: str, number: int, server: Server) -> None:
    """Put them into the table."""
    server.run(sql, [number])


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    tasks, others = int(100_000 * size), int(1_000_000 * size)
    plain = Drain(server, tasks)
    names = [f"queue-{number}" for number in range(1000)]
    thousand = Drain(server, tasks, queues=names, env={"BENCHMARK_QUEUES": "1000"})
    cases = [
        Case(EMPTY, plain),
        Case(FINISHED, replace(plain, prepare=partial(rows, FINISHED_SQL, others))),
        Case(LATER, replace(plain, prepare=partial(rows, LATER_SQL, others))),
        Case(QUEUES, replace(thousand, queues=names[:1], polled=names)),
        Case(SPREAD, thousand),
        Case(FIVE, replace(plain, priorities=5)),
    ]
    rate = "tasks/s"
    targets = [
        Target("5: 1,000,000 finished rows ≥ 0.95 times none", FINISHED, rate, 0.95, EMPTY),
        Target("5: 1,000,000 scheduled for later ≥ 0.9 times none", LATER, rate, 0.9, EMPTY),
        Target("5: 1,000 queues, tasks in one ≥ 0.9 times one queue", QUEUES, rate, 0.9, EMPTY),
        Target("5: 1,000 queues, tasks in all ≥ 0.9 times one queue", SPREAD, rate, 0.9, EMPTY),
        Target("5: five priorities ≥ 0.8 times one", FIVE, rate, 0.8, EMPTY),
    ]
    return Scenario("volume", f"Drain beside other rows (times {size:g})", cases, targets)
