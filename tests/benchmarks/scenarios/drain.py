"""Drain of tasks that wait, by one and two processes, in every way to process them."""

from __future__ import annotations

from tests.benchmarks.drains import Drain, raw_drain
from tests.benchmarks.measure import Case, Scenario, Target
from tests.benchmarks.server import Server

RAW, RAW_2, RAW_EACH = "raw loop, 500", "raw loop, 500, 2 processes", "raw loop, a commit per task"
RAW_DJANGO = "raw loop, Django's transaction per task"
OURS, OURS_2, PLAIN = "ours", "ours, 2 processes", "ours, without orjson"
ASYNC, ATOMIC_100, ATOMIC, BUSY = "ours, async", "ours, atomic, batch=100", "ours, atomic", "ours, 20 µs handler"


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    tasks, few = int(100_000 * size), int(20_000 * size)
    hidden = {"BENCHMARK_WITHOUT_ORJSON": "1"}
    cases = [
        Case(RAW, lambda: raw_drain(server, tasks)),
        Case(OURS, Drain(server, tasks)),
        Case(PLAIN, Drain(server, tasks, env=hidden)),
        Case(RAW_2, lambda: raw_drain(server, 2 * tasks, processes=2)),
        Case(OURS_2, Drain(server, 2 * tasks, processes=2)),
        Case(ASYNC, Drain(server, tasks, queues=["nothing-async"])),
        Case(BUSY, Drain(server, tasks, queues=["busy"])),
        Case(ATOMIC_100, Drain(server, tasks, queues=["nothing-atomic-100"])),
        Case(RAW_EACH, lambda: raw_drain(server, few, way="each")),
        Case(RAW_DJANGO, lambda: raw_drain(server, few, way="django")),
        Case(ATOMIC, Drain(server, few, queues=["nothing-atomic"])),
    ]
    rate = "tasks/s"
    targets = [
        Target("1: one process ≥ 1.2 times raw", OURS, rate, 1.2, RAW),
        Target("1: one process, without orjson", PLAIN, rate, 1.2, RAW),
        Target("1: two processes ≥ 0.7 times raw with two", OURS_2, rate, 0.7, RAW_2),
        Target("1: async ≥ 0.9 times raw", ASYNC, rate, 0.9, RAW),
        Target("1: atomic, batch=100 ≥ 0.5 times raw", ATOMIC_100, rate, 0.5, RAW),
        Target("1: atomic ≥ 0.9 times a commit per task", ATOMIC, rate, 0.9, RAW_EACH),
        Target("1: atomic ≥ 0.9 times Django's transaction per task", ATOMIC, rate, 0.9, RAW_DJANGO),
        Target("1: 20 µs handler ≥ 35,000/s", BUSY, rate, 35_000),
    ]
    return Scenario("drain", "Drain", cases, targets)
