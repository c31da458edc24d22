"""Drain of a queue with limits that are never reached, and of tasks with 10,000 keys: what the limits cost."""

from dataclasses import replace

from tests.benchmarks.drains import Drain
from tests.benchmarks.measure import Case, Scenario, Target
from tests.benchmarks.server import Server

KEYS = 10_000
FREE, RATE = "no limit", "max_running and rate"
KEYED, TEN = "10,000 keys, no limit", "10,000 keys, ten of each at a time"


def scenario(server: Server, size: float) -> Scenario:
    drain = Drain(server, int(100_000 * size))

    def limited(**limits: object) -> Drain:
        return replace(drain, settings={"QUEUES": {"nothing": limits}})

    cases = [
        Case(FREE, drain),
        Case("max_running", limited(max_running=5000)),
        Case(RATE, limited(max_running=5000, rate="1000000/s")),
        Case(KEYED, replace(drain, keys=KEYS, keyed=False)),
        Case("10,000 keys, one of each at a time", replace(drain, keys=KEYS)),
        Case(TEN, replace(limited(max_running_per_group=10), keys=KEYS)),
    ]
    targets = [
        Target("a number and a rate over all pollers ≥ 0.9 times no limit", RATE, "tasks/s", 0.9, FREE),
        Target("ten at a time of each of 10,000 keys ≥ 0.9 times no limit", TEN, "tasks/s", 0.9, KEYED),
    ]
    return Scenario("limits", "Limits", cases, targets)
