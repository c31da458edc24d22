"""Put, take and what becomes of a task: each verb of the pull API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction

from django_dbtaskqueue import (
    DuplicateTask,
    LeaseLost,
    QueueFull,
    TaskQueueError,
    UnknownQueue,
    enqueue_many,
    processor,
    queue,
)
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Attempt, DeletedTasks, Task
from django_dbtaskqueue.operations.queue_control import pause, resume
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.factories import age, make_task
from tests.pull.conftest import Told

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


def take(handle: QueueHandle) -> Lease:
    """Take a task that must be there."""
    task = handle.take()
    assert task is not None
    return task


def row(task: Any) -> Task:
    return Task.objects.get(pk=task.id)


def status(task: Any) -> str:
    return str(row(task).status)


# -- put and take ----------------------------------------------------------------------------------------------------


def test_tasks_are_taken_in_the_order_they_were_put(mail: QueueHandle) -> None:
    ids = [mail.put({"n": n}).pk for n in range(3)]
    taken = [take(mail) for _ in ids]
    assert [(task.id, task.payload) for task in taken] == [(pk, {"n": n}) for n, pk in enumerate(ids)]
    assert taken[0].attempt == 1 and status(taken[0]) == "PROCESSING"
    assert mail.take() is None


def test_put_has_the_options_and_errors_of_enqueue(mail: QueueHandle, configure: Callable[..., None]) -> None:
    configure(capacity=3)
    mail.put(1, "r", priority=5)
    mail.put(2, "s", priority=1)
    with pytest.raises(DuplicateTask):
        mail.put(3, "r")
    mail.put(4, "t", priority=9)
    with pytest.raises(QueueFull):
        mail.put(5)
    assert [take(mail).reference for _ in range(3)] == ["s", "r", "t"]


def test_an_unknown_queue_is_an_error_and_a_bad_name_too(mail: QueueHandle) -> None:
    with pytest.raises(UnknownQueue, match="Did you mean 'mail'"):
        queue("mial").take()
    with pytest.raises(UnknownQueue):
        queue("mial").statistics()
    with pytest.raises(Exception, match="cannot be a queue's name"):
        queue("no spaces")


@dataclass
class Letter:
    to: str


def test_a_payload_comes_back_as_the_processor_s_type_or_goes_to_error_alone(
    mail: QueueHandle, taskqueue_registry: None
) -> None:
    processor("mail", payload=Letter)(lambda task: None)
    broken = make_task(queue="mail", payload={"nobody": 1})
    mail.put(Letter("ada"))
    assert take(mail).payload == Letter("ada")
    assert status(broken) == "ERROR"


def test_an_expired_task_is_settled_and_never_returned(
    mail: QueueHandle, configure: Callable[..., None], told: Told
) -> None:
    # Given an expired task in front of a living one
    expired = mail.put("late", ttl=SECOND)
    age(HOUR)
    living = mail.put("in time")
    # When one is taken, it is the living one, and the other is POISON
    assert take(mail).id == living.pk
    assert status(expired) == "POISON"
    assert ("mail", "ttl", expired.pk) in told
    # And where the queue says so, it is deleted and counted
    configure(expired="delete")
    gone = mail.put("late", ttl=SECOND)
    age(HOUR, pk=gone.pk)
    assert mail.take() is None
    assert not Task.objects.filter(pk=gone.pk).exists()
    assert DeletedTasks.objects.get().count == 1


def test_a_lease_that_ran_out_is_taken_over_and_told(mail: QueueHandle, told: Told) -> None:
    task = mail.put()
    first = take(mail)
    age(HOUR)
    second = take(mail)
    assert (second.id, second.attempt) == (task.pk, 2)
    assert ("mail", "lease_expired", task.pk) in told
    with pytest.raises(LeaseLost):
        mail.ack(first)
    mail.ack(second)


def test_a_task_whose_holder_died_on_its_last_attempt_ends_without_a_poller(
    mail: QueueHandle, configure: Callable[..., None], told: Told
) -> None:
    configure(max_attempts=1)
    task = mail.put()
    take(mail)
    age(HOUR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("django_dbtaskqueue.pull.handle.RESCUE_INTERVAL_S", 0.0)
        patch.setattr("django_dbtaskqueue.pull.handle._next_rescue", {})
        assert mail.take() is None
    assert status(task) == "ERROR"
    assert Attempt.objects.get().error_type.endswith("ProcessDied")
    assert told[-1] == ("mail", "lease_expired", task.pk)


def test_pauses_tags_and_groups_hold(mail: QueueHandle) -> None:
    mail.put(tag="eu")
    assert mail.take() is None
    assert queue("mail", tags=["eu"]).take() is not None
    for reference in ("a1", "a2"):
        mail.put(reference=reference, group="a")
    pause(["mail"], by="ada")
    assert mail.take() is None
    resume(["mail"])
    head = take(mail)
    assert mail.take() is None, "of a group one task at a time"
    mail.release(head)
    head = take(mail)
    assert head.reference == "a1"
    mail.ack(head)
    assert take(mail).reference == "a2"


# -- what a holder does ----------------------------------------------------------------------------------------------


def test_ack_completes_with_a_result(mail: QueueHandle) -> None:
    mail.put()
    task = take(mail)
    mail.ack(task, {"sent": True})
    assert (row(task).status, row(task).result) == ("COMPLETED", {"sent": True})
    with pytest.raises(LeaseLost):
        mail.ack(task)


def test_ack_obeys_the_queue_s_keep_setting(mail: QueueHandle, configure: Callable[..., None]) -> None:
    for keep in ("history", "delete"):
        configure(keep=keep)
        mail.put()
        mail.ack(take(mail))
        assert not Task.objects.exists()


def test_release_keeps_the_place_and_does_not_charge_unless_it_is_delayed(mail: QueueHandle) -> None:
    first, second = mail.put(), mail.put()
    mail.release(take(mail))
    assert (row(first).status, row(first).attempt) == ("CREATED", 0)
    task, other = take(mail), take(mail)
    assert (task.id, other.id) == (first.pk, second.pk)
    mail.release(task, HOUR)
    assert mail.take() is None
    assert (row(task).status, row(task).reenqueue_attempt) == ("CREATED", 1)
    mail.ack(other)
    age(HOUR)
    assert take(mail).id == task.id


def test_touch_extends_lease_and_time_to_live_by_the_delta(mail: QueueHandle) -> None:
    mail.put(ttl=HOUR)
    task = take(mail)
    before = row(task)
    mail.touch(task, HOUR)
    after = row(task)
    assert after.expire_time and before.expire_time
    for late, early in (
        (after.next_process_time, before.next_process_time),
        (after.expire_time, before.expire_time),
    ):
        assert abs(late - early - HOUR) <= timedelta(milliseconds=1)
    assert task.lease_until == after.next_process_time


def test_touch_by_nothing_is_nothing_and_backwards_or_none_an_error(mail: QueueHandle, told: Told) -> None:
    mail.put()
    task = take(mail)
    before = row(task).next_process_time
    mail.touch(task, timedelta(0))
    with pytest.raises(ValueError, match="must not be negative"):
        mail.touch(task, -SECOND)
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=r"delta=.* must be a timedelta"):
            mail.touch(task, wrong)  # type: ignore[arg-type]
    assert row(task).next_process_time == before
    assert [call for _, call, _ in told] == ["put", "take"]


def test_bury_by_the_holder_and_by_id_but_not_what_another_processes(mail: QueueHandle) -> None:
    held, waiting = mail.put(), mail.put()
    task = take(mail)
    assert mail.bury(task.id) is False
    assert mail.bury(task, "no such address") is True
    assert (row(held).status, row(held).process_result) == ("POISON", "no such address")
    assert mail.bury(waiting.pk) is True
    assert status(waiting) == "POISON"
    assert mail.bury(waiting.pk) is mail.bury(12_345) is False
    assert mail.take() is None


def test_the_lease_s_own_verbs_count_as_calls_too(mail: QueueHandle, told: Told) -> None:
    for _ in range(3):
        mail.put()
    take(mail).complete()
    take(mail).poison("bad")
    take(mail).fail("later", delay=HOUR)
    assert [call for _, call, _ in told if call != "put"] == ["take", "ack", "take", "bury", "take", "fail"]


def test_a_task_of_another_queue_is_refused(mail: QueueHandle) -> None:
    queue("other").put()
    task = take(queue("other"))
    with pytest.raises(TaskQueueError, match="is of queue 'other', not of 'mail'"):
        mail.ack(task)
    with pytest.raises(TypeError, match="neither a lease"):
        mail.ack(task.id)  # type: ignore[arg-type]
    queue("other").ack(task)


# -- transactions ----------------------------------------------------------------------------------------------------


def test_inside_a_transaction_everything_commits_or_rolls_back_with_it(mail: QueueHandle, told: Told) -> None:
    task = mail.put()
    told.clear()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        mail.ack(take(mail))
        mail.put("rolled back, too")
        raise ZeroDivisionError
    assert (row(task).status, row(task).total_attempt) == ("CREATED", 0)
    assert told == []
    with transaction.atomic():
        mail.ack(take(mail))
        own = mail.put()
        assert take(mail).id == own.pk
        assert told == []
    assert status(task) == "COMPLETED"
    assert [call for _, call, _ in told] == ["take", "ack", "put", "take"]
    assert mail.take() is None


def test_a_late_ack_rolls_the_holder_s_writes_back(mail: QueueHandle) -> None:
    mail.put()
    task = take(mail)
    assert mail.release_all() == 1
    with pytest.raises(LeaseLost), transaction.atomic():
        mail.put("written beside")
        mail.ack(task)
    assert Task.objects.count() == 1


# -- by id, and all at once ------------------------------------------------------------------------------------------


def test_peek_changes_nothing(mail: QueueHandle) -> None:
    task = mail.put({"a": 1}, "r")
    before = Task.objects.values().get()
    found = mail.peek(task.pk)
    assert found is not None and (found.reference, found.payload) == ("r", {"a": 1})
    assert Task.objects.values().get() == before
    assert mail.peek(task.pk + 1) is None
    assert queue("other").peek(task.pk) is None


def test_kick_brings_buried_tasks_back_the_oldest_first(mail: QueueHandle, told: Told) -> None:
    ids = [mail.put().pk for _ in range(3)]
    for task_id in ids:
        mail.bury(task_id)
    told.clear()
    assert mail.kick(0) == 0
    assert mail.kick(2) == 2
    assert told == [("mail", "kick", ids[0]), ("mail", "kick", ids[1])]
    assert [take(mail).id, take(mail).id] == ids[:2]
    assert mail.kick(99) == 1
    with pytest.raises(ValueError, match="not negative"):
        mail.kick(-1)


def test_delete_revokes_a_lease_and_ids_are_never_used_again(mail: QueueHandle) -> None:
    mail.put()
    task = take(mail)
    assert mail.delete(task.id) is True
    assert mail.delete(task.id) is False
    with pytest.raises(LeaseLost):
        mail.ack(task)
    assert DeletedTasks.objects.get().count == 1
    # Even the last id of an emptied table is not given out again
    later = mail.put()
    assert later.pk > task.id
    mail.truncate()
    assert mail.put().pk > later.pk


def test_release_all_revokes_every_lease(mail: QueueHandle, told: Told) -> None:
    ids = [mail.put().pk for _ in range(3)]
    held = [take(mail), take(mail)]
    told.clear()
    assert mail.release_all() == 2
    assert told == [("mail", "release", ids[0]), ("mail", "release", ids[1])]
    for task in held:
        with pytest.raises(LeaseLost):
            mail.release(task)
    assert sorted(take(mail).id for _ in ids) == ids


def test_truncate_deletes_and_counts_all_tasks_of_the_queue_only(mail: QueueHandle, told: Told) -> None:
    queue("other").put()
    for name in ("COMPLETED", "ERROR", "POISON", "CREATED", "CREATED"):
        make_task(name, queue="mail")
    task = take(mail)
    assert mail.truncate() == 5
    assert sum(DeletedTasks.objects.filter(queue="mail").values_list("count", flat=True)) == 5
    assert len([call for _, call, _ in told if call == "delete"]) == 5
    assert Task.objects.count() == 1
    with pytest.raises(LeaseLost):
        mail.ack(task)
    assert mail.truncate() == 0


def test_tasks_by_status_goes_through_them_in_order(mail: QueueHandle) -> None:
    ids = [make_task("ERROR", queue="mail").pk for _ in range(3)]
    make_task("POISON", queue="mail")
    make_task("ERROR", queue="other")
    assert [task.pk for task in mail.tasks_by_status("ERROR")] == ids
    enqueue_many("mail", [{"payload": n} for n in range(2_500)])  # more than one statement takes
    assert len({task.pk for task in mail.tasks_by_status("CREATED")}) == 2_500
    assert mail.truncate() == 2_504
    with pytest.raises(ValueError, match="is not a status; they are CREATED"):
        list(mail.tasks_by_status("FAILED"))


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_using_names_the_database() -> None:
    there = queue("mail", using="sqlite")
    task = there.put()
    assert queue("mail", using="default").take() is None
    lease = take(there)
    assert lease.id == task.pk
    with pytest.raises(TaskQueueError, match="on database 'sqlite', not of"):
        queue("mail", using="default").ack(there.token(lease))


@pytest.mark.django_db(databases=["default", "sqlite"])
def test_a_queue_with_shards_is_pulled_from_all_of_them(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"mail": {"shards": ["default", "sqlite"]}}}
    mail = queue("mail")
    for _ in range(4):
        mail.put()
    assert mail.statistics().by_status["CREATED"] == 4
    tasks = [take(mail) for _ in range(4)]
    assert {task.port.alias for task in tasks} == {"default", "sqlite"}
    assert mail.take() is None
    with pytest.raises(TaskQueueError, match=r"has shards.*using='default'"):
        mail.peek(1)
    for task in tasks:
        mail.ack(mail.token(task))
    assert mail.statistics().by_status["COMPLETED"] == 4
