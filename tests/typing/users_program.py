"""A user's module. mypy (with Django's plugin) and pyright (without) check it; nothing runs it.

What has a type for a user has an ``assert_type``. What must be refused has an ``ignore``: a checker that no longer
refuses it says that the comment is not needed.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_type

import django_dbtaskqueue
from django_dbtaskqueue import Complete, Fail, Geometric, Reenqueue, enqueue, enqueue_many, processor, queue
from django_dbtaskqueue.core.exceptions import DuplicateTask
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import AbstractTask, Attempt, Task, TaskHistory
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations import bulk, lookup
from django_dbtaskqueue.signals import Listener, register
from django_dbtaskqueue.testing import DrainReport, assert_enqueued, drain


@dataclass(frozen=True)
class Mail:
    to: str
    copies: int = 1


@processor("mail", payload=Mail, retry=Geometric(timedelta(seconds=10)), max_attempts=5, timeout=timedelta(minutes=1))
def send(task: Lease) -> Complete | Reenqueue | Fail:
    mail: Mail = task.payload
    return Complete(f"{mail.copies} to {mail.to}")


@processor("mail.async")
async def send_later(task: Lease) -> str:
    return task.queue


@processor("mail.class")
class Sender:
    def process(self, task: Lease) -> None:
        print(task.reference)


async def decorators_keep_the_type(lease: Lease) -> None:
    assert_type(send(lease), Complete | Reenqueue | Fail)
    assert_type(await send_later(lease), str)
    assert_type(Sender().process(lease), None)
    send("no lease")  # type: ignore[arg-type]


def querysets() -> None:
    failed: TaskQuerySet[Task] = Task.objects.filter(queue="mail", status="ERROR")
    assert_type(Task.objects.filter(queue="mail").reprocess(), int)
    assert_type(failed.exclude(priority=0).order_by("id").mark_poison(), int)
    assert_type(Task.objects.due().filter(priority__lt=0).cancel(), int)
    assert_type(Task.objects.using("default").stale().count(), int)
    assert_type(Task.objects.finished().housekeep(older_than=timedelta(days=14)), int)
    assert_type([task.pk for task in failed.iterator()] == [], bool)
    assert_type(failed.first(), Task | None)
    assert_type(Task.objects.get(pk=1), Task)
    for task in failed:
        assert_type(task, Task)
        rows(task)
    Task.objects.kick("all")  # type: ignore[arg-type]


def rows(task: Task) -> None:
    assert_type(task.id, int)
    assert_type(task.queue, str)
    assert_type(task.status, str)
    assert_type(task.reference, str | None)
    assert_type(task.total_attempt, int)
    assert_type(task.create_time, datetime)
    assert_type(task.finish_time, datetime | None)
    assert_type(task.lease_seconds, float | None)
    for attempt in Attempt.objects.filter(task_id=task.id):
        assert_type(attempt.message, str)
    assert_type(TaskHistory.objects.filter(task_id=task.id).first(), TaskHistory | None)


def produce(at: datetime) -> None:
    assert_type(enqueue("mail", "a", Mail("ann@example.com"), delay=timedelta(minutes=5), run_at=at), Task)
    assert_type(Task.objects.enqueue("mail", "a", {"to": "ann"}, priority=-1), Task)
    report = enqueue_many("mail", ((str(n), Mail("all@example.com", n)) for n in range(3)))
    assert_type(report, django_dbtaskqueue.EnqueueReport)
    assert_type(report.enqueued, int)
    enqueue("mail", delay=5)  # type: ignore[arg-type]
    enqueue("mail", dealy=None)  # type: ignore[call-arg]
    try:
        enqueue("mail", "a")
    except DuplicateTask as error:
        assert_type(error.task_id, int | None)


async def produce_later() -> None:
    assert_type(await django_dbtaskqueue.aenqueue("mail", "b", ttl=timedelta(hours=1)), Task)
    report = await django_dbtaskqueue.aenqueue_many("mail", [{"reference": "c"}], on_duplicate="ignore")
    assert_type(report, django_dbtaskqueue.EnqueueReport)
    await django_dbtaskqueue.aenqueue("mail", priority="high")  # type: ignore[arg-type]


def pull() -> None:
    mail = queue("mail")
    assert_type(mail.put({"to": "ann"}, group="a"), Task)
    while task := mail.take(timeout=timedelta(seconds=1)):
        assert_type(task, Lease)
        assert_type(task.attempt, int)
        mail.ack(task, "sent")
    for lease in Task.objects.checkout("mail", poller_instance="me", limit=2):
        assert_type(lease, Lease)
        lease.complete("sent")


def operate() -> None:
    assert_type(lookup.find("mail", "a"), AbstractTask | None)
    assert_type(lookup.reprocess("mail", "a"), bool)
    assert_type(lookup.count_by_status("mail"), dict[str, dict[str, int]])
    assert_type(lookup.search("mail", status="ERROR").purge(), int)
    assert_type(bulk.turn("default"), bool)


class Clerk(Listener):
    def started(self, task: Lease) -> None:
        print(task.reference)


def tests() -> None:
    register(Clerk())
    assert_type(drain("mail"), DrainReport)
    assert_type(assert_enqueued("mail", reference="a"), AbstractTask)
