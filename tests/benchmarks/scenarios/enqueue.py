"""One task in a transaction of its own, and what an enqueue adds to a view's transaction."""

from __future__ import annotations

from collections.abc import Mapping

from tests.benchmarks import raw
from tests.benchmarks.children import Worker, python, together
from tests.benchmarks.drains import empty
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import Server

RAW, OURS, ORM, VIEW = "raw loop, prepared INSERT", "ours", "ORM create()", "ours, in a view's transaction"
QUIET, LOUD = "ours, 8 producers, NOTIFY off", "ours, 8 producers"


def produced(server: Server, way: str, number: int = 1, env: Mapping[str, str] | None = None) -> Reading:
    """Let producers run on empty tables; return their figures, of several the rate of all."""
    empty(server)
    module, arguments = ("raw", ["enqueue"]) if way == "raw" else ("producer", [way])
    with server.connect() as listener:
        listener.execute("LISTEN dbtaskqueue")  # nobody to wake would make a NOTIFY cheaper than it is
        found = together([Worker(*python(module, *arguments), env=env) for _ in range(number)])
    if "tasks" not in found[0]:
        return {"ms added, p50": found[0]["added"], "ms without": found[0]["without"], "ms with": found[0]["with"]}
    return {"tasks/s": sum(one["tasks"] / (one["ended"] - one["began"]) for one in found)}


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    server.run(raw.CREATE)
    server.run(f"TRUNCATE {raw.TABLE}")
    quiet = {"BENCHMARK_TASKQUEUE": '{"NOTIFY": false}'}
    cases = [
        Case(RAW, lambda: produced(server, "raw")),
        Case(OURS, lambda: produced(server, "single")),
        Case(ORM, lambda: produced(server, "create")),
        Case(VIEW, lambda: produced(server, "view")),
        Case(QUIET, lambda: produced(server, "single", 8, quiet)),
        Case(LOUD, lambda: produced(server, "single", 8)),
    ]
    targets = [
        Target("2: enqueue ≥ 0.7 times a raw prepared INSERT", OURS, "tasks/s", 0.7, RAW),
        Target("2: ≤ 0.4 ms added to a view's transaction", VIEW, "ms added, p50", 0.4, most=True),
        Target("4: eight producers lose < 5 % to NOTIFY", LOUD, "tasks/s", 0.95, QUIET),
    ]
    return Scenario("enqueue", "Enqueue, one task in its own transaction", cases, targets)
