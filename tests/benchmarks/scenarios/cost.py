"""What a poller costs, idle and in statements per batch."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from tests.benchmarks.children import memory, tree_cpu
from tests.benchmarks.drains import TABLE, Drain, empty, running
from tests.benchmarks.measure import Reading, Scenario, Target
from tests.benchmarks.server import Server

TWO = "≤ 2 statements per batch (2.1, for some looks find nothing)"
IDLE, BATCHES = "idle", "under load"
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
