"""One task in each statement: what the constraints and indexes of the table cost PostgreSQL. No targets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

from tests.benchmarks.drains import TABLE, Around, empty
from tests.benchmarks.measure import Case, Reading, Scenario
from tests.benchmarks.scenarios.tuning import without
from tests.benchmarks.server import Server

CHECKS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c'
"""
# Those that a task without a group, which does not fail, is never in.
INDEXES = """
SELECT indexname FROM pg_indexes WHERE tablename = %s AND indexdef ~ ' WHERE ' AND indexname !~ '_(rdy|end)$'
"""


@contextmanager
def without_checks(server: Server) -> Iterator[None]:
    checks = server.run(CHECKS, [TABLE])
    server.run(f"ALTER TABLE {TABLE} {', '.join(f'DROP CONSTRAINT {name}' for name, _ in checks)}")
    try:
        yield
    finally:
        server.run(f"ALTER TABLE {TABLE} {', '.join(f'ADD CONSTRAINT {name} {text}' for name, text in checks)}")


@contextmanager
def without_indexes(server: Server) -> Iterator[None]:
    with ExitStack() as stack:
        for (name,) in server.run(INDEXES, [TABLE]):
            stack.enter_context(without(name, server))
        yield


def one_by_one(server: Server, tasks: int, around: Around) -> Reading:
    """Enqueue, take and acknowledge tasks, each in a transaction of its own; return what each costs the server."""
    from django_dbtaskqueue import enqueue, queue

    empty(server)
    with around(server), server.span() as span:
        nothing, begin = queue("nothing"), server.cpu()
        for number in range(tasks):
            enqueue("nothing", f"r-{number}", {"number": number})
        enqueued = server.cpu()
        while (task := nothing.take()) is not None:
            nothing.ack(task)
        ended = server.cpu()
        empty(server)
    cost = {"µs CPU enqueue": enqueued - begin, "µs CPU take and ack": ended - enqueued}
    return {name: seconds / tasks * 1e6 for name, seconds in cost.items()} | span.noise


def scenario(server: Server, size: float) -> Scenario:
    ways: dict[str, Around] = {
        "as it is": lambda _: nullcontext(),
        "without CHECK constraints": without_checks,
        "without the indexes that a plain task is not in": without_indexes,
    }
    cases = [Case(name, partial(one_by_one, server, int(5_000 * size), around)) for name, around in ways.items()]
    return Scenario("rows", "One task in each statement, CPU of PostgreSQL", cases)
