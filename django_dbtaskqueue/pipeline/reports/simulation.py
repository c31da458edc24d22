"""A queue replayed: discrete events, no Spark, no clock. Deterministic: the same tasks give the same waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

BackOff = Callable[[int], timedelta | None]


@dataclass(frozen=True, slots=True)
class Job:
    """A task as history knows it: seconds since the first one, priority (low first), failed attempts, and the run."""

    arrival: float
    run: float
    failures: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of it: seconds until it was first taken, and until its last attempt ended."""

    arrival: float
    wait: float
    lead: float


def replay(jobs: Sequence[Job], *, slots: int, back_off: BackOff) -> list[Served]:
    """Return what happens to the tasks with so many slots, in the order of their arrival.

    A free slot takes the due task first in (priority, due time, arrival). Each failed attempt runs as long as the last
    one did, and the task is due again after ``back_off(number of the failure)``; None gives it up there.
    """
    due = [(job.arrival, number) for number, job in enumerate(jobs)]
    heapq.heapify(due)
    line: list[tuple[int, float, int]] = []  # due now
    free = [0.0] * slots
    heapq.heapify(free)
    failed = [0] * len(jobs)
    first: list[float | None] = [None] * len(jobs)
    ends = [0.0] * len(jobs)
    now = 0.0
    while due or line:
        now = max(now, heapq.heappop(free))
        if not line:
            now = max(now, due[0][0])
        while due and due[0][0] <= now:
            time, number = heapq.heappop(due)
            heapq.heappush(line, (jobs[number].priority, time, number))
        _, _, number = heapq.heappop(line)
        job = jobs[number]
        first[number] = now if first[number] is None else first[number]
        ends[number] = now + job.run
        heapq.heappush(free, ends[number])
        if failed[number] < job.failures:
            failed[number] += 1
            delay = back_off(failed[number])
            if delay is not None:
                heapq.heappush(due, (ends[number] + delay.total_seconds(), number))
    return [
        Served(job.arrival, (first[number] or 0.0) - job.arrival, ends[number] - job.arrival)
        for number, job in enumerate(jobs)
    ]


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Return the largest number of spans (start, end) that any moment lies in; at least 1."""
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return max(most, 1)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least of the values, in order, that the share of them does not exceed; 0 of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def over_time(served: Sequence[Served], parts: int = 120) -> Iterator[tuple[float, float]]:
    """Yield (time, p95 of the wait) for each of the equal parts of time in which tasks arrived."""
    if not served:
        return
    width = max((served[-1].arrival - served[0].arrival) / parts, 1.0)
    groups: dict[int, list[float]] = {}
    for one in served:
        groups.setdefault(int((one.arrival - served[0].arrival) / width), []).append(one.wait)
    for place, waits in sorted(groups.items()):
        yield served[0].arrival + (place + 0.5) * width, quantile(sorted(waits), 0.95)
