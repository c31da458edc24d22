"""What one can turn, and what it changes: a table for docs/howto/tune.md. No targets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tests.benchmarks.drains import TABLE, Drain
from tests.benchmarks.measure import Case, Scenario
from tests.benchmarks.server import Server

BATCHES, FILLFACTORS = (10, 50, 100, 1000), ("fillfactor=100", "fillfactor=85", "fillfactor=70")
OPTIONS = "SELECT array_to_string(reloptions, ', ') FROM pg_class WHERE oid = %s::regclass"
# Those that a drain can do without.
INDEXES = """
SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s AND indexname !~ '_(pkey|rdy|reference)$' ORDER BY 1
"""


@contextmanager
def altered(change: str, undo: str, server: Server) -> Iterator[None]:
    """Have another table for a while. It is empty when that begins, and when it ends."""
    server.run(change)
    try:
        yield
    finally:
        server.run(f"TRUNCATE {TABLE}; {undo}")


def churn(times: int, tasks: int, server: Server) -> None:
    """Put tasks through the table, which then holds as many dead rows."""
    for number in range(times):
        drain = Drain(server, tasks, first=tasks * (number + 1), settings={"DEFAULTS": {"keep": "delete"}})
        drain.fill()
        with drain.poller():
            drain.resume()


def scenario(server: Server, size: float) -> Scenario:
    plain, table = Drain(server, int(100_000 * size)), f"ALTER TABLE {TABLE}"
    options = server.run(OPTIONS, [TABLE])[0][0]

    def having(tasks: int = plain.tasks, **settings: Any) -> Drain:
        return replace(plain, tasks=tasks, settings={"DEFAULTS": settings})

    def after(change: str, undo: str) -> Drain:
        return replace(plain, around=partial(altered, change, undo))

    def stored(option: str) -> Drain:
        return after(f"{table} SET ({option})", f"{table} RESET ({option.partition('=')[0]}), SET ({options})")

    def more(column: str) -> Drain:
        return after(f"CREATE INDEX one_more ON {TABLE} ({column})", "DROP INDEX one_more")

    old = replace(stored("autovacuum_enabled=off"), prepare=partial(churn, 4, plain.tasks))
    cases = [
        Case("as it is", plain),
        *[Case(f"batch_size={number}", having(batch_size=number)) for number in BATCHES],
        Case('settle="each"', having(int(5_000 * size), settle="each")),
        Case('keep="history"', having(keep="history")),
        Case('keep="delete"', having(keep="delete")),
        *[Case(f"{number} processes", replace(plain, processes=number)) for number in (2, 4)],
        Case("1 thread", replace(plain, options=("--threads", "1"))),
        *[Case(name, stored(name)) for name in FILLFACTORS],
        Case("after four times as many, vacuumed", old),
        Case("after four times as many, never vacuumed", replace(old, vacuum=False)),
        *[Case(f"without {name}", after(f"DROP INDEX {name}", sql)) for name, sql in server.run(INDEXES, [TABLE])],
        *[Case(f"with an index on ({column})", more(column)) for column in ("status", "finish_time")],
        Case("without orjson", replace(plain, env={"BENCHMARK_WITHOUT_ORJSON": "1"})),
        Case("PREPARE: False", replace(plain, settings={"PREPARE": False})),
    ]
    return Scenario("tuning", "What one can turn", cases)
