"""Pick-up: from the return of ``enqueue``, which is after its commit, to the processor's first line."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from time import monotonic

from tests.benchmarks import raw
from tests.benchmarks.children import Worker, python, wait_for
from tests.benchmarks.drains import raw_table
from tests.benchmarks.measure import Reading
from tests.benchmarks.server import Server, Span

QUEUE = "pick-up"
LISTENING = "SELECT 1 FROM pg_stat_activity WHERE query = 'LISTEN raw_simple' AND state = 'idle'"


def pick_ups(server: Server, number: int, every: float) -> Reading:
    """Enqueue into an idle poller's queue, one task each ``every`` seconds."""
    from django_dbtaskqueue import enqueue
    from django_dbtaskqueue.models import Task

    called, committed, pause = {}, {}, threading.Event()
    with server.span() as span:
        first = monotonic()
        for index in range(number):
            pause.wait(max(0.0, first + index * every - monotonic()))
            began = monotonic()
            task = enqueue(QUEUE, payload={"number": index})
            called[task.pk], committed[task.pk] = began, monotonic()
        done = Task.objects.filter(pk__in=called, status="COMPLETED")
        wait_for(lambda: done.count() == number, "that all are picked up", every=0.1, patience=60)
    started = {pk: result["started"] for pk, result in done.values_list("pk", "result")}
    return _reading([(called[pk], committed[pk], started[pk]) for pk in called], span)


def raw_pick_ups(server: Server, number: int, every: float) -> Reading:
    """The same with the simplest loop, which listens; its NOTIFY goes with the commit."""
    raw_table(server, raw.SIMPLE)
    worker, pause, times = Worker(*python("raw", "listen")), threading.Event(), []
    worker.go()
    with server.connect() as connection, server.span() as span:
        wait_for(lambda: connection.execute(LISTENING).fetchone(), "that the loop listens")
        first = monotonic()
        for index in range(number):
            pause.wait(max(0.0, first + index * every - monotonic()))
            began = monotonic()
            connection.execute(raw.PUT, prepare=True)
            times.append((began, monotonic()))
        connection.execute(raw.STOP)
        connection.execute("NOTIFY raw_simple")
        worker.result()
        found = connection.execute(
            "SELECT payload::float8 FROM raw_simple WHERE payload IS NOT NULL ORDER BY id"
        ).fetchall()
    return _reading([(*time, started) for time, (started,) in zip(times, found, strict=True)], span)


def _reading(times: Sequence[tuple[float, float, float]], span: Span) -> Reading:
    """Return how long tasks waited; of each: when it was called for, committed, started."""
    waited = [(started - committed) * 1000 for _, committed, started in times]
    return {
        "ms p50": statistics.median(waited),
        "ms p99": percentile(waited, 99),
        "ms most": max(waited),
        "ms p50 from the call": statistics.median((started - called) * 1000 for called, _, started in times),
        **span.noise,
    }


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that ``part`` percent do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part / 100))]
