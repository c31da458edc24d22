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


@contextmanager
def stored(parameters: str, server: Server) -> Iterator[None]:
    """Have other storage parameters for a while. The table is empty when it begins."""
    before = server.run("SELECT array_to_string(reloptions, ', ') FROM pg_class WHERE relname = %s", [TABLE])[0][0]
    server.run(f"ALTER TABLE {TABLE} SET ({parameters})")
    try:
        yield
    finally:
        server.run(f"ALTER TABLE {TABLE} RESET ({parameters.partition('=')[0]})")
        server.run(f"ALTER TABLE {TABLE} SET ({before})")


@contextmanager
def without(index: str, server: Server) -> Iterator[None]:
    definition = server.run("SELECT indexdef FROM pg_indexes WHERE indexname = %s", [index])[0][0]
    server.run(f"DROP INDEX {index}")
    try:
        yield
    finally:
        server.run(f"TRUNCATE {TABLE}")
        server.run(definition)


@contextmanager
def more(definition: str, server: Server) -> Iterator[None]:
    server.run(f"CREATE INDEX one_more ON {TABLE} {definition}")
    try:
        yield
    finally:
        server.run("DROP INDEX one_more")


def churn(times: int, tasks: int, server: Server) -> None:
    """Put tasks through the table, which then holds as many dead rows."""
    for number in range(times):
        drain = Drain(server, tasks, first=tasks * (number + 1), settings={"DEFAULTS": {"keep": "delete"}})
        drain.fill()
        with drain.poller():
            drain.resume()


def scenario(server: Server, size: float) -> Scenario:
    plain = Drain(server, int(100_000 * size))
    few = replace(plain, tasks=int(5_000 * size))

    def having(**settings: Any) -> Drain:
        return replace(plain, settings={"DEFAULTS": settings})

    spare = [row[0] for row in server.run("SELECT indexname FROM pg_indexes WHERE tablename = %s", [TABLE])]
    spare = [name for name in sorted(spare) if not name.endswith(("_pkey", "_rdy", "_reference"))]
    old = replace(plain, around=partial(stored, "autovacuum_enabled=off"), prepare=partial(churn, 4, plain.tasks))
    cases = [
        Case("as it is", plain),
        *[Case(f"batch_size={number}", having(batch_size=number)) for number in BATCHES],
        Case('settle="each"', replace(few, settings={"DEFAULTS": {"settle": "each"}})),
        Case('keep="history"', having(keep="history")),
        Case('keep="delete"', having(keep="delete")),
        *[Case(f"{number} processes", replace(plain, processes=number)) for number in (2, 4)],
        Case("1 thread", replace(plain, options=("--threads", "1"))),
        *[Case(name, replace(plain, around=partial(stored, name))) for name in FILLFACTORS],
        Case("after four times as many, vacuumed", old),
        Case("after four times as many, never vacuumed", replace(old, vacuum=False)),
        *[Case(f"without {name}", replace(plain, around=partial(without, name))) for name in spare],
        Case("with an index on (status)", replace(plain, around=partial(more, "(status)"))),
        Case("with an index on (finish_time)", replace(plain, around=partial(more, "(finish_time)"))),
        Case("without orjson", replace(plain, env={"BENCHMARK_WITHOUT_ORJSON": "1"})),
        Case("PREPARE: False", replace(plain, settings={"PREPARE": False})),
    ]
    return Scenario("tuning", "What one can turn", cases)
