"""Real pollers of queues with limits: never too many tasks at a time, and no waste of time."""

import threading
from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import Any

import pytest

from django_dbtaskqueue import enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Limit, Task
from tests.poller.processes import SELDOM, let_others_start, polling
from tests.support import PATIENCE, until

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
TASKS = 42


@pytest.fixture(autouse=True)
def _limits(alias: str, settings: Any, taskqueue_registry: None) -> None:
    """A poller that waited for its next poll in place of the end of a task would not be done."""
    own = {"two": {"max_running": 2}, "pairs": {"max_running_per_group": 2}, "paced": {"rate": "100/s", "burst": 5}}
    settings.DBTASKQUEUE = {"QUEUES": {name: {"database": alias, **SELDOM, **limits} for name, limits in own.items()}}


class Watch:
    """Counts how many calls run at a time, by key. Each waits until as many run as may."""

    def __init__(self, may_run: int) -> None:
        self._all_run = defaultdict[str | None, threading.Barrier](lambda: threading.Barrier(may_run))
        self.most: dict[str | None, int] = {}
        self._running: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def __call__(self, task: Lease) -> None:
        with self._lock:
            self._running[task.group] += 1
            self.most[task.group] = max(self._running[task.group], self.most.get(task.group, 0))
            all_run = self._all_run[task.group]
        all_run.wait(PATIENCE)
        let_others_start()
        with self._lock:
            self._running[task.group] -= 1


def most_of(name: str, alias: str, items: Any, *, may_run: int = 2, pollers: int = 1) -> dict[str | None, int]:
    """Run all tasks; return how many of each group ran at a time."""
    watch, tasks = Watch(may_run), Task.objects.using(alias)
    processor(name)(watch)
    enqueue_many(name, items)
    with ExitStack() as stack:
        for _ in range(pollers):
            stack.enter_context(polling({name: 1}, threads=8))
        until(lambda: not tasks.exclude(status="COMPLETED").exists())
    return watch.most


@pytest.mark.parametrize("pollers", [1, 2])
def test_no_more_run_at_a_time_and_the_next_starts_soon(alias: str, pollers: int) -> None:
    assert most_of("two", alias, [{}] * TASKS, pollers=pollers) == {None: 2}


def test_no_more_of_a_key_run_at_a_time(alias: str) -> None:
    items = [{"group": f"g{number % 3}"} for number in range(TASKS)]
    assert most_of("pairs", alias, items) == {"g0": 2, "g1": 2, "g2": 2}


def test_a_smaller_number_counts_for_the_tasks_that_wait(alias: str, settings: Any) -> None:
    enqueue_many("pairs", [{"group": "g"}] * 2)  # both are ready
    settings.DBTASKQUEUE["QUEUES"]["pairs"]["max_running_per_group"] = 1
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE}
    assert most_of("pairs", alias, [], may_run=1) == {"g": 1}


def test_what_waits_for_the_rate_does_not_wait_for_the_next_poll(alias: str) -> None:
    most_of("paced", alias, [{}] * TASKS, may_run=1)
    assert Limit.objects.using(alias).filter(queue="paced").exists()
