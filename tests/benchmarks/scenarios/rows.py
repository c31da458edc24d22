"""One task in each statement: what the constraints and indexes of the table cost PostgreSQL. No targets."""

from contextlib import nullcontext
from functools import partial

from tests.benchmarks.drains import TABLE, Around, empty
from tests.benchmarks.measure import Case, Reading, Scenario
from tests.benchmarks.scenarios.tuning import altered
from tests.benchmarks.server import Server

CHECKS = """
SELECT string_agg('DROP CONSTRAINT ' || conname, ', '),
    string_agg(format('ADD CONSTRAINT %%I %%s', conname, pg_get_constraintdef(oid)), ', ')
FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c'
"""
# Those that a task without a group, which does not fail, is never in.
INDEXES = """
SELECT string_agg(indexname, ', '), string_agg(indexdef, '; ')
FROM pg_indexes WHERE tablename = %s AND indexdef ~ ' WHERE ' AND indexname !~ '_(rdy|end)$'
"""


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
    cost = {"µs CPU enqueue": enqueued - begin, "µs CPU take and ack": ended - enqueued}
    return {name: seconds / tasks * 1e6 for name, seconds in cost.items()} | span.noise


def scenario(server: Server, size: float) -> Scenario:
    ((drop, add),), ((names, definitions),) = server.run(CHECKS, [TABLE]), server.run(INDEXES, [TABLE])
    table = f"ALTER TABLE {TABLE}"
    ways: dict[str, Around] = {
        "as it is": nullcontext,
        "without CHECK constraints": partial(altered, f"{table} {drop}", f"{table} {add}"),
        "without the indexes that a plain task is not in": partial(altered, f"DROP INDEX {names}", definitions),
    }
    cases = [Case(name, partial(one_by_one, server, int(5_000 * size), around)) for name, around in ways.items()]
    return Scenario("rows", "One task in each statement, CPU of PostgreSQL", cases)
