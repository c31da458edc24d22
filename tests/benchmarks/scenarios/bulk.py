"""Many tasks in one transaction, from an iterator."""

from __future__ import annotations

from time import monotonic

from tests.benchmarks import raw
from tests.benchmarks.children import Worker, python, together
from tests.benchmarks.drains import empty
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import Server

COPY = "COPY raw_task (queue_name, reference_number, payload) FROM STDIN"
OURS, PLAIN = "ours, references, on_duplicate=ignore", "ours, without references"
LONG = "ours, 10 times as many"


def many(server: Server, way: str, tasks: int) -> Reading:
    """Return the rate and the memory of one ``enqueue_many``."""
    empty(server)
    found = together([Worker(*python("producer", way, str(tasks)))])[0]
    return {"tasks/s": found["tasks"] / (found["ended"] - found["began"]), "MiB at most": found["memory"]}


def raw_many(server: Server, tasks: int, way: str) -> Reading:
    """The same into the bare table, without a conflict clause."""
    server.run(f"TRUNCATE {raw.TABLE}")
    rows = [(f"r-{number}", f'{{"number": {number}}}') for number in range(tasks)]
    with server.connect(autocommit=False) as connection, connection.cursor() as cursor:
        began = monotonic()
        if way == "copy":
            with cursor.copy(COPY) as copy:
                for reference, payload in rows:
                    copy.write_row(("raw", reference, payload))
        else:
            cursor.executemany(raw.ENQUEUE, rows)
        connection.commit()
        return {"tasks/s": tasks / (monotonic() - began)}


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    server.run(raw.CREATE)
    tasks = int(50_000 * size)
    cases = [
        Case("raw COPY", lambda: raw_many(server, tasks, "copy")),
        Case("raw executemany", lambda: raw_many(server, tasks, "executemany")),
        Case(OURS, lambda: many(server, "many", tasks)),
        Case(PLAIN, lambda: many(server, "many-plain", tasks)),
        Case(LONG, lambda: many(server, "many", 10 * tasks)),
    ]
    targets = [
        Target("3: enqueue_many with references ≥ 100,000/s", OURS, "tasks/s", 100_000),
        Target("3: enqueue_many without references ≥ 120,000/s", PLAIN, "tasks/s", 120_000),
        Target("3: ten times as many in ≤ 1.5 times the memory", LONG, "MiB at most", 1.5, OURS, most=True),
    ]
    return Scenario("bulk", "enqueue_many", cases, targets)
