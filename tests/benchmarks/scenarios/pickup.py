"""How soon a task is started: by an idle poller, and while an old snapshot keeps PostgreSQL from clearing away.

From the return of ``enqueue``, after its commit, to the processor's begin. A report that runs for hours has a snapshot.
"""

import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import monotonic

from tests.benchmarks import raw
from tests.benchmarks.children import Worker, python
from tests.benchmarks.drains import TABLE, Around, Drain, empty, raw_table, running
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.server import Server, Span
from tests.patience import until

QUEUE, WARM_UP, EVERY = "pick-up", 10, 0.05
LISTENING = "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN raw_simple' AND state = 'idle'"
STARTED = "SELECT payload::float8 FROM raw_simple WHERE payload IS NOT NULL ORDER BY id"
RAW, OURS, DEAF = "simplest loop, 20/s", "ours, 20/s", "ours, NOTIFY lost"
CHURN = 200_000
DRAIN, DRAIN_PINNED = "drain", "drain, pinned"
FIVE, FIVE_PINNED = "drain, five priorities", "drain, five priorities, pinned"
PICK_PINNED = "pick-up, pinned"
BEHIND, BEHIND_PINNED = "behind the bound", "behind the bound, pinned"
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


def paced(number: int, every: float) -> Iterator[int]:
    first, pause = monotonic(), threading.Event()
    for index in range(number):
        pause.wait(max(0.0, first + index * every - monotonic()))
        yield index


def pick_ups(server: Server, number: int, every: float = EVERY) -> Reading:
    """Enqueue into an idle poller's queue, one task each ``every`` seconds."""
    from django_dbtaskqueue import enqueue
    from django_dbtaskqueue.models import Task

    times = {}
    with server.span() as span:
        for index in paced(number, every):
            began = monotonic()
            task = enqueue(QUEUE, payload={"number": index})
            times[task.pk] = began, monotonic()
        done = Task.objects.filter(pk__in=times, status="COMPLETED")
        until(lambda: done.count() == number)
    return _reading([(*times[pk], result["started"]) for pk, result in done.values_list("pk", "result")], span)


def raw_pick_ups(server: Server, number: int) -> Reading:
    """The same with the simplest loop, which listens; its NOTIFY goes with the commit."""
    raw_table(server, raw.SIMPLE)
    worker, times = Worker(*python("raw", "listen")), []
    worker.go()
    with server.connect() as connection, server.span() as span:
        until(lambda: connection.execute(LISTENING).fetchone())
        for _ in paced(number, EVERY):
            began = monotonic()
            connection.execute(raw.PUT, prepare=True)
            times.append((began, monotonic()))
        connection.execute(raw.STOP)
        connection.execute("NOTIFY raw_simple")
        worker.result()
        found = connection.execute(STARTED).fetchall()
    return _reading([(*time, started) for time, (started,) in zip(times, found, strict=True)], span)


def _reading(times: Sequence[tuple[float, float, float]], span: Span) -> Reading:
    """Return how long tasks waited; of each: when it was called for, committed, started."""
    waited = sorted((started - committed) * 1000 for _, committed, started in times)
    from_call = statistics.median((started - called) * 1000 for called, _, started in times)
    p99 = waited[min(len(waited) - 1, len(waited) * 99 // 100)]
    ours = {"ms p50": statistics.median(waited), "ms p99": p99, "ms most": waited[-1]}
    return {**ours, "ms p50 from the call": from_call, **span.noise}


def warm_pick_ups(server: Server, number: int, every: float = EVERY, taskqueue: str = "{}") -> Reading:
    """The same with a poller of its own, after some that do not count."""
    with running(1, "--queue", QUEUE, env={"BENCHMARK_TASKQUEUE": taskqueue}):
        pick_ups(server, WARM_UP)
        return pick_ups(server, number, every)


def pickup(server: Server, size: float) -> Scenario:
    number = max(40, int(400 * size))

    def idle(number: int, *options: object) -> Reading:
        empty(server)
        server.calm(TABLE)
        return warm_pick_ups(server, number, *options)

    cases = {
        RAW: lambda: raw_pick_ups(server, number),
        OURS: lambda: idle(number),
        DEAF: lambda: idle(max(8, int(20 * size)), 0.73, '{"NOTIFY": false}'),
    }
    targets = [
        Target("pick-up p50 ≤ 1.2 ms", OURS, "ms p50", 1.2, most=True),
        Target("pick-up p99 ≤ 4 ms", OURS, "ms p99", 4, most=True),
        Target("NOTIFY lost: one poll interval (1 s, and a fifth for jitter)", DEAF, "ms most", 1250, most=True),
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


@dataclass(frozen=True)
class Pinned:
    """The same with and without an open snapshot, after a churn."""

    server: Server
    tasks: int
    churn: int
    around: Around

    def drain(self, priorities: int = 1) -> Reading:
        how = {"priorities": priorities, "around": self.around, "prepare": partial(churned, tasks=self.churn)}
        return Drain(self.server, self.tasks, first=self.churn, **how)()

    def pick_up(self, number: int) -> Reading:
        empty(self.server)
        with self.around(self.server):
            churned(self.server, self.churn)
            self.server.calm(TABLE)
            return warm_pick_ups(self.server, number)

    def behind(self) -> Reading:
        """While a drain goes on, put tasks where it has passed; return how long they waited."""
        drain = Drain(self.server, 3 * self.tasks, first=self.churn)
        empty(self.server)
        with self.around(self.server):
            churned(self.server, self.churn)
            drain.fill()
            self.server.calm(TABLE)
            over = threading.Event()
            with drain.poller(), ThreadPoolExecutor(1) as pool:
                putting = pool.submit(self._put_behind, over)
                drain.resume()
                over.set()
                putting.result()
                until(lambda: not self.server.run(LEFT))
        waited = [row[0] for row in self.server.run(WAITED)]
        return {"ms p50": statistics.median(waited), "ms most": max(waited), "tasks": len(waited)}

    def _put_behind(self, over: threading.Event) -> None:
        with self.server.connect() as connection:
            for number in count():
                connection.execute((LATE, FIRST, ORPHAN)[number % 3], [f"behind-{number}"])
                if over.wait(0.15):
                    return


def pinned(server: Server, size: float) -> Scenario:
    tasks, churn, picks = int(100_000 * size), int(CHURN * size), max(40, int(300 * size))
    free = Pinned(server, tasks, churn, nullcontext)
    pinned = replace(free, around=snapshot)
    cases = {
        DRAIN: free.drain,
        DRAIN_PINNED: pinned.drain,
        FIVE: partial(free.drain, 5),
        FIVE_PINNED: partial(pinned.drain, 5),
        "pick-up": partial(free.pick_up, picks),
        PICK_PINNED: partial(pinned.pick_up, picks),
        BEHIND: free.behind,
        BEHIND_PINNED: pinned.behind,
    }
    targets = [
        Target("pinned drain ≥ 0.8 times unpinned, one priority", DRAIN_PINNED, "tasks/s", 0.8, DRAIN),
        Target("pinned drain ≥ 0.8 times unpinned, five priorities", FIVE_PINNED, "tasks/s", 0.8, FIVE),
        Target("pinned pick-up p50 ≤ 2 ms", PICK_PINNED, "ms p50", 2, most=True),
        Target("behind the bound ≤ 0.2 s unpinned", BEHIND, "ms most", 200, most=True),
        Target("behind the bound ≤ 1.5 s pinned", BEHIND_PINNED, "ms most", 1500, most=True),
    ]
    return Scenario("pinned", "Under an open snapshot, after a churn of 200,000", cases, targets)
