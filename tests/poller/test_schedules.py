"""Schedules in pollers: picked up in time, by one of many, and each tick exactly once."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models.functions import Now

from django_dbtaskqueue import periodic, processor
from django_dbtaskqueue.models import Schedule, Task
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import age
from tests.poller.processes import polling
from tests.support import until

pytestmark = pytest.mark.usefixtures("taskqueue_registry")


def ticks_done() -> int:
    return Task.objects.filter(reference__startswith="tick@", status="COMPLETED").count()


def test_an_idle_poller_wakes_for_a_tick(process_database: ProcessDatabase, settings: Any, clock: SteppedClock) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"work": {"idle_interval": "1h", "lease": "10h"}}, "NOTIFY": False}
    with polling({"work": 1}) as poller:
        until(lambda: poller.queues["work"].idle_pause)
        late = Now() - timedelta(seconds=1)
        Schedule.objects.create(name="tick", queue="work", cron="0 0 1 1 *", next_time=late, missed="skip")
        clock.advance(5)  # schedules are looked for each three seconds
        until(ticks_done)


@pytest.mark.parametrize("option", ["--once", "--drain"])
def test_a_run_that_ends_by_itself_takes_ticks_that_are_due(process_database: ProcessDatabase, option: str) -> None:
    Schedule.objects.create(name="tick", queue="work", cron="0 0 1 1 *", next_time=Now())
    call_command("runtaskpoller", option, "--queue=work")
    assert ticks_done() == 1


def test_two_pollers_run_a_processor_each_minute(process_database: ProcessDatabase, clock: SteppedClock) -> None:
    done: list[str] = []

    @periodic("* * * * *", name="tick", missed="all")
    @processor("ticking")
    def tick(task: Any) -> None:
        done.append(task.reference)

    with polling({"ticking": 1}), polling({"ticking": 1}):
        until(Schedule.objects.exists)
        age(timedelta(minutes=5), model=Schedule)
        clock.advance(5)
        until(lambda: len(done) >= 5)
    assert len(set(done)) == len(done)
    # Each time from the second to the last tick has one task; the first one of all was no whole minute
    references = Task.objects.values_list("reference", flat=True)
    _, *found = sorted(datetime.fromisoformat(str(one).partition("@")[2]) for one in references)
    assert found == [found[0] + number * timedelta(minutes=1) for number in range(len(found))]
    row = Schedule.objects.get()
    assert (row.source, row.queue, row.timezone, row.paused) == ("code", "ticking", "UTC", False)


def test_a_schedule_whose_code_is_gone_stops(process_database: ProcessDatabase) -> None:
    Schedule.objects.create(name="gone", queue="work", cron="* * * * * *", source="code", code={}, next_time=Now())
    late = Now() - timedelta(minutes=2)
    Schedule.objects.create(name="tick", queue="work", cron="* * * * *", missed="all", next_time=late)
    with polling({"work": 1}):
        until(lambda: ticks_done() >= 2)
    assert not Task.objects.filter(reference__startswith="gone@").exists()
