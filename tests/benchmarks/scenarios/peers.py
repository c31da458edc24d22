"""Others on the same server, beside ours and the simplest loop: enqueue one, enqueue many, drain, drain by two."""

import shutil
import subprocess
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.children import Worker, drained, python, together
from tests.benchmarks.drains import Drain, raw_drain
from tests.benchmarks.measure import NotRun, Reading, Scenario, Target
from tests.benchmarks.scenarios.enqueue import many, produced, raw_many
from tests.benchmarks.server import Server

NODE = {"graphile-worker": 60_000, "pg-boss": 50_000}  # peer -> tasks of a drain
PEERS = NODE | {"pgqueuer": 50_000, "procrastinate": 1_500, "django_tasks_db": 1_000, "django_q2": 1_000}
TASKS, BULK = 60_000, 50_000
OURS_SHARED, GRAPHILE, GRAPHILE_SHARED = "ours, 2 processes", "graphile-worker", "graphile-worker, 2 processes"


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


def shared(server: Server, name: str, tasks: int) -> Reading:
    command = installed(name)
    together(Worker(*command, "fill", str(tasks)))
    return drain(server, tasks, Worker(*command, "share"), Worker(*command, "share"))


def drain(server: Server, tasks: int, *workers: Worker) -> Reading:
    with server.span() as span:
        found = drained(*workers)
    if found["tasks"] < tasks:
        raise TimeoutError(f"they processed {found['tasks']} of {tasks} tasks")
    return {"drain/s": tasks / found["seconds"], "µs CPU worker": found["cpu"] / tasks * 1e6, **span.cost(tasks)}


def figures(drained: Reading) -> Reading:
    names = ("µs CPU worker", "µs CPU PostgreSQL", "ms/commit", "cores used by others")
    return {"drain/s": drained["tasks/s"], **{name: drained[name] for name in names}}


def both(server: Server, tasks: int, items: int, *, ours: bool) -> Reading:
    drained = Drain(server, tasks)() if ours else raw_drain(server, tasks)
    filled = many(server, "many", items) if ours else raw_many(server, items)
    single = produced(server, "single" if ours else "raw")
    return {"enqueue/s": single["tasks/s"], "enqueue many/s": filled["tasks/s"], **figures(drained)}


def peers(server: Server, size: float) -> Scenario:
    share = min(1, 2 * size)
    tasks, items = int(TASKS * share), int(BULK * share)
    counts = {name: int(number * share) for name, number in PEERS.items()}
    cases = {
        "simplest loop, 500": partial(both, server, tasks, items, ours=False),
        "ours": partial(both, server, tasks, items, ours=True),
        **{name: partial(peer, server, name, number) for name, number in counts.items()},
        OURS_SHARED: lambda: figures(Drain(server, tasks, processes=2)()),
        GRAPHILE_SHARED: partial(shared, server, GRAPHILE, counts[GRAPHILE]),
    }
    targets = [
        Target("one process ≥ 2 times graphile-worker batched", "ours", "drain/s", 2, GRAPHILE),
        Target("two processes ≥ 1.5 times two of it", OURS_SHARED, "drain/s", 1.5, GRAPHILE_SHARED),
    ]
    return Scenario("peers", "Beside others", cases, targets)
