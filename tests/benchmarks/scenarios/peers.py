"""Others on the same server, beside ours and the simplest loop: enqueue one, enqueue many, drain, drain by many."""

import shutil
import subprocess
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.children import Worker, drained, python, together
from tests.benchmarks.drains import Drain, raw_drain
from tests.benchmarks.measure import Case, NotRun, Reading, Scenario, Target
from tests.benchmarks.scenarios.enqueue import many, produced, raw_many
from tests.benchmarks.server import Server

NODE = {"graphile-worker": 60_000, "pg-boss": 50_000}  # peer -> tasks of a drain
PEERS = NODE | {"pgqueuer": 50_000, "procrastinate": 1_500, "django_tasks_db": 1_000, "django_q2": 1_000}
TASKS, BULK = 60_000, 50_000
GRAPHILE, PROMISES, STORED = "graphile-worker", "loop with our promises, 500", "ours, results that are stored"


@cache
def installed(name: str) -> list[str]:
    """Let a peer make its tables, once; return its command."""
    if name not in NODE:
        command, package = python("peers", name), {"django_q2": "django_q"}.get(name, name)
        if find_spec(package) is None:
            raise NotRun(f"{package} is not installed")
    else:
        command = ["node", str(Path(__file__).parent.parent / "node.cjs"), name]
        if shutil.which("node") is None:
            raise NotRun("Node is not installed")
        if subprocess.run(["node", "-e", f"require({name!r})"], capture_output=True, check=False).returncode:
            raise NotRun(f"{name} is not installed where NODE_PATH points")
    together(Worker(*command, "install"))
    return command


def peer(server: Server, name: str, tasks: int) -> Reading:
    command = installed(name)
    (single,), (filled,) = together(Worker(*command, "single")), together(Worker(*command, "fill", str(tasks)))
    return {
        "enqueue/s": single["tasks"] / (single["ended"] - single["began"]),
        "enqueue many/s": tasks / (filled["ended"] - filled["began"]),
        **drain(server, tasks, Worker(*command, "drain", str(tasks))),
    }


def shared(server: Server, name: str, tasks: int, processes: int) -> Reading:
    command = installed(name)
    together(Worker(*command, "fill", str(tasks)))
    return drain(server, tasks, *(Worker(*command, "share") for _ in range(processes)))


def drain(server: Server, tasks: int, *workers: Worker) -> Reading:
    with server.span() as span:
        found = drained(*workers)
    if found["tasks"] < tasks:
        raise TimeoutError(f"they processed {found['tasks']} of {tasks} tasks")
    return {"drain/s": tasks / found["seconds"], "µs CPU worker": found["cpu"] / tasks * 1e6, **span.cost(tasks)}


def figures(drain: Case) -> Reading:
    names = ("µs CPU worker", "µs CPU PostgreSQL", "rows walked/task", "ms/commit", "cores used by others")
    return {"drain/s": (drained := drain())["tasks/s"], **{name: drained[name] for name in names if name in drained}}


def both(server: Server, tasks: int, items: int, *, ours: bool) -> Reading:
    drained = figures(Drain(server, tasks) if ours else partial(raw_drain, server, tasks))
    filled = many(server, "many", items) if ours else raw_many(server, items)
    single = produced(server, "single" if ours else "enqueue")
    return {"enqueue/s": single["tasks/s"], "enqueue many/s": filled["tasks/s"], **drained}


def peers(server: Server, size: float) -> Scenario:
    share = min(1, 2 * size)
    tasks, items = int(TASKS * share), int(BULK * share)
    counts = {name: int(number * share) for name, number in PEERS.items()}
    cases = {
        "simplest loop, 500": partial(both, server, tasks, items, ours=False),
        "ours": partial(both, server, tasks, items, ours=True),
        **{name: partial(peer, server, name, number) for name, number in counts.items()},
    }
    targets = [Target("one process ≥ 2 times graphile-worker batched", "ours", "drain/s", 2, GRAPHILE)]
    return Scenario("peers", "Beside others", cases, targets)


def many_peers(server: Server, size: float) -> Scenario:
    """As many processes as users have, beside as many of the fastest other queue, and what a stored result costs."""
    tasks, rate = int(TASKS * (size if size > 1 else min(1, 2 * size))), "drain/s"
    ours, other = ({n: f"{name}, processes: {n}" for n in (1, 2, 4, 12)} for name in ("ours", GRAPHILE))
    cases = {
        PROMISES: partial(figures, partial(raw_drain, server, tasks, "same")),
        STORED: partial(figures, Drain(server, tasks, queues=["pick-up"])),
        **{name: partial(shared, server, GRAPHILE, tasks, number) for number, name in other.items()},
        **{name: partial(figures, Drain(server, tasks, processes=number)) for number, name in ours.items()},
    }
    targets = [
        Target("twelve processes ≥ 0.9 times one", ours[12], rate, 0.9, ours[1]),
        Target("twelve ≥ 1.4 times twelve of graphile-worker batched", ours[12], rate, 1.4, other[12]),
        Target("two ≥ 1.5 times two of it", ours[2], rate, 1.5, other[2]),
        Target("PostgreSQL ≤ 30 µs a task at twelve", ours[12], "µs CPU PostgreSQL", 30, most=True),
        Target("four ≥ 1.15 times one", ours[4], rate, 1.15, ours[1]),
        Target("one ≥ 1.2 times the loop with our promises", ours[1], rate, 1.2, PROMISES),
        Target("stored results ≥ 0.9 times none", STORED, rate, 0.9, ours[1]),
    ]
    return Scenario("many_peers", "Many pollers", cases, targets)
