"""Many pollers, and many slots in one: tasks that wait, and all that makes a checkout dearer."""

from collections.abc import Callable
from dataclasses import replace

from tests.benchmarks.drains import Drain
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.scenarios.pickup import snapshot
from tests.benchmarks.server import Server

IDEAL = "times the ideal"


def pollers(server: Server, size: float) -> Scenario:
    """Tasks of 1, 5 and 20 ms, and twelve processes that drain tasks that do nothing."""

    def waiting(ms: int, processes: int = 1, kind: str = "threads", slots: int = 4) -> Callable[[], Reading]:
        ideal = processes * slots * 1000 / ms
        number, queue = int(min(ideal, 15_000) * 4 * size), f"wait-{ms}-{kind}"
        drain = Drain(server, number, queues=[queue], processes=processes, options=(f"--{kind}", str(slots)))
        return lambda: (found := drain()) | {IDEAL: found["tasks/s"] / ideal}

    many, names = Drain(server, int(60_000 * size), processes=12), [f"queue-{number}" for number in range(100)]
    limits, grouped = {"max_running": 50_000, "rate": "1000000/s"}, {"max_running_per_group": 10}
    slots = {f"5 ms, {n} {kind}": waiting(5, 1, kind, n) for kind in ("threads", "async") for n in (16, 100)}
    cases = {
        **slots,
        **{f"{ms} ms, {n} processes of 4 threads": waiting(ms, n) for ms in (1, 20) for n in (1, 4, 12, 50)},
        "child processes": Drain(server, int(20_000 * size), queues=["nothing-process"]),
        "twelve": many,
        "twelve, 100 queues": replace(many, queues=names, env={"BENCHMARK_QUEUES": "100"}),
        "twelve, five priorities": replace(many, priorities=5),
        "twelve, max_running and rate": replace(many, settings={"QUEUES": {"nothing": limits}}),
        "twelve, 10,000 groups": replace(many, keys=10_000, settings={"QUEUES": {"nothing": grouped}}),
        "twelve, pinned": replace(many, around=snapshot),
    }
    targets = [Target(f"{name} ≥ 0.95 times the ideal", name, IDEAL, 0.95) for name in slots]
    return Scenario("pollers", "Pollers and slots", cases, targets)
