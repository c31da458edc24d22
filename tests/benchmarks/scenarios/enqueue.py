"""What it costs to enqueue: one task, and many."""

from collections.abc import Mapping

from tests.benchmarks.children import Worker, python, together
from tests.benchmarks.drains import empty, raw_table
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.raw import SAME, SIMPLE
from tests.benchmarks.server import Server

RAW, SAME_TABLE = "prepared INSERT into the simplest table", "prepared INSERT into the same table"
OURS, VIEW, QUIET, LOUD = "ours", "ours, in a view's transaction", "ours, 8 producers, NOTIFY off", "ours, 8 producers"
COPY, COPY_REFERENCES = "COPY into the simplest table", "COPY of references into the table with our promises"
PLAIN, REFERENCES = "ours, without references", "ours, references"
IGNORE, LONG = "ours, references, on_duplicate=ignore", "ours, references, 10 times as many"


def produced(server: Server, way: str, number: int = 1, env: Mapping[str, str] | None = None) -> Reading:
    """Let producers run on empty tables; return their figures, of several the rate of all."""
    empty(server)
    raw_table(server, SIMPLE)
    with server.connect() as listener:
        listener.execute("LISTEN dbtaskqueue")  # nobody to wake would make a NOTIFY cheaper than it is
        command = python("raw" if way.startswith("enqueue") else "producer", way)
        workers = [Worker(*command, env=env) for _ in range(number)]
        with server.span() as span:
            found = together(*workers)
    if "tasks" not in found[0]:
        return found[0] | span.noise
    tasks = sum(one["tasks"] for one in found)
    rate = sum(one["tasks"] / (one["ended"] - one["began"]) for one in found)
    return {"tasks/s": rate, "µs CPU worker": sum(one["cpu"] for one in found) / tasks * 1e6, **span.cost(tasks)}


def enqueue(server: Server, size: float) -> Scenario:
    """One task in a transaction of its own, and what an enqueue adds to a view's transaction."""
    cases = {
        RAW: lambda: produced(server, "enqueue"),
        SAME_TABLE: lambda: produced(server, "enqueue-task"),
        OURS: lambda: produced(server, "single"),
        "ORM create()": lambda: produced(server, "create"),
        VIEW: lambda: produced(server, "view"),
        QUIET: lambda: produced(server, "single", 8, {"BENCHMARK_TASKQUEUE": '{"NOTIFY": false}'}),
        LOUD: lambda: produced(server, "single", 8),
    }
    targets = [
        Target("enqueue ≥ 0.8 times a prepared INSERT", OURS, "tasks/s", 0.8, RAW),
        Target("enqueue ≥ 0.75 times one into the same table", OURS, "tasks/s", 0.75, SAME_TABLE),
        Target("≤ 0.4 ms added to a view's transaction", VIEW, "ms added, p50", 0.4, most=True),
        Target("eight producers lose < 5 % to NOTIFY", LOUD, "tasks/s", 0.95, QUIET),
    ]
    return Scenario("enqueue", "Enqueue, one task in its own transaction", cases, targets)


def many(server: Server, way: str, tasks: int) -> Reading:
    empty(server)
    worker = Worker(*python("producer", way, str(tasks)))
    with server.span() as span:
        (found,) = together(worker)
    rate = {"tasks/s": found["tasks"] / (found["ended"] - found["began"])}
    return rate | span.cost(tasks) | {"MiB at most": found["memory"]}


def raw_many(server: Server, tasks: int, *, references: bool = False) -> Reading:
    loop = SAME if references else SIMPLE
    raw_table(server, loop)
    rows = [("raw", f"r-{number}", f'{{"number": {number}}}')[0 if references else 2 :] for number in range(tasks)]
    columns = "queue_name, reference_number, payload" if references else "payload"
    with server.connect(autocommit=False) as connection, connection.cursor() as cursor, server.span() as span:
        with cursor.copy(f"COPY {loop.table} ({columns}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        connection.commit()
    return {"tasks/s": tasks / span.seconds, **span.cost(tasks)}


def bulk(server: Server, size: float) -> Scenario:
    """Many tasks in one transaction, from an iterator."""
    tasks = int(50_000 * min(1, 2 * size))
    cases = {
        COPY: lambda: raw_many(server, tasks),
        COPY_REFERENCES: lambda: raw_many(server, tasks, references=True),
        PLAIN: lambda: many(server, "many-plain", tasks),
        REFERENCES: lambda: many(server, "many", tasks),
        IGNORE: lambda: many(server, "many-ignore", tasks),
        LONG: lambda: many(server, "many", 10 * tasks),
    }
    targets = [
        Target("enqueue_many without references ≥ 200,000/s", PLAIN, "tasks/s", 200_000),
        Target("enqueue_many with references ≥ 120,000/s", REFERENCES, "tasks/s", 120_000),
        Target("ten times as many in ≤ 1.5 times the memory", LONG, "MiB at most", 1.5, REFERENCES, most=True),
    ]
    return Scenario("bulk", "enqueue_many", cases, targets)
