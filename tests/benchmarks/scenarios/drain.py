"""Drain of tasks that wait, by one and two processes, in every way to process them, beside loops without a library."""

from functools import partial

from tests.benchmarks.drains import Drain, raw_drain
from tests.benchmarks.measure import Case, Reading, Scenario, Target
from tests.benchmarks.server import Server

RAW, RAW_SHORT, RAW_2 = "simplest loop, 500", "simplest loop, 20,000 tasks", "simplest loop, 2 processes"
RAW_EACH, RAW_INSERT = "simplest loop, a commit per task, 4 threads", "the same with an INSERT"
OURS, SHORT, OURS_2 = "ours", "ours, 20,000 tasks", "ours, 2 processes"
ATOMIC, INSERT = "ours, atomic", "ours, atomic, an ORM INSERT"


def scenario(server: Server, size: float) -> Scenario:
    """From a size of 0.5 on, the numbers of tasks are those that the names say."""
    tasks, short, some, few = (int(number * min(1, 2 * size)) for number in (60_000, 20_000, 10_000, 4_000))
    raw = partial(raw_drain, server)

    def no_groups(server: Server) -> None:
        server.run("TRUNCATE auth_group CASCADE")

    def raw_insert() -> Reading:
        no_groups(server)
        return raw(few, way="insert")

    cases = [
        Case(RAW, lambda: raw(tasks)),
        Case(OURS, Drain(server, tasks)),
        Case("loop with our promises, 500", lambda: raw(tasks, "same")),
        Case("loop of one transaction a batch, which deletes, 500", lambda: raw(tasks, "bare")),
        Case(RAW_SHORT, lambda: raw(short)),
        Case(SHORT, Drain(server, short)),
        Case(RAW_2, lambda: raw(tasks, processes=2)),
        Case(OURS_2, Drain(server, tasks, processes=2)),
        Case("loop with our promises, 2 processes", lambda: raw(tasks, "same", processes=2)),
        Case("simplest loop, 100", lambda: raw(tasks, batch=100)),
        Case("simplest loop, 10", lambda: raw(some, batch=10)),
        Case("simplest loop, 1", lambda: raw(few, batch=1)),
        Case("ours, async", Drain(server, tasks, queues=["nothing-async"])),
        Case("ours, 20 µs processor", Drain(server, tasks, queues=["busy"])),
        Case("ours, atomic, batch=100", Drain(server, tasks, queues=["nothing-atomic-100"])),
        Case(RAW_EACH, lambda: raw(some, way="each")),
        Case(ATOMIC, Drain(server, some, queues=["nothing-atomic"])),
        Case(RAW_INSERT, raw_insert),
        Case(INSERT, Drain(server, few, queues=["insert"], prepare=no_groups)),
    ]
    rate = "tasks/s"
    targets = [
        Target("drain ≥ 1.4 times the simplest loop", OURS, rate, 1.4, RAW),
        Target("drain of 20,000 ≥ 1 times the simplest loop", SHORT, rate, 1, RAW_SHORT),
        Target("two processes ≥ 0.9 times the simplest loop with two", OURS_2, rate, 0.9, RAW_2),
        Target("two processes ≥ 1.3 times one", OURS_2, rate, 1.3, OURS),
        Target("worker ≤ 7 µs a task", OURS, "µs CPU worker", 7, most=True),
        Target("PostgreSQL ≤ 14 µs a task", OURS, "µs CPU PostgreSQL", 14, most=True),
        Target("full speed within 10 ms of the first task", SHORT, "ms lost at the start", 10, most=True),
        Target("atomic ≥ 0.8 times a commit per task", ATOMIC, rate, 0.8, RAW_EACH),
        Target("an ORM INSERT per task ≥ 0.7 times psycopg's", INSERT, rate, 0.7, RAW_INSERT),
    ]
    return Scenario("drain", "Drain", cases, targets)
