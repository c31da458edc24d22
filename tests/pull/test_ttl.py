"""Time to live: how long after it is due a task may be started. What moves the due time moves its end, too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_dbtaskqueue import Complete, Fail, Fixed, Reenqueue, processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.testing import drain
from tests.factories import age
from tests.pull.test_verbs import row, status, take

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
TTL = timedelta(minutes=10)
ROUNDED = timedelta(milliseconds=2)  # SQLite counts milliseconds


def ttl_left(task: Any) -> timedelta:
    """Return how long after it is due a waiting task may be started."""
    found = row(task)
    due = found.ready_time or found.next_process_time
    assert found.expire_time is not None
    return found.expire_time - due


def same(one: timedelta, other: timedelta) -> bool:
    return abs(one - other) <= ROUNDED


@pytest.mark.parametrize("outcome", [Reenqueue(HOUR), Fail("again", delay=HOUR)], ids=["reenqueue", "retry"])
@pytest.mark.parametrize("own", [False, True], ids=["returned", "settled"])
def test_a_task_put_off_beyond_its_old_end_still_starts(
    mail: QueueHandle, taskqueue_registry: None, outcome: Any, own: bool
) -> None:
    seen = []

    @processor("mail")
    def process(task: Any) -> Any:
        seen.append(task.total_attempt)
        if len(seen) > 1:
            return Complete()
        return task._settle(outcome) if own else outcome

    # Given a task whose first attempt puts it off for longer than its ttl
    task = mail.put(ttl=TTL)
    drain("mail")
    assert same(ttl_left(task), TTL)
    # When it is due, it is started
    age(HOUR)
    drain("mail")
    assert (seen, status(task)) == ([1, 2], "COMPLETED")


def test_a_release_with_a_delay_moves_it_and_a_release_in_place_does_not(mail: QueueHandle) -> None:
    task = mail.put(ttl=TTL)
    mail.release(take(mail), HOUR)
    assert same(ttl_left(task), TTL)
    age(HOUR + TTL / 2)
    mail.release(take(mail))  # the place is kept, and so is the time to live
    assert same(ttl_left(task), TTL)
    age(TTL)
    assert mail.take() is None
    assert status(task) == "POISON"


def test_a_task_without_a_time_to_live_gets_none(mail: QueueHandle) -> None:
    task = mail.put()
    mail.release(take(mail), HOUR)
    assert row(task).expire_time is None


def test_a_task_that_ran_longer_than_its_time_to_live_can_be_retried(
    mail: QueueHandle, configure: Callable[..., None]
) -> None:
    configure(retry=Fixed(HOUR, jitter=0), lease=DAY)
    task = mail.put(ttl=TTL)
    held = take(mail)
    age(HOUR)
    held.fail("late")
    assert same(ttl_left(task), TTL)


def test_a_member_of_a_group_keeps_what_was_left_when_it_became_the_head(mail: QueueHandle) -> None:
    head, task = mail.put(group="g"), mail.put(group="g", ttl=2 * DAY)
    age(DAY)
    mail.ack(take(mail))
    left = ttl_left(task)
    assert status(head) == "COMPLETED" and DAY / 2 < left <= DAY
    mail.release(take(mail), 5 * DAY)
    assert same(ttl_left(task), left)


def buried(mail: QueueHandle) -> Task:
    """A task that its holder buried."""
    task = mail.put(ttl=TTL)
    mail.bury(take(mail), "bad")
    return task


def buried_in_time(mail: QueueHandle) -> Task:
    """A task that was buried before it was taken."""
    task = mail.put(ttl=TTL)
    assert mail.bury(task.pk)
    return task


def expired(mail: QueueHandle) -> Task:
    """A task that was taken too late."""
    task = mail.put(ttl=TTL)
    age(HOUR)
    assert mail.take() is None
    return task


@pytest.mark.parametrize("made", [buried, buried_in_time, expired])
def test_a_buried_task_never_expires_and_a_kick_gives_its_whole_time_to_live(
    mail: QueueHandle, made: Callable[[QueueHandle], Task]
) -> None:
    task = made(mail)
    age(DAY)
    assert status(task) == "POISON"
    mail.kick(1)
    assert same(ttl_left(task), TTL)
    assert take(mail).id == task.pk


def test_verbs_of_operators_move_it_with_the_due_time(mail: QueueHandle) -> None:
    tasks = Task.objects.filter(queue="mail")
    # Given a task that failed long ago: reprocess
    task = mail.put(ttl=TTL)
    take(mail).fail("no", retry=False)
    age(DAY)
    tasks.reprocess()
    assert same(ttl_left(task), TTL)
    # And one that is taken: release_all
    age(TTL / 2)
    take(mail)
    age(TTL)
    tasks.release_all()
    assert same(ttl_left(task), TTL)
    # And one that waits: snooze, then run now
    for verb in (["snooze", "--for=1h"], ["run-now"]):
        call_command("taskqueue", *verb, f"--id={task.pk}", "--yes", stdout=StringIO())
        assert same(ttl_left(task), TTL)
