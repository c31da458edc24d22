"""One task in a transaction of its own, and what an enqueue adds to a view's transaction."""

from collections.abc import Mapping

from tests.benchmarks.children import Worker, python, together
from tests.benchmarks.drains import empty, raw_table
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.raw import SIMPLE
from tests.benchmarks.server import Server

RAW, OURS, VIEW = "prepared INSERT into the simplest table", "ours", "ours, in a view's transaction"
QUIET, LOUD = "ours, 8 producers, NOTIFY off", "ours, 8 producers"


def produced(server: Server, way: str, number: int = 1, env: Mapping[str, str] | None = None) -> Reading:
    """Let producers run on empty tables; return their figures, of several the rate of all."""
    empty(server)
    raw_table(server, SIMPLE)
    module, arguments = ("raw", ["enqueue"]) if way == "raw" else ("producer", [way])
    with server.connect() as listener:
        listener.execute("LISTEN dbtaskqueue")  # nobody to wake would make a NOTIFY cheaper than it is
        workers = [Worker(*python(module, *arguments), env=env) for _ in range(number)]
        with server.span() as span:
            found = together(*workers)
    if "tasks" not in found[0]:
        return found[0] | span.noise
    tasks = sum(one["tasks"] for one in found)
    return {
        "tasks/s": sum(one["tasks"] / (one["ended"] - one["began"]) for one in found),
        "µs CPU worker": sum(one["cpu"] for one in found) / tasks * 1e6,
        **span.cost(tasks),
    }


def scenario(server: Server, size: float) -> Scenario:
    quiet = {"BENCHMARK_TASKQUEUE": '{"NOTIFY": false}'}
    cases = [
        Case(RAW, lambda: produced(server, "raw")),
        Case(OURS, lambda: produced(server, "single")),
        Case("ORM create()", lambda: produced(server, "create")),
        Case(VIEW, lambda: produced(server, "view")),
        Case(QUIET, lambda: produced(server, "single", 8, quiet)),
        Case(LOUD, lambda: produced(server, "single", 8)),
    ]
    targets = [
        Target("enqueue ≥ 0.8 times a prepared INSERT", OURS, "tasks/s", 0.8, RAW),
        Target("≤ 0.4 ms added to a view's transaction", VIEW, "ms added, p50", 0.4, most=True),
        Target("eight producers lose < 5 % to NOTIFY", LOUD, "tasks/s", 0.95, QUIET),
    ]
    return Scenario("enqueue", "Enqueue, one task in its own transaction", cases, targets)
