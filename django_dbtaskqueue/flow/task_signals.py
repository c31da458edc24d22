"""Signals to tasks: stored with the caller's transaction, and a task that waits for one becomes due.

Two statements: the first locks the task, and the second, which begins later, sees what the task waits for by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from asgiref.sync import sync_to_async
from django.db import router

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.exceptions import SignalRefused
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Row, Session, alias_for, model_for
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.groups import Groups, lock_in_order, regroup
from django_dbtaskqueue.models import AbstractTask, Task
from django_dbtaskqueue.models.tasks import MAX_NAME_CHARS


def signal(
    task: AbstractTask | Lease | int,
    name: str,
    data: object = None,
    *,
    queue: str | None = None,
    using: str | None = None,
    actor: str = "",
) -> bool:
    """Send a signal to a task that waits for it (``task.wait_for``), or will; return whether it is due now.

    The signal commits with the caller's transaction. Signals of one name are received in order, each once. ``data`` is
    any JSON value. ``task`` may be an id; ``queue`` then names the queue, if that has a table or database of its own.
    Raises ``SignalRefused`` if the task has ended or is not there, and ``PayloadError`` for data that is not JSON.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise TypeError(f"The name of a signal is text of 1 to {MAX_NAME_CHARS} characters, not {name!r:.80}.")
    session, task_id = _place(task, queue, using)
    text = json_payload.kept(f"The data of signal {name!r}", data, conf.payload_limits())
    params = {
        "location": session.location, "task_id": task_id, "name": name, "data": text,
        "actor": actor[:MAX_NAME_CHARS],
    }  # fmt: skip

    def lock() -> tuple[list[Row], Groups]:
        rows = session.run(session.sql.count_signal, params)
        return rows, {queue: {group} for queue, group in rows if group is not None}

    with session.atomic():
        rows = lock_in_order(session, lock)
        if not rows:
            statuses = session.model._base_manager.using(session.connection.alias).filter(pk=task_id)
            raise SignalRefused(task_id, name, statuses.values_list("status", flat=True).first())
        [(of_queue, group)] = rows
        session.run(session.sql.store_signal, params)
        woken = bool(session.run(session.sql.wake_signalled, params))
        if woken and group is not None:
            regroup(session, of_queue, {group})
        usage.after_commit(session.connection, {(of_queue, "signal"): [task_id]})
        if woken:
            notify.after_commit(session.connection, of_queue)
    return woken


async def asignal(
    task: AbstractTask | Lease | int,
    name: str,
    data: object = None,
    *,
    queue: str | None = None,
    using: str | None = None,
    actor: str = "",
) -> bool:
    """``signal`` for async code, on Django's thread for the ORM."""
    return await sync_to_async(signal)(task, name, data, queue=queue, using=using, actor=actor)


def signal_all(tasks: Iterable[AbstractTask], name: str, data: object, *, actor: str) -> int:
    """Send a signal to each task that has not ended; return how many got it."""
    sent = 0
    for task in tasks:
        with suppress(SignalRefused):
            signal(task, name, data, actor=actor)
            sent += 1
    return sent


def _place(task: AbstractTask | Lease | int, queue: str | None, using: str | None) -> tuple[Session, int]:
    using = using and alias_for("", using)
    if isinstance(task, AbstractTask):
        return Session.on(using or task._state.db or alias_for(task.queue, None), type(task)), int(task.pk)
    if isinstance(task, Lease):
        return Session.on(using or task.port.alias, model_for(task.queue)), task.id
    if isinstance(task, bool) or not isinstance(task, int):
        raise TypeError(f"signal() needs a task or its id, not {json_payload.short_repr(task)}.")
    if queue is None:
        return Session.on(using or router.db_for_write(Task), Task), task
    return Session.on(alias_for(queue, using), model_for(queue)), task
