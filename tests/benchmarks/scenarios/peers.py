"""Others on the same server, beside ours and the simplest loop: enqueue one, enqueue many, drain, drain by two."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.children import Worker, python, together
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
OURS_SHARED, GRAPHILE_SHARED = "ours, 2 processes", "graphile-worker, 2 processes"
NOISE = ("ms/commit", "cores used by others")
installed: set[tuple[str, ...]] = set()


def peer(server: Server, command: Sequence[str], missing: Callable[[], str], size: float, tasks: int) -> Reading:
    """Let a peer do everything once."""
    if reason := missing():
        raise NotRun(reason)

    def act(way: str, *arguments: int) -> dict[str, float]:
        return together([Worker(*command, way, *map(str, arguments))])[0]

    if tuple(command) not in installed:
        act("install")
        installed.add(tuple(command))
    single = act("single")
    count = int(tasks * min(1, 2 * size))
    filled = act("fill", count)
    return {
        "enqueue/s": single["tasks"] / (single["ended"] - single["began"]),
        "enqueue many/s": count / (filled["ended"] - filled["began"]),
        **_drained(server, [Worker(*command, "drain", str(count))], count),
    }


def shared(server: Server, command: Sequence[str], missing: Callable[[], str], size: float, tasks: int) -> Reading:
    """Let two processes of a peer drain together."""
    if reason := missing():
        raise NotRun(reason)
    count = int(tasks * min(1, 2 * size))
    together([Worker(*command, "fill", str(count))])
    return _drained(server, [Worker(*command, "share"), Worker(*command, "share")], count)


def _drained(server: Server, workers: list[Worker], count: int) -> Reading:
    with server.span() as span:
        found = together(workers)
    if sum(one["tasks"] for one in found) < count:
        raise TimeoutError(f"they processed {[one['tasks'] for one in found]} of {count} tasks")
    return {
        "drain/s": count / (max(one["ended"] for one in found) - min(one["began"] for one in found)),
        "µs CPU worker": sum(one["cpu"] for one in found) / count * 1e6,
        "µs CPU PostgreSQL": span.cpu / count * 1e6,
        **span.noise,
    }


def ours_shared(server: Server, size: float) -> Reading:
    """The same with ours."""
    drained = Drain(server, int(TASKS * min(1, 2 * size)), processes=2)()
    found = {name: drained[name] for name in drained if "CPU" in name or name in NOISE}
    return {"drain/s": drained["tasks/s"], **found}


def without(package: str) -> str:
    """Return why a Python peer is not run, if so."""
    return "" if find_spec(package) else f"{package} is not installed"


def without_node(package: str) -> str:
    """Return why a peer on Node is not run, if so."""
    if shutil.which("node") is None:
        return "Node is not installed"
    found = subprocess.run(["node", "-e", f"require({package!r})"], capture_output=True, check=False)
    return "" if found.returncode == 0 else f"{package} is not installed where NODE_PATH points"


def both(server: Server, size: float, *, ours: bool) -> Reading:
    """Return the same figures of ours, or of the simplest loop."""
    tasks, items = int(TASKS * min(1, 2 * size)), int(BULK * min(1, 2 * size))
    drained = Drain(server, tasks)() if ours else raw_drain(server, tasks)
    filled = many(server, "many", items) if ours else raw_many(server, items)
    return {
        "enqueue/s": produced(server, "single" if ours else "raw")["tasks/s"],
        "enqueue many/s": filled["tasks/s"],
        "drain/s": drained["tasks/s"],
        **{name: drained[name] for name in drained if "CPU" in name or name in NOISE},
    }


def scenario(server: Server, size: float) -> Scenario:
    """Return it."""
    cases = [
        Case("simplest loop, 500", partial(both, server, size, ours=False)),
        Case("ours", partial(both, server, size, ours=True)),
    ]
    for name, tasks in NODE.items():
        command = ["node", str(SCRIPT), name]
        cases.append(Case(name, partial(peer, server, command, partial(without_node, name), size, tasks)))
    for name, (package, tasks) in PYTHON.items():
        command = python("peers", name)
        cases.append(Case(name, partial(peer, server, command, partial(without, package), size, tasks)))
    graphile, command = "graphile-worker", ["node", str(SCRIPT), "graphile-worker"]
    missing = partial(without_node, graphile)
    cases += [
        Case(OURS_SHARED, partial(ours_shared, server, size)),
        Case(GRAPHILE_SHARED, partial(shared, server, command, missing, size, NODE[graphile])),
    ]
    targets = [
        Target("one process ≥ 2 times graphile-worker batched", "ours", "drain/s", 2, graphile),
        Target("two processes ≥ 1.5 times two of it", OURS_SHARED, "drain/s", 1.5, GRAPHILE_SHARED),
    ]
    return Scenario("peers", "Beside others", cases, targets)
