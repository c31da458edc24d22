"""Real pollers of queues with limits: never too many tasks at a time, and no waste of time."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import pytest

from django_dbtaskqueue import enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import QueueLimit, Task
from tests.poller.processes import let_others_start, polling
from tests.support import PATIENCE, until

pytestmark = [
    pytest.mark.django_db(databases=["default", "sqlite"], transaction=True),
    pytest.mark.usefixtures("taskqueue_registry"),
]
TASKS = 42


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest, settings: Any) -> str:
    common = {"database": request.param, "poll_interval": "1h", "idle_interval": "1h", "lease": "10h"}
    settings.DBTASKQUEUE = {
        "QUEUES": {
            "two": {**common, "max_running": 2},
            "pairs": {**common, "max_running_per_group": 2},
            "paced": {**common, "rate": "100/s", "burst": 5},
        }
    }
    return str(request.param)


class Watch:
    """Counts how many calls run at a time, by key. Each waits until as many run as may."""

    def __init__(self, may_run: int) -> None:
        self._all_run = defaultdict[str | None, threading.Barrier](lambda: threading.Barrier(may_run))
        self.most: dict[str | None, int] = {}
        self._running: dict[str | None, int] = {}
        self._lock = threading.Lock()

    def __call__(self, task: Lease) -> None:
        with self._lock:
            self._running[task.group] = now = self._running.get(task.group, 0) + 1
            self.most[task.group] = max(now, self.most.get(task.group, 0))
            all_run = self._all_run[task.group]
        all_run.wait(PATIENCE)
        let_others_start()
        with self._lock:
            self._running[task.group] -= 1


def run(name: str, alias: str, items: list[dict[str, Any]], *, may_run: int = 2, pollers: int = 1) -> Watch:
    """Run all. A poller that waited for its next poll in place of the end of a task would not be done."""
    watch, tasks = Watch(may_run), Task.objects.using(alias)
    processor(name)(watch)
    enqueue_many(name, items)
    with ExitStack() as stack:
        for _ in range(pollers):
            stack.enter_context(polling({name: 1}, threads=8))
        until(lambda: not tasks.exclude(status="COMPLETED").exists())
    return watch


@pytest.mark.parametrize("pollers", [1, 2])
def test_no_more_run_at_a_time_and_the_next_starts_soon(alias: str, pollers: int) -> None:
    watch = run("two", alias, [{"payload": number} for number in range(TASKS)], pollers=pollers)
    assert watch.most == {None: 2}


def test_no_more_of_a_key_run_at_a_time(alias: str) -> None:
    items = [{"group": f"g{number % 3}", "payload": number} for number in range(TASKS)]
    watch = run("pairs", alias, items)
    assert watch.most == {"g0": 2, "g1": 2, "g2": 2}


def test_a_smaller_number_counts_for_the_tasks_that_wait(alias: str, settings: Any) -> None:
    enqueue_many("pairs", [{"group": "g"}] * 2)  # both are ready
    settings.DBTASKQUEUE["QUEUES"]["pairs"]["max_running_per_group"] = 1
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE}
    watch = run("pairs", alias, [], may_run=1)
    assert watch.most == {"g": 1}


def test_what_waits_for_the_rate_does_not_wait_for_the_next_poll(alias: str) -> None:
    run("paced", alias, [{"payload": number} for number in range(TASKS)], may_run=1)
    assert QueueLimit.objects.using(alias).filter(pk="paced").exists()
