"""Schedules in pollers: picked up in time, by one of many, and each tick exactly once while pollers are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_dbtaskqueue import periodic, processor, registry
from django_dbtaskqueue.models import Schedule, Task
from tests.conftest import ProcessDatabase
from tests.patience import slack
from tests.poller.processes import PollerProcess, polling, runtaskpoller
from tests.support import until

KILLS = int(os.environ.get("SCHEDULE_KILLS", "6"))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    saved = registry.snapshot()
    yield
    registry.restore(saved)


def secondly(**columns: Any) -> None:
    """Make a schedule that is due in each second from now on."""
    given = {"queue": "work", "cron": "* * * * * *", "missed": "all", "next_time": Now(), **columns}
    Schedule.objects.create(name="tick", **given)


def ticks_done() -> int:
    return Task.objects.filter(reference__startswith="tick@", status="COMPLETED").count()


def check_each_second_once() -> None:
    """Each second from the first to the last tick has one task; the first time of all was no whole second."""
    references = list(Task.objects.order_by("pk").values_list("reference", flat=True))
    found = [datetime.fromisoformat(str(one).partition("@")[2]) for one in references]
    seconds = (max(found) - min(found)) // timedelta(seconds=1)
    assert sorted(found) == [min(found) + timedelta(seconds=n) for n in range(seconds + 1)]


def test_a_poller_that_idles_wakes_for_the_tick(process_database: ProcessDatabase, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"work": {"idle_interval": timedelta(minutes=1)}}, "NOTIFY": False}
    with polling({"work": 1}):
        Schedule.objects.create(
            name="tick", queue="work", cron="0 0 1 1 *", next_time=Now() + timedelta(seconds=4), missed="skip"
        )
        until(ticks_done)
    task = Task.objects.get()
    due = Schedule.objects.get().last_time
    assert due is not None and task.start_time is not None
    assert due <= task.create_time <= task.start_time < due + timedelta(seconds=1 + slack(3))


def test_two_pollers_run_a_processor_each_second(process_database: ProcessDatabase, settings: Any) -> None:
    done: list[str] = []

    @periodic("* * * * * *", name="tick", missed="all")
    @processor("ticking")
    def tick(task: Any) -> None:
        done.append(task.reference)

    with polling({"ticking": 1}), polling({"ticking": 1}):
        until(lambda: len(done) >= 4)
    assert len(set(done)) == len(done)
    check_each_second_once()
    row = Schedule.objects.get()
    assert (row.source, row.queue, row.timezone, row.paused) == ("code", "ticking", "UTC", False)


def test_a_schedule_whose_code_is_gone_stops(process_database: ProcessDatabase, settings: Any) -> None:
    Schedule.objects.create(name="gone", queue="work", cron="* * * * * *", source="code", code={}, next_time=Now())
    secondly()
    with polling({"work": 1}):
        until(lambda: ticks_done() >= 2)
    assert not Task.objects.filter(reference__startswith="gone@").exists()


def test_a_poller_process_enqueues_and_runs_a_schedule(process_database: ProcessDatabase) -> None:
    secondly(payload={"do": "ok"})
    with runtaskpoller(process_database, "--queue", "work") as poller:
        until(lambda: ticks_done() >= 3)
        Schedule.objects.update(paused=True)
        poller.signal(signal.SIGTERM)
        poller.ended()
    check_each_second_once()


@pytest.mark.slow
def test_killed_pollers_leave_each_tick_with_exactly_one_task(postgres_process_database: ProcessDatabase) -> None:
    """SCHEDULE_KILLS says how many kills. A kill comes at any time of a second, also while a tick is enqueued."""
    secondly(payload={"do": "ok"})
    with ExitStack() as stack:
        pollers = [_start(stack, postgres_process_database) for _ in range(2)]
        for kill in range(KILLS):
            seen = Schedule.objects.get().last_time
            until(lambda seen=seen: Schedule.objects.get().last_time != seen)
            _wait_to(datetime.now(UTC) + timedelta(seconds=random.uniform(0.7, 1.1)))
            pollers[kill % 2].process.kill()
            pollers[kill % 2].ended(-signal.SIGKILL)
            pollers[kill % 2] = _start(stack, postgres_process_database)
        until(lambda: ticks_done() >= 3)
        Schedule.objects.update(paused=True)
    check_each_second_once()
    assert Task.objects.count() >= KILLS


def _start(stack: ExitStack, database: ProcessDatabase) -> PollerProcess:
    poller = stack.enter_context(runtaskpoller(database, "--queue", "work"))
    poller.until_logged("Queues: ")
    return poller


def _wait_to(moment: datetime) -> None:
    until(lambda: datetime.now(UTC) >= moment)
