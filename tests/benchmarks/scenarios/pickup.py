"""How soon a task is started: by an idle poller, and while an old snapshot keeps PostgreSQL from clearing away.

From the return of ``enqueue``, after its commit, in another process to the processor's begin. A report that runs for
hours has a snapshot.
"""

import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

from tests.benchmarks.children import Figures, Worker, python, together
from tests.benchmarks.drains import TABLE, Around, Drain, empty, running
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.server import Server, Span
from tests.patience import until

QUEUE, EVERY = "pick-up", 0.05
OURS, DEAF = "ours, 20/s", "ours, NOTIFY lost"
FIRSTS, CLOSING, EIGHT = "ours, first ten of a new process", "the same, CONN_MAX_AGE=0", "ours, eight new ones, 20/s"
CHURN = 200_000
# Three ways to come to stand behind the bound: a late commit, a priority nobody had, a lease that ran out.
LATE = f"""
INSERT INTO {TABLE} (queue_name, reference_number, ready_time, next_process_time)
VALUES ('nothing', %s, now() - interval '1 h', now() - interval '1 h')
"""
FIRST = f"INSERT INTO {TABLE} (queue_name, reference_number, priority) VALUES ('nothing', %s, -1)"
ORPHAN = f"""
INSERT INTO {TABLE} (queue_name, reference_number, status, attempt, total_attempt, ready_time, start_time,
    poller_instance, next_process_time)
VALUES ('nothing', %s, 'PROCESSING', 1, 1, now() - interval '1 h', now() - interval '1 h', 'gone', now())
"""
# Of what was put there during the drain: an idle poller, whom SQL tells nothing, would take it at its next poll.
WAITED = f"""
SELECT extract(epoch FROM start_time - create_time)::float8 * 1000 FROM {TABLE}
WHERE reference_number LIKE 'behind-%%' AND start_time >= create_time
    AND create_time < (SELECT max(start_time) FROM {TABLE} WHERE reference_number NOT LIKE 'behind-%%')
"""
LEFT = f"SELECT 1 FROM {TABLE} WHERE reference_number LIKE 'behind-%' AND status <> 'COMPLETED' LIMIT 1"


def pick_ups(server: Server, number: int, *how: object, processes: int = 1, times: int = 1, own: str = "{}") -> Reading:
    """Processes that have just started enqueue into an idle poller's queue, so many at once, and so many times."""
    from django_dbtaskqueue.models import Task

    server.calm(TABLE)
    command, committed = python("producer", "paced", QUEUE, *map(str, (number, *(how or [EVERY])))), Figures()
    with running(1, "--queue", QUEUE, env={"BENCHMARK_TASKQUEUE": own}), server.span() as span:
        for _ in range(times):
            for one in together(*(Worker(*command) for _ in range(processes))):
                committed |= one
        done = Task.objects.filter(pk__in=committed, status="COMPLETED")
        until(lambda: done.count() == len(committed))
    rows = done.values_list("pk", "payload", "result")
    return _reading([(called, committed[str(pk)], result["started"]) for pk, called, result in rows], span)


def _reading(times: Sequence[tuple[float, float, float]], span: Span) -> Reading:
    """Return how long tasks waited; of each: when it was called for, committed, started."""
    waited = sorted((started - committed) * 1000 for _, committed, started in times)
    from_call = statistics.median((started - called) * 1000 for called, _, started in times)
    p99 = waited[min(len(waited) - 1, len(waited) * 99 // 100)]
    ours = {"ms p50": statistics.median(waited), "ms p99": p99, "ms most": waited[-1]}
    return {**ours, "ms p50 from the call": from_call, **span.noise}


def pickup(server: Server, size: float) -> Scenario:
    number, turns = max(40, int(400 * size)), max(2, int(20 * size))

    def idle(number: int, *how: object, **more: Any) -> Reading:
        empty(server)
        return pick_ups(server, number, *how, **more)

    cases = {
        OURS: lambda: idle(number),
        DEAF: lambda: idle(max(8, turns), 0.73, own='{"NOTIFY": false}'),
        FIRSTS: lambda: idle(10, times=turns),
        CLOSING: lambda: idle(10, EVERY, "closes", times=turns),
        "ours, after 1 s of silence": lambda: idle(2 * turns, 1.05),
        "ours, after 60 s of silence": lambda: idle(2, 60),
        EIGHT: lambda: idle(number // 8, processes=8),
    }
    targets = [
        Target("pick-up p50 ≤ 1.2 ms", OURS, "ms p50", 1.2, most=True),
        Target("pick-up p99 ≤ 4 ms", OURS, "ms p99", 4, most=True),
        *(Target(f"{one}: p99 ≤ 4 ms", one, "ms p99", 4, most=True) for one in (FIRSTS, CLOSING, EIGHT)),
        Target("NOTIFY lost: idle_interval (5 s, and a fifth for jitter)", DEAF, "ms most", 6000, most=True),
    ]
    return Scenario("pickup", "Pick-up by an idle poller", cases, targets)


@contextmanager
def snapshot(server: Server) -> Iterator[None]:
    """Keep an old view of the database open."""
    with server.connect() as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.execute(f"SELECT count(*) FROM {TABLE}")
        yield


def churned(server: Server, tasks: int) -> None:
    drain = Drain(server, tasks)
    drain.fill()
    with drain.poller():
        drain.resume()


def pinned(server: Server, size: float) -> Scenario:
    tasks, churn, picks = int(100_000 * size), int(CHURN * size), max(40, int(300 * size))

    def drain(around: Around, priorities: int = 1) -> Reading:
        how = {"priorities": priorities, "around": around, "prepare": partial(churned, tasks=churn)}
        return Drain(server, tasks, first=churn, **how)()

    def pick_up(around: Around) -> Reading:
        empty(server)
        with around(server):
            churned(server, churn)
            return pick_ups(server, picks)

    def behind(around: Around) -> Reading:
        """While a drain goes on, put tasks where it has passed; return how long they waited."""
        drain, over = Drain(server, 3 * tasks, first=churn), threading.Event()
        empty(server)
        with around(server):
            churned(server, churn)
            drain.fill()
            server.calm(TABLE)
            with drain.poller(), ThreadPoolExecutor(1) as pool:
                putting = pool.submit(put_behind, server, over)
                drain.resume()
                over.set()
                putting.result()
                until(lambda: not server.run(LEFT))
        waited = [row[0] for row in server.run(WAITED)]
        return {"ms p50": statistics.median(waited), "ms most": max(waited), "tasks": len(waited)}

    acts = {"drain": drain, "drain, five priorities": partial(drain, priorities=5), "pick-up": pick_up}
    cases = {
        f"{name}{mark}": partial(act, around)
        for name, act in (acts | {"behind the bound": behind}).items()
        for mark, around in (("", nullcontext), (", pinned", snapshot))
    }
    five, five_pinned = "drain, five priorities", "drain, five priorities, pinned"
    targets = [
        Target("pinned drain ≥ 0.8 times unpinned, one priority", "drain, pinned", "tasks/s", 0.8, "drain"),
        Target("pinned drain ≥ 0.8 times unpinned, five priorities", five_pinned, "tasks/s", 0.8, five),
        Target("pinned pick-up p50 ≤ 2 ms", "pick-up, pinned", "ms p50", 2, most=True),
        Target("behind the bound ≤ 0.2 s unpinned", "behind the bound", "ms most", 200, most=True),
        Target("behind the bound ≤ 1.5 s pinned", "behind the bound, pinned", "ms most", 1500, most=True),
    ]
    return Scenario("pinned", "Under an open snapshot, after a churn of 200,000", cases, targets)


def put_behind(server: Server, over: threading.Event) -> None:
    with server.connect() as connection:
        for number in count():
            connection.execute((LATE, FIRST, ORPHAN)[number % 3], [f"behind-{number}"])
            if over.wait(0.15):
                return
