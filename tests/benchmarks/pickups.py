"""Pick-up: from the return of ``enqueue``, which is after its commit, to the processor's first line."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from time import monotonic

from tests.benchmarks.children import wait_for
from tests.benchmarks.measure import Reading

QUEUE = "pick-up"


def pick_ups(number: int, every: float) -> Reading:
    """Enqueue into an idle poller's queue, one task each ``every`` seconds."""
    from django_dbtaskqueue import enqueue
    from django_dbtaskqueue.models import Task

    called, committed, pause = {}, {}, threading.Event()
    first = monotonic()
    for index in range(number):
        pause.wait(max(0.0, first + index * every - monotonic()))
        began = monotonic()
        task = enqueue(QUEUE, payload={"number": index})
        called[task.pk], committed[task.pk] = began, monotonic()
    done = Task.objects.filter(pk__in=called, status="COMPLETED")
    wait_for(lambda: done.count() == number, "that all are picked up", every=0.1, patience=60)
    started = {pk: result["started"] for pk, result in done.values_list("pk", "result")}
    waited = [(started[pk] - committed[pk]) * 1000 for pk in called]
    return {
        "ms p50": statistics.median(waited),
        "ms p99": percentile(waited, 99),
        "ms most": max(waited),
        "ms p50 from the call": statistics.median((started[pk] - called[pk]) * 1000 for pk in called),
    }


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that ``part`` percent do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part / 100))]
