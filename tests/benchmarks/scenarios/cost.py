"""What a poller costs, idle and in statements per batch; what a single task costs PostgreSQL."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from time import monotonic

from tests.benchmarks.children import memory, tree_cpu
from tests.benchmarks.drains import TABLE, Around, Drain, empty, running
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.scenarios.drain import altered
from tests.benchmarks.server import Server

TWO = "≤ 2 statements per batch (2.1, for some looks find nothing)"
IDLE, BATCHES = "idle", "under load"
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
STATEMENT = re.compile(r"(?:execute [^:]*|statement): (.*)")


@contextmanager
def logging(server: Server) -> Iterator[None]:
    server.run("ALTER DATABASE benchmarks SET log_statement = 'all'")
    try:
        yield
    finally:
        server.run("ALTER DATABASE benchmarks RESET log_statement")


def statements(server: Server, start: int) -> Counter[str]:
    """Return how often each statement was logged from a place on, but those that look for the end of a drain."""
    with server.log.open(errors="replace") as lines:
        lines.seek(start)
        found = (match[1] for line in lines if (match := STATEMENT.search(line)))
        return Counter(text[:60] for text in found if "generate_series" not in text)


def idle(server: Server, seconds: float) -> Reading:
    empty(server)
    with logging(server), running(1, "--queue", "nothing") as process:
        threading.Event().wait(3)  # its first looks come quicker
        start, cpu, began = server.log.stat().st_size, tree_cpu(process), monotonic()
        threading.Event().wait(seconds)
        seconds, cpu = monotonic() - began, tree_cpu(process) - cpu
        asked = statements(server, start).total()
        return {"% CPU": cpu / seconds * 100, "queries/s": asked / seconds, "MiB": memory(process.pid)}


def under_load(server: Server, tasks: int) -> Reading:
    """Count a drain's statements; see how its memory grows."""
    drain = Drain(server, tasks)
    empty(server)
    drain.fill()
    server.calm(TABLE)
    with logging(server), drain.poller() as process:
        before, start = memory(process.pid), server.log.stat().st_size
        drain.resume()
        most = memory(process.pid, "VmHWM")
    batches = server.run(f"SELECT count(DISTINCT start_time) FROM {TABLE}")[0][0]
    asked = statements(server, start)
    of_batches = sum(count for count in asked.values() if count > batches / 2)
    counts = {"statements/batch": of_batches / batches, "other statements": asked.total() - of_batches}
    return {**counts, "batches": batches, "MiB": before, "MiB at most": most}


def cost(server: Server, size: float) -> Scenario:
    cases = {IDLE: lambda: idle(server, 30 * max(size, 0.2)), BATCHES: lambda: under_load(server, int(100_000 * size))}
    targets = [
        Target(TWO, BATCHES, "statements/batch", 2.1, most=True),
        Target("idle poller ≤ 80 MiB", IDLE, "MiB", 80, most=True),
        Target("flat under load (at most a quarter more)", BATCHES, "MiB at most", 1.25, BATCHES, "MiB", most=True),
        Target("idle poller ≤ 0.5 % CPU", IDLE, "% CPU", 0.5, most=True),
        Target("idle poller ≤ 2 queries/s", IDLE, "queries/s", 2, most=True),
    ]
    return Scenario("cost", "What a poller costs", cases, targets)


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


def rows(server: Server, size: float) -> Scenario:
    """One task in each statement: what the constraints and indexes of the table cost. No targets."""
    ((drop, add),), ((names, definitions),) = server.run(CHECKS, [TABLE]), server.run(INDEXES, [TABLE])
    table = f"ALTER TABLE {TABLE}"
    ways: dict[str, Around] = {
        "as it is": nullcontext,
        "without CHECK constraints": partial(altered, f"{table} {drop}", f"{table} {add}"),
        "without the indexes that a plain task is not in": partial(altered, f"DROP INDEX {names}", definitions),
    }
    cases = {name: partial(one_by_one, server, int(5_000 * size), around) for name, around in ways.items()}
    return Scenario("rows", "One task in each statement, CPU of PostgreSQL", cases)
