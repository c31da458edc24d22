"""``task.wait()`` and ``task.await_result()``: wait for the end of a task.

The waiter sets the task's column ``watched``, then looks, then sleeps. The statement that ends a watched task tells its
end after the commit, in this process and by NOTIFY. So no wake-up falls between the look and the sleep. One listening
connection serves all waiters of a process and database. A lost notification costs a few seconds, because a waiter looks
from time to time; where there is no NOTIFY, such as on SQLite, it looks more often.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.exceptions import PayloadError, TaskFailed, TaskGone, TaskQueueError
from django_dbtaskqueue.core.masking import Unreadable
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.core.threads import after_fork
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import AbstractTask, TaskHistory
from django_dbtaskqueue.pull import blocking

MAX_WAITERS = 1000  # in one process, threads and coroutines
SAFETY_LOOK_S = 5.0  # between two looks for an end whose notification was lost
UNWATCHED_LOOK_S = 0.2  # before the next try to set ``watched`` on a row that is locked
END_LOOKS_S = 0.05, 1.0  # between two looks without NOTIFY: the first pause and the longest
Timeout = float | timedelta | None  # seconds

_waiting: dict[int, set[Callable[[], None]]] = {}  # by the task's id
_waiting_lock = threading.Lock()


class Ended(NamedTuple):
    """What became of a task."""

    status: str
    result: Any
    text: str | None  # its failure


def wait(task: AbstractTask, timeout: Timeout) -> Any:
    """Return the task's result when it has ended, on this thread. See ``AbstractTask.wait``."""
    look, changed = _EndReader(task), threading.Event()
    until = _until(timeout)
    if (found := look.first()) is not None:
        return _result(task, found)
    with _registered(task, changed.set):
        while (found := look.again()) is None:
            clock.wait(changed, _seconds_left(task, until, look.pause))
            changed.clear()
    return _result(task, found)


async def await_result(task: AbstractTask, timeout: Timeout) -> Any:
    """``wait`` for a coroutine. While it waits it takes no thread."""
    look, changed, loop = _EndReader(task), asyncio.Event(), asyncio.get_running_loop()
    until = _until(timeout)
    if (found := await sync_to_async(look.first)()) is not None:
        return _result(task, found)

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    with _registered(task, wake):
        while (found := await sync_to_async(look.again)()) is None:
            await clock.wait_async(changed, _seconds_left(task, until, look.pause))
            changed.clear()
    return _result(task, found)


def _until(timeout: Timeout) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return float("inf") if seconds is None else clock.monotonic() + seconds


def _seconds_left(task: AbstractTask, until: float, pause: float) -> float:
    left = until - clock.monotonic()
    if left <= 0:
        raise TimeoutError(f"Task {task.pk} of queue {task.queue!r} has not ended in time. It goes on.")
    return min(left, pause)


def _result(task: AbstractTask, ended: Ended) -> Any:
    if ended.status != Status.COMPLETED:
        raise TaskFailed(task.pk, task.queue, ended.status, ended.text or "")
    if isinstance(ended.result, Unreadable):
        raise PayloadError(str(ended.result), cannot="be read", of="The result")
    return ended.result


class _EndReader:
    """Looks at a task that is waited for, on the calling thread's connection."""

    def __init__(self, task: AbstractTask) -> None:
        self._task = task
        self._model = type(task)
        self._alias = task._state.db or conf.default_settings(task.queue).database
        self._watched = False
        self.pause = 0.0  # seconds until the next look, if nothing wakes the waiter

    def first(self) -> Ended | None:
        """Return what became of the task; None if it has not ended. Then it has to be possible to wait."""
        found = self._read()
        connection = connections[self._alias]
        if found is None and (connection.in_atomic_block or not connection.get_autocommit()):
            raise TaskQueueError(
                f"Waiting for task {self._task.pk} inside a transaction would never end: pollers see a task only when "
                "the transaction that enqueued it has committed. Wait after the transaction, such as in "
                "transaction.on_commit(); in a test, call drain() first."
            )
        return found

    def again(self) -> Ended | None:
        """Return what became of the task, once the statement that ends it tells its end; None if it has not ended."""
        if not self._watched:
            self._watched = self._watch()
        found = self._read()
        if not self._watched:
            self.pause = UNWATCHED_LOOK_S
        elif connections[self._alias].vendor == "postgresql" and conf.settings().notify:
            self.pause = SAFETY_LOOK_S
        else:
            self.pause = next_pause(self.pause, *END_LOOKS_S)
        return found

    def _watch(self) -> bool:
        """Set ``watched``; return False if the row is locked, such as by a processor that settles it."""
        tasks = self._model._base_manager.using(self._alias).filter(pk=self._task.pk, final_status__isnull=True)
        with transaction.atomic(using=self._alias):
            free = tasks.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True).first()
            return free is not None and tasks.update(watched=True) == 1

    def _read(self) -> Ended | None:
        found = self._row(self._model, pk=self._task.pk)
        if found is None:  # it left the table
            location = Session.on(self._alias, self._model).location
            found = self._row(TaskHistory, location=location, task_id=self._task.pk)
        if found is None:
            raise TaskGone(self._task.pk, self._task.queue)
        return found if found.status in (Status.COMPLETED, Status.ERROR, Status.POISON) else None

    def _row(self, model: Any, **key: object) -> Ended | None:
        rows = model._base_manager.using(self._alias).filter(**key)
        row = rows.values_list("status", "result", "process_result", "create_time").first()
        # On SQLite the id of a task that was rolled back comes again, with another task.
        return None if row is None or row[-1] != self._task.create_time else Ended(*row[:-1])


# -- wake-ups ----------------------------------------------------------------------------------------------------------


@contextmanager
def _registered(task: AbstractTask, wake: Callable[[], None]) -> Iterator[None]:
    """Have ``wake`` called when the task's end is told, for the time of a ``with`` block."""
    alias = task._state.db or conf.default_settings(task.queue).database
    with _waiting_lock:
        if sum(map(len, _waiting.values())) >= MAX_WAITERS:
            raise TaskQueueError(
                f"{MAX_WAITERS} threads and coroutines of this process wait for tasks. Wait for fewer at a time, or "
                "look at the task later."
            )
        _waiting.setdefault(task.pk, set()).add(wake)
    try:
        with blocking.listener(alias, _wake).listening():
            notify.listen(_wake)
            yield
    finally:
        with _waiting_lock:
            _waiting[task.pk].discard(wake)
            if not _waiting[task.pk]:
                del _waiting[task.pk]


def _wake(name: str) -> None:
    """Wake those who wait for a task whose end is told; all if the name is empty: something may have been missed."""
    task_id = name.removeprefix(notify.TASK_ENDED)
    if name and task_id == name:  # a wake-up of pollers
        return
    with _waiting_lock:
        # Compared as text: every role of the database may NOTIFY, and what is no number must not end the listening.
        found = [wake for pk, wakes in _waiting.items() if not name or str(pk) == task_id for wake in wakes]
    for wake in found:
        wake()


@after_fork
def _after_fork() -> None:
    # The waiting threads and the connections stayed with the parent.
    global _waiting_lock
    _waiting_lock = threading.Lock()
    _waiting.clear()
