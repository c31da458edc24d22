"""One queue for each way a task can end. Each run leaves a row in ``effects``, with the release that ran it."""

import os

from asgiref.sync import sync_to_async
from django.db import connection, transaction

from django_dbtaskqueue import Complete, CompleteDelete, Fail, Poison, Reenqueue, processor

RELEASE = os.environ["UPGRADE_RELEASE"]


def run(task):
    sql = "INSERT INTO effects (queue, reference, release) VALUES (%s, %s, %s)"
    with connection.cursor() as cursor:
        cursor.execute(sql, [task.queue, task.reference, RELEASE])
    return Complete()


for queue in ("plain", "many", "history", "grouped"):
    processor(queue)(run)
processor("atomic", mode="atomic")(run)


@processor("event-loop")
async def event_loop(task):
    return await sync_to_async(run)(task)


@processor("retried")
def retried(task):
    run(task)
    if task.attempt == 1:
        raise RuntimeError("the first attempt is to fail")


@processor("again")
def again(task):
    run(task)
    return Complete() if task.reenqueue_attempt else Reenqueue()


@processor("lost")
def lost(task):
    run(task)
    return Fail("it fails always")


@processor("set-aside")
def set_aside(task):
    run(task)
    return Poison("nobody can do this")


@processor("gone")
def gone(task):
    with transaction.atomic():
        run(task)
    return CompleteDelete()
