"""How soon an idle poller starts a task: from the return of ``enqueue``, after its commit, to the processor's begin."""

import statistics
import threading
from collections.abc import Iterator, Sequence
from time import monotonic

from tests.benchmarks import raw
from tests.benchmarks.children import Worker, python
from tests.benchmarks.drains import TABLE, empty, raw_table, running
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import Server, Span
from tests.patience import until

QUEUE, WARM_UP, EVERY = "pick-up", 10, 0.05
LISTENING = "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN raw_simple' AND state = 'idle'"
STARTED = "SELECT payload::float8 FROM raw_simple WHERE payload IS NOT NULL ORDER BY id"
RAW, OURS, DEAF = "simplest loop, 20/s", "ours, 20/s", "ours, NOTIFY lost"


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

    cases = [
        Case(RAW, lambda: raw_pick_ups(server, number)),
        Case(OURS, lambda: idle(number)),
        Case(DEAF, lambda: idle(max(8, int(20 * size)), 0.73, '{"NOTIFY": false}')),
    ]
    targets = [
        Target("pick-up p50 ≤ 1.2 ms", OURS, "ms p50", 1.2, most=True),
        Target("pick-up p99 ≤ 4 ms", OURS, "ms p99", 4, most=True),
        Target("NOTIFY lost: one poll interval (1 s, and a fifth for jitter)", DEAF, "ms most", 1250, most=True),
    ]
    return Scenario("pickup", "Pick-up by an idle poller", cases, targets)
