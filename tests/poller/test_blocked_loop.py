"""A coroutine that blocks the event loop: its poller takes no more for it, gives back the rest, and says so."""

import threading
from typing import Any

import pytest

from django_dbtaskqueue import enqueue_many, models, registry
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations.doctor import examine
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.patience import PATIENCE, until
from tests.poller.processes import completed, polling

TASKS = 6


def states() -> list[str]:
    return list(models.Poller.objects.values_list("state", flat=True))


@pytest.mark.parametrize("options", [{}, {"concurrency": 1}, {"batch": 2}], ids=["plain", "limited", "in batches"])
def test_it_takes_no_more_gives_back_what_has_not_begun_and_goes_on(
    process_database: ProcessDatabase,
    taskqueue_registry: None,
    clock: SteppedClock,
    caplog: pytest.LogCaptureFixture,
    settings: Any,
    options: dict[str, Any],
) -> None:
    settings.DBTASKQUEUE = {"HEARTBEAT": "1s"}
    began, go_on = threading.Event(), threading.Event()

    async def process(given: Lease | list[Lease]) -> None:
        began.set()
        go_on.wait(PATIENCE)  # it does not await, so nothing else runs

    registry.register("letters", process, **options)
    enqueue_many("letters", [{}] * TASKS)
    held, running = Task.objects.filter(status="PROCESSING"), options.get("batch", 1)
    with polling({"letters": 1}):
        began.wait(PATIENCE)
        until(lambda: clock.advance(1) or (held.count() == running and states() == ["BLOCKED"]))
        enqueue_many("letters", [{}])
        assert set(Task.objects.exclude(pk__in=held).values_list("attempt", flat=True)) == {0}
        [finding] = [one for one in examine("default") if one.id == "poller.blocked"]
        assert finding.queues == ("letters",)
        [blocked] = [one for one in caplog.records if "event loop" in one.message]
        assert f"Task {held.order_by('pk')[0].pk} of letters" in blocked.message and "go_on.wait" in blocked.message
        assert not Task.objects.filter(total_attempt__gt=1).exists(), "what was given back was taken again"
        go_on.set()
        until(lambda: completed() == TASKS + 1 and states() == ["RUNNING"])
