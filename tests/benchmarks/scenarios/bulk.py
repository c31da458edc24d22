"""Many tasks in one transaction, from an iterator."""

from tests.benchmarks.children import Worker, python, together
from tests.benchmarks.drains import empty, raw_table
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.raw import SAME, SIMPLE
from tests.benchmarks.server import Server

RAW, RAW_REFERENCES = "COPY into the simplest table", "COPY of references into the table with our promises"
PLAIN, REFERENCES = "ours, without references", "ours, references"
IGNORE, LONG = "ours, references, on_duplicate=ignore", "ours, references, 10 times as many"


def many(server: Server, way: str, tasks: int) -> Reading:
    empty(server)
    worker = Worker(*python("producer", way, str(tasks)))
    with server.span() as span:
        (found,) = together(worker)
    rate = {"tasks/s": found["tasks"] / (found["ended"] - found["began"])}
    return rate | span.cost(tasks) | {"MiB at most": found["memory"]}


def raw_many(server: Server, tasks: int, *, references: bool = False) -> Reading:
    """The same by COPY."""
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


def scenario(server: Server, size: float) -> Scenario:
    tasks = int(50_000 * min(1, 2 * size))
    cases = [
        Case(RAW, lambda: raw_many(server, tasks)),
        Case(RAW_REFERENCES, lambda: raw_many(server, tasks, references=True)),
        Case(PLAIN, lambda: many(server, "many-plain", tasks)),
        Case(REFERENCES, lambda: many(server, "many", tasks)),
        Case(IGNORE, lambda: many(server, "many-ignore", tasks)),
        Case(LONG, lambda: many(server, "many", 10 * tasks)),
    ]
    targets = [
        Target("enqueue_many without references ≥ 200,000/s", PLAIN, "tasks/s", 200_000),
        Target("enqueue_many with references ≥ 120,000/s", REFERENCES, "tasks/s", 120_000),
        Target("ten times as many in ≤ 1.5 times the memory", LONG, "MiB at most", 1.5, REFERENCES, most=True),
    ]
    return Scenario("bulk", "enqueue_many", cases, targets)
