"""When wake-ups lead to a look into the table, also when somebody sends them without end: every role may NOTIFY."""

from __future__ import annotations

import pytest

from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import WOKEN_LOOK_SECONDS, QueueState
from tests.clock import SteppedClock

pytestmark = pytest.mark.django_db
FLOOD = 100


@pytest.fixture(autouse=True)
def _stopped(clock: SteppedClock) -> None:
    clock.stop()


def look(queue: QueueState, *, got: int = 0, woken: bool = True) -> float:
    """Look once, and be woken meanwhile and after it; return the seconds until the next look."""
    wakes = queue.wakes
    if woken:
        queue.wake()
    queue.fetched(got=got, asked=10, wakes=wakes, next_due=None)
    if woken:
        queue.wake()
    return queue.next_poll - clock.monotonic()


def test_wake_ups_in_vain_lead_to_one_look_in_five_milliseconds() -> None:
    queue = Poller({"work": 1}).queues["work"]
    assert look(queue) <= 0, "the first wake-ups lead to a look at once"
    assert [look(queue) for _ in range(FLOOD)][-1] == pytest.approx(WOKEN_LOOK_SECONDS)


def test_a_task_ends_the_pauses() -> None:
    queue = Poller({"work": 1}).queues["work"]
    for _ in range(FLOOD):
        look(queue)
    assert look(queue, got=1) <= 0


def test_looks_that_nobody_asked_for_are_no_flood() -> None:
    # Given a poller that looked in vain, once in a while
    queue = Poller({"work": 1}).queues["work"]
    for _ in range(FLOOD):
        look(queue, woken=False)
        queue.vain_look_at -= 1
    queue.wake()
    assert queue.next_poll <= clock.monotonic()
