"""How soon an idle poller starts a task."""

from __future__ import annotations

from tests.benchmarks.drains import TABLE, empty, running
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.pickups import QUEUE, pick_ups, raw_pick_ups
from tests.benchmarks.server import Server

RAW, OURS, DEAF = "simplest loop, 20/s", "ours, 20/s", "ours, NOTIFY lost"


def idle(server: Server, number: int, every: float, taskqueue: str = "{}") -> Reading:
    """Return how soon an idle poller takes what comes."""
    empty(server)
    server.calm(TABLE)
    with running(1, "--queue", QUEUE, env={"BENCHMARK_TASKQUEUE": taskqueue}):
        pick_ups(server, 10, 0.05)
        return pick_ups(server, number, every)


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    number = max(40, int(400 * size))
    cases = [
        Case(RAW, lambda: raw_pick_ups(server, number, 0.05)),
        Case(OURS, lambda: idle(server, number, 0.05)),
        Case(DEAF, lambda: idle(server, max(8, int(20 * size)), 0.73, '{"NOTIFY": false}')),
    ]
    targets = [
        Target("pick-up p50 ≤ 1.2 ms", OURS, "ms p50", 1.2, most=True),
        Target("pick-up p99 ≤ 4 ms", OURS, "ms p99", 4, most=True),
        Target("NOTIFY lost: one poll interval (1 s, and a fifth for jitter)", DEAF, "ms most", 1250, most=True),
    ]
    return Scenario("pickup", "Pick-up by an idle poller", cases, targets)
