"""Time to live: how long after it is due a task may be started. What moves the due time moves its end, too."""

from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from django_dbtaskqueue import Fail, Fixed, Reenqueue, processor
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull.handle import QueueHandle
from django_dbtaskqueue.testing import drain
from tests.factories import age
from tests.pull.conftest import DAY, HOUR, Configure, row, status, take, taken

TTL = timedelta(minutes=10)


def ttl_left(task: Any) -> timedelta:
    """Return how long after it is due a waiting task may be started, rounded as SQLite counts."""
    found = row(task)
    assert found.expire_time is not None
    left = found.expire_time - (found.ready_time or found.next_process_time)
    return timedelta(seconds=round(left.total_seconds(), 1))


@pytest.mark.parametrize("outcome", [Reenqueue(HOUR), Fail("again", delay=HOUR)], ids=["reenqueue", "retry"])
@pytest.mark.parametrize("own", [False, True], ids=["returned", "settled"])
def test_a_task_put_off_beyond_its_old_end_still_starts(
    mail: QueueHandle, taskqueue_registry: None, outcome: Any, own: bool
) -> None:
    @processor("mail")
    def process(task: Any) -> Any:
        if task.total_attempt == 2:
            return None
        return task._settle(outcome) if own else outcome

    task = mail.put(ttl=TTL)
    drain("mail")
    assert ttl_left(task) == TTL
    age(HOUR)
    drain("mail")
    assert (row(task).total_attempt, status(task)) == (2, "COMPLETED")


def test_a_release_with_a_delay_moves_it_and_a_release_in_place_does_not(mail: QueueHandle) -> None:
    task = taken(mail, ttl=TTL)
    mail.release(task, HOUR)
    assert ttl_left(task) == TTL
    age(HOUR + TTL / 2)
    mail.release(take(mail))  # the place is kept, and so is the time to live
    assert ttl_left(task) == TTL
    age(TTL)
    assert (mail.take(), status(task)) == (None, "POISON")
    # One that has none gets none
    mail.release(other := taken(mail), HOUR)
    assert row(other).expire_time is None


def test_a_task_that_ran_longer_than_its_time_to_live_can_be_retried(mail: QueueHandle, configure: Configure) -> None:
    configure(retry=Fixed(HOUR, jitter=0), lease=DAY)
    held = taken(mail, ttl=TTL)
    age(HOUR)
    held.fail("late")
    assert ttl_left(held) == TTL


def test_a_member_of_a_group_keeps_what_was_left_when_it_became_the_head(mail: QueueHandle) -> None:
    head, task = mail.put(group="g"), mail.put(group="g", ttl=2 * DAY)
    age(DAY)
    mail.ack(take(mail))
    left = ttl_left(task)
    assert status(head) == "COMPLETED" and DAY / 2 < left <= DAY
    mail.release(take(mail), 5 * DAY)
    assert ttl_left(task) == left


def buried(mail: QueueHandle, task: Task) -> None:
    mail.bury(take(mail), "bad")


def buried_before_it_was_taken(mail: QueueHandle, task: Task) -> None:
    assert mail.bury(task.pk)


def taken_too_late(mail: QueueHandle, task: Task) -> None:
    age(HOUR)
    assert mail.take() is None


@pytest.mark.parametrize("end", [buried, buried_before_it_was_taken, taken_too_late])
def test_a_buried_task_never_expires_and_a_kick_gives_its_whole_time_to_live(
    mail: QueueHandle, end: Callable[[QueueHandle, Task], None]
) -> None:
    task = mail.put(ttl=TTL)
    end(mail, task)
    age(DAY)
    assert status(task) == "POISON"
    mail.kick(1)
    assert ttl_left(task) == TTL
    assert take(mail).id == task.pk


def test_verbs_of_operators_move_it_with_the_due_time(mail: QueueHandle) -> None:
    task, tasks = taken(mail, ttl=TTL), Task.objects.filter(queue="mail")
    task.fail("no", retry=False)
    age(DAY)
    tasks.reprocess()
    assert ttl_left(task) == TTL
    age(TTL / 2)
    take(mail)
    age(TTL)
    tasks.release_all()
    assert ttl_left(task) == TTL
    for verb in (["snooze", "--for=1h"], ["run-now"]):
        call_command("taskqueue", *verb, f"--id={task.id}", "--yes", stdout=StringIO())
        assert ttl_left(task) == TTL
