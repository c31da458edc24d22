"""What the end of a parent costs that one child waits for, with few parents and with many."""

from __future__ import annotations

from tests.benchmarks.drains import TABLE, empty
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import Server

FEW, MANY = "1,000 parents", "100,000 parents"
END = f"""
UPDATE {TABLE} SET status = 'COMPLETED', final_status = 'COMPLETED', ready_time = NULL, finish_time = now()
WHERE parked_by IS NULL
"""


def told(server: Server, parents: int) -> Reading:
    """Return the time from the end of all parents until the child is free, for each parent."""
    from django_dbtaskqueue import batch, enqueue_many
    from django_dbtaskqueue.db.session import Session
    from django_dbtaskqueue.flow import dependencies
    from django_dbtaskqueue.models import Task

    empty(server)
    server.run("TRUNCATE dbtaskqueue_dependency, dbtaskqueue_hold, dbtaskqueue_batch")
    with batch("fan-in", on_complete="nothing"):
        enqueue_many("nothing", ({} for _ in range(parents)))
    server.run(END)
    server.calm(TABLE, "dbtaskqueue_dependency")
    with server.span() as span:
        dependencies.sweep(Session.on("default"))
    if Task.objects.filter(parked_by__isnull=False).exists():
        raise RuntimeError("the child still waits")
    return {"µs per parent": 1e6 * span.seconds / parents, **span.noise}


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    few, many = int(1_000 * size), int(100_000 * size)
    cases = [Case(FEW, lambda: told(server, few)), Case(MANY, lambda: told(server, many))]
    targets = [Target("14: a fan-in of 100,000 costs no more per parent", MANY, "µs per parent", 1.3, FEW, most=True)]
    return Scenario("fan_in", "Fan-in: telling the end of a parent", cases, targets)
