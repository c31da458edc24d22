"""Ownership is the lease: who holds its token may ack, release and touch, on any connection and in any process."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_dbtaskqueue import LeaseLost, TaskQueueError, queue
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull.handle import QueueHandle
from tests.conftest import ProcessDatabase
from tests.factories import age
from tests.support import PATIENCE, actors

HOUR = timedelta(hours=1)


@pytest.fixture
def held(mail: QueueHandle) -> Lease:
    mail.put({"to": "ada"}, "r", context={"trace": "1"})
    task = mail.take()
    assert task is not None
    return task


def test_after_a_reconnect_the_token_is_as_good_as_the_lease(mail: QueueHandle, held: Lease) -> None:
    token = mail.token(held)
    connection.close()
    mail.touch(token, HOUR)
    again = mail.from_token(token)
    assert (again.id, again.total_attempt, again.payload, again.context, again.attempt) == (
        held.id, held.total_attempt, {"to": "ada"}, {"trace": "1"}, 1,
    )  # fmt: skip
    assert again.lease_until > held.lease_until
    mail.ack(token, "sent")
    assert Task.objects.get().status == "COMPLETED"


def test_another_connection_acks_by_the_token(mail: QueueHandle, held: Lease) -> None:
    token = mail.token(held)
    with actors(1) as (other,):
        other.do(mail.ack, token).result(PATIENCE)
    with pytest.raises(LeaseLost):
        mail.ack(held)


def test_another_process_acks_by_the_token(postgres_process_database: ProcessDatabase) -> None:
    work = queue("work")
    work.put()
    task = work.take()
    assert task is not None
    code = f"from django_dbtaskqueue import queue; queue('work').ack({work.token(task)!r})"
    postgres_process_database.run("shell", "-v", "0", "-c", code)
    assert Task.objects.get().status == "COMPLETED"


def test_a_token_is_used_up_by_settling(mail: QueueHandle) -> None:
    for verb in (mail.ack, mail.release, mail.bury):
        mail.truncate()
        mail.put()
        held = mail.take()
        assert held is not None
        token = mail.token(held)
        verb(token)
        before = Task.objects.values().get()
        for other in (mail.ack, mail.release, mail.bury, mail.from_token, lambda token: mail.touch(token, HOUR)):
            with pytest.raises(LeaseLost):
                other(token)
        assert Task.objects.values().get() == before


def test_the_token_of_a_lease_that_was_taken_over_is_worthless(mail: QueueHandle, held: Lease) -> None:
    token = mail.token(held)
    age(HOUR)
    second = mail.take()
    assert second is not None and second.id == held.id
    with pytest.raises(LeaseLost):
        mail.ack(token)
    mail.ack(mail.token(second))


def test_a_lease_that_ran_out_but_was_not_taken_over_still_counts(mail: QueueHandle, held: Lease) -> None:
    token = mail.token(held)
    age(HOUR)
    assert mail.from_token(token).deadline < held.deadline
    mail.ack(token)


def test_a_token_cannot_be_made_up(mail: QueueHandle, held: Lease) -> None:
    token = mail.token(held)
    for wrong in (token[:-1], "x" + token, "", "1:1", token.replace(token[3], "A" if token[3] != "A" else "B", 1)):
        with pytest.raises(TaskQueueError, match="is not the token of a lease"):
            mail.ack(wrong)
    assert Task.objects.get().status == "PROCESSING"


def test_a_token_of_another_queue_is_refused(mail: QueueHandle, held: Lease) -> None:
    with pytest.raises(TaskQueueError, match="of queue 'mail'"):
        queue("other").ack(mail.token(held))
    mail.ack(held)
