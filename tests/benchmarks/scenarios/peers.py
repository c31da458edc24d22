"""Others on the same server, beside ours and the simplest loop: enqueue one, enqueue many, drain, drain by two."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.children import Worker, drained, python, together
from tests.benchmarks.drains import Drain, raw_drain
from tests.benchmarks.measure import Case, NotRun, Reading, Scenario, Target
from tests.benchmarks.scenarios.bulk import many, raw_many
from tests.benchmarks.scenarios.enqueue import produced
from tests.benchmarks.server import Server

PYTHON = {  # peer -> (package that has to be there, tasks of a drain)
    "pgqueuer": ("pgqueuer", 50_000),
    "procrastinate": ("procrastinate", 1_500),
    "django_tasks_db": ("django_tasks_db", 1_000),
    "django_q2": ("django_q", 1_000),
}
NODE = {"graphile-worker": 60_000, "pg-boss": 50_000}
SCRIPT = Path(__file__).parent.parent / "peers" / "node.cjs"
TASKS, BULK = 60_000, 50_000
OURS_SHARED, GRAPHILE, GRAPHILE_SHARED = "ours, 2 processes", "graphile-worker", "graphile-worker, 2 processes"
installed: set[tuple[str, ...]] = set()


def without(package: str) -> str:
    """Return why a Python peer is not run, if so."""
    return "" if find_spec(package) else f"{package} is not installed"


def without_node(package: str) -> str:
    """Return why a peer on Node is not run, if so."""
    if shutil.which("node") is None:
        return "Node is not installed"
    found = subprocess.run(["node", "-e", f"require({package!r})"], capture_output=True, check=False)
    return "" if found.returncode == 0 else f"{package} is not installed where NODE_PATH points"


def peer(server: Server, command: Sequence[str], missing: Callable[[], str], tasks: int) -> Reading:
    if reason := missing():
        raise NotRun(reason)
    if tuple(command) not in installed:
        together(Worker(*command, "install"))
        installed.add(tuple(command))
    (single,), (filled,) = together(Worker(*command, "single")), together(Worker(*command, "fill", str(tasks)))
    return {
        "enqueue/s": single["tasks"] / (single["ended"] - single["began"]),
        "enqueue many/s": tasks / (filled["ended"] - filled["began"]),
        **drain(server, tasks, Worker(*command, "drain", str(tasks))),
    }


def shared(server: Server, command: Sequence[str], missing: Callable[[], str], tasks: int) -> Reading:
    if reason := missing():
        raise NotRun(reason)
    together(Worker(*command, "fill", str(tasks)))
    return drain(server, tasks, Worker(*command, "share"), Worker(*command, "share"))


def drain(server: Server, tasks: int, *workers: Worker) -> Reading:
    with server.span() as span:
        found = drained(*workers)
    if found["tasks"] < tasks:
        raise TimeoutError(f"they processed {found['tasks']} of {tasks} tasks")
    rate = {"drain/s": tasks / found["seconds"], "µs CPU worker": found["cpu"] / tasks * 1e6}
    return rate | span.cost(tasks)


def figures(drained: Reading) -> Reading:
    names = ("µs CPU worker", "µs CPU PostgreSQL", "ms/commit", "cores used by others")
    return {"drain/s": drained["tasks/s"], **{name: drained[name] for name in names}}


def both(server: Server, tasks: int, items: int, *, ours: bool) -> Reading:
    drained = Drain(server, tasks)() if ours else raw_drain(server, tasks)
    filled = many(server, "many", items) if ours else raw_many(server, items)
    single = produced(server, "single" if ours else "raw")
    return {"enqueue/s": single["tasks/s"], "enqueue many/s": filled["tasks/s"], **figures(drained)}


def scenario(server: Server, size: float) -> Scenario:
    def count(tasks: int) -> int:
        return int(tasks * min(1, 2 * size))

    def node(name: str) -> tuple[list[str], Callable[[], str], int]:
        return ["node", str(SCRIPT), name], partial(without_node, name), count(NODE[name])

    cases = [
        Case("simplest loop, 500", partial(both, server, count(TASKS), count(BULK), ours=False)),
        Case("ours", partial(both, server, count(TASKS), count(BULK), ours=True)),
        *[Case(name, partial(peer, server, *node(name))) for name in NODE],
    ]
    for name, (package, tasks) in PYTHON.items():
        cases.append(Case(name, partial(peer, server, python("peers", name), partial(without, package), count(tasks))))
    cases += [
        Case(OURS_SHARED, lambda: figures(Drain(server, count(TASKS), processes=2)())),
        Case(GRAPHILE_SHARED, partial(shared, server, *node(GRAPHILE))),
    ]
    targets = [
        Target("one process ≥ 2 times graphile-worker batched", "ours", "drain/s", 2, GRAPHILE),
        Target("two processes ≥ 1.5 times two of it", OURS_SHARED, "drain/s", 1.5, GRAPHILE_SHARED),
    ]
    return Scenario("peers", "Beside others", cases, targets)
