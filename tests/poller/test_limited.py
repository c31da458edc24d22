"""Real pollers of queues with limits: never too many tasks at a time, and no waste of time."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from django_dbtaskqueue import enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.testing import TaskQueueKit

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)
TASKS, RUN_SECONDS = 40, 0.02


@pytest.fixture(params=["default", "sqlite"], ids=["postgresql", "sqlite"])
def alias(request: pytest.FixtureRequest, settings: Any) -> str:
    common = {"database": request.param, "poll_interval": "1s", "idle_interval": "1s"}
    settings.DBTASKQUEUE = {
        "QUEUES": {
            "two": {**common, "max_running": 2},
            "pairs": {**common, "max_running_per_group": 2},
            "paced": {**common, "rate": "100/s", "burst": 5},
        }
    }
    return str(request.param)


class Watch:
    """Counts how many calls run at a time, by key."""

    def __init__(self) -> None:
        self.most: dict[str | None, int] = {}
        self._running: dict[str | None, int] = {}
        self._lock = threading.Lock()

    def __call__(self, task: Lease) -> None:
        with self._lock:
            self._running[task.group] = now = self._running.get(task.group, 0) + 1
            self.most[task.group] = max(now, self.most.get(task.group, 0))
        threading.Event().wait(RUN_SECONDS)
        with self._lock:
            self._running[task.group] -= 1


def run(name: str, taskqueue: TaskQueueKit, items: list[dict[str, Any]], pollers: int) -> tuple[Watch, float]:
    watch = Watch()
    processor(name)(watch)
    enqueue_many(name, items)
    began = monotonic()
    with ExitStack() as stack:
        for _ in range(pollers):
            stack.enter_context(taskqueue.run_poller(name, threads=8, timeout=timedelta(seconds=30)))
    return watch, monotonic() - began


@pytest.mark.parametrize("pollers", [1, 2])
def test_no_more_run_at_a_time_and_the_next_starts_soon(alias: str, taskqueue: TaskQueueKit, pollers: int) -> None:
    watch, took = run("two", taskqueue, [{"payload": number} for number in range(TASKS)], pollers)
    assert watch.most == {None: 2}
    assert took < 10, "a poller waited for poll_interval instead of for the end of a task"


def test_no_more_of_a_key_run_at_a_time(alias: str, taskqueue: TaskQueueKit) -> None:
    items = [{"group": f"g{number % 3}", "payload": number} for number in range(TASKS)]
    watch, took = run("pairs", taskqueue, items, pollers=1)
    assert watch.most == {"g0": 2, "g1": 2, "g2": 2}
    assert took < 10


def test_a_smaller_number_counts_for_the_tasks_that_wait(alias: str, taskqueue: TaskQueueKit, settings: Any) -> None:
    enqueue_many("pairs", [{"group": "g"}] * 2)  # both are ready
    settings.DBTASKQUEUE["QUEUES"]["pairs"]["max_running_per_group"] = 1
    settings.DBTASKQUEUE = {**settings.DBTASKQUEUE}
    watch, _ = run("pairs", taskqueue, [], pollers=1)
    assert watch.most == {"g": 1}


def test_tasks_start_at_the_rate(alias: str, taskqueue: TaskQueueKit) -> None:
    watch, took = run("paced", taskqueue, [{"payload": number} for number in range(TASKS)], pollers=1)
    assert watch.most[None] >= 1
    assert took >= (TASKS - 5) / 100, "no more than the burst and the rate"
    assert took < 10
