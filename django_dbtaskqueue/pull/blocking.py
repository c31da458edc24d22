"""What waits: ``take`` and ``wait`` for a task to take, ``task.wait()`` for the end of one.

Threads wait for a task in the order they came. Only the first of those that wait for the same tasks polls the database.
It sleeps until a wake-up comes (from this process, or by NOTIFY from another one) or until its next poll is due: a lost
wake-up costs time, and no task. Between processes the database decides who gets a task.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.durations import clock, next_pause
from django_dbtaskqueue.core.exceptions import PayloadError, TaskFailed, TaskGone, TaskQueueError
from django_dbtaskqueue.core.masking import Unreadable
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.core.threads import after_fork
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.notify import Wakeup
from django_dbtaskqueue.db.session import alias_of
from django_dbtaskqueue.flow.dependencies import TaskKey, rows_of
from django_dbtaskqueue.models import AbstractTask

T = TypeVar("T")
GIVE_WAY_S = 1.0  # a thread that does not want to wait lets those before it poll first, for at most this long
LISTENER_LINGER_S = 10.0  # the listening connection outlives the last waiting thread


class WaitKey(NamedTuple):
    """Threads with the same key wait for the same tasks."""

    queue: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    group: str | None = None
    takes: bool = True  # False: they wait for a task that can be taken, and do not take it


class WaitQueue:
    """The threads of one key, in the order they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._wakeups = 0
        self._polls = 0  # begun so far
        self._last_empty_poll = 0  # its number
        self.entered = 0  # threads inside ``take`` or ``wait``; guarded by _registry_lock

    def wake(self) -> None:
        """There may be something to take: let the first thread poll now."""
        with self._changed:
            self._wakeups += 1
            self._changed.notify_all()

    def take(self, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float]) -> T | None:
        """Return what ``poll`` finds when it is this thread's turn; None when nothing was found by ``until``.

        ``until`` None: do not wait. ``pause`` returns the seconds to sleep at most before the next poll.
        """
        me = object()
        with self._changed:
            self._waiting.append(me)
            next_poll = self._polls + 1
        if until is None:
            self.wake()
        try:
            return self.poll(poll, until, pause) if self._is_our_turn(me, until, next_poll) else None
        finally:
            with self._changed:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _is_our_turn(self, me: object, until: float | None, next_poll: int) -> bool:
        """Wait until this thread is the first.

        False on timeout. A thread that does not want to wait gets False, too, when a poll that began after it came
        found nothing; it polls out of turn when those before it take too long.
        """
        with self._changed:
            if until is None:
                clock.wait_for(
                    self._changed, lambda: self._waiting[0] is me or self._last_empty_poll >= next_poll, GIVE_WAY_S
                )
                return self._waiting[0] is me or self._last_empty_poll < next_poll
            return clock.wait_for(self._changed, lambda: self._waiting[0] is me, max(0.0, until - clock.monotonic()))

    def poll(
        self, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float], *, for_all: bool = True
    ) -> T | None:
        """Poll, and sleep until a wake-up or the next poll, until something is found or the time is over.

        ``for_all``: a poll that found nothing tells the other threads that there is nothing for them either.
        """
        while True:
            with self._changed:
                wakeups = self._wakeups
                number = self._polls = self._polls + 1
            if (found := poll()) is not None:
                return found
            with self._changed:
                if for_all:
                    self._last_empty_poll = max(self._last_empty_poll, number)
                    self._changed.notify_all()
            if until is None or clock.monotonic() >= until:
                return None
            self._sleep(min(pause(), until - clock.monotonic()), wakeups)  # in this order: a pause asks the database

    def _sleep(self, seconds: float, wakeups: int) -> None:
        with self._changed:
            clock.wait_for(self._changed, lambda: self._wakeups != wakeups, seconds)


class NotifyListener:
    """Receives the wake-ups of other processes on its own connection, while a thread waits and a little longer."""

    def __init__(self, alias: str, linger_s: float) -> None:
        self._alias = alias
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._users = 0
        self._wakeup: Wakeup | None = None
        self._stopping: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._stopping is not None:
                self._stopping.cancel()
            if self._wakeup is None:
                self._wakeup = Wakeup(self._alias, wake)  # wakes once more when it is connected
                self._wakeup.start()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stopping = threading.Timer(self._linger_s, self._stop)
                    self._stopping.daemon = True
                    self._stopping.start()

    def _stop(self) -> None:
        with self._lock:
            if self._users:
                return
            wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.stop()


_registry_lock = threading.Lock()
_wait_queues: dict[WaitKey, WaitQueue] = {}
_listeners: dict[tuple[str, str], NotifyListener] = {}
_waiting: dict[int, set[Callable[[], None]]] = {}  # by the id of a task whose end is waited for


def take_waiting(
    key: WaitKey, poll: Callable[[], T | None], until: float | None, pause: Callable[[], float], *, alone: bool = False
) -> T | None:
    """``WaitQueue.take`` of a key, listening for wake-ups from the first pause on.

    ``alone``: poll out of turn, because this thread may hold locks that the others wait for.
    """
    with _entered(key) as wait_queue, ExitStack() as stack:
        wake_listeners.add(wake)
        aliases = [*key.aliases]  # to listen to; a take that finds something at once needs no listener

        def listening_pause() -> float:
            while aliases:
                stack.enter_context(_listening(aliases.pop()))
            return pause()

        if alone:
            return wait_queue.poll(poll, until, listening_pause, for_all=False)
        return wait_queue.take(poll, until, listening_pause)


def _listening(alias: str) -> AbstractContextManager[None]:
    """Let the one listener of this process and a database listen, for the time of a ``with`` block."""
    settings = connections[alias].settings_dict
    linger_s = 0.0 if notify.is_for_tests(settings) else LISTENER_LINGER_S
    return _listeners.setdefault((alias, str(settings["NAME"])), NotifyListener(alias, linger_s)).listening()


def wake(name: str) -> None:
    """Wake the threads that wait for a queue, or for the end of a task; all if the name is empty."""
    task_id = name.removeprefix(notify.TASK_ENDED)
    with _registry_lock:
        found = [queue.wake for key, queue in _wait_queues.items() if not name or key.queue == name]
        if not name or task_id != name:
            # Compared as text: every role of the database may NOTIFY, and what is no number must not end the listening.
            found += [one for pk, wakes in _waiting.items() if not name or str(pk) == task_id for one in wakes]
    for one in found:
        one()


def waiters(queue: str, aliases: Sequence[str]) -> int:
    """Return how many threads of this process are inside ``take`` or ``wait`` for a queue."""
    with _registry_lock:
        found = [one for key, one in _wait_queues.items() if key.queue == queue and {*key.aliases} & {*aliases}]
        return sum(wait_queue.entered for wait_queue in found)


@contextmanager
def _entered(key: WaitKey) -> Iterator[WaitQueue]:
    with _registry_lock:
        wait_queue = _wait_queues.setdefault(key, WaitQueue())
        wait_queue.entered += 1
    try:
        yield wait_queue
    finally:
        with _registry_lock:
            wait_queue.entered -= 1
            if not wait_queue.entered:
                _wait_queues.pop(key, None)


# -- ``task.wait()`` and ``task.await_result()``: wait for the end of a task -------------------------------------------

# The waiter sets the task's column ``watched``, then looks, then sleeps. The statement that ends a watched task tells
# its end after the commit, in this process and by NOTIFY. So no wake-up falls between the look and the sleep. One
# listening connection serves all waiters of a process and database.

MAX_WAITERS = 1000  # in one process, threads and coroutines
SAFETY_LOOK_S = 5.0  # between two looks for an end whose notification was lost
UNWATCHED_LOOK_S = 0.2  # before the next try to set ``watched`` on a row that is locked
END_LOOKS_S = 0.05, 1.0  # between two looks without NOTIFY: the first pause and the longest
Timeout = float | timedelta | None  # seconds
Ended = tuple[str, Any, str | None]  # what became of a task: its status, its result, the text of its failure


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

    def on_end() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(changed.set)

    with _registered(task, on_end):
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
    status, result, text = ended
    if status != Status.COMPLETED:
        raise TaskFailed(task.pk, task.queue, status, text or "")
    if isinstance(result, Unreadable):
        raise PayloadError(str(result), cannot="be read", of="The result")
    return result


class _EndReader:
    """Looks at a task that is waited for, on the calling thread's connection."""

    def __init__(self, task: AbstractTask) -> None:
        self._task, self._model = task, type(task)
        self._alias = alias_of(task)
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
        key = TaskKey(self._model._meta.label_lower, self._task.pk)
        found = rows_of({key}, self._alias, ("status", "result", "process_result", "create_time")).get(key)
        # On SQLite the id of a task that was rolled back comes again, with another task.
        if found is None or found[-1] != self._task.create_time:
            raise TaskGone(self._task.pk, self._task.queue)
        return found[:-1] if found[0] in TERMINAL else None


@contextmanager
def _registered(task: AbstractTask, on_end: Callable[[], None]) -> Iterator[None]:
    """Have ``on_end`` called when the task's end is told, for the time of a ``with`` block."""
    with _registry_lock:
        if sum(map(len, _waiting.values())) >= MAX_WAITERS:
            raise TaskQueueError(
                f"{MAX_WAITERS} threads and coroutines of this process wait for tasks. Wait for fewer at a time, or "
                "look at the task later."
            )
        _waiting.setdefault(task.pk, set()).add(on_end)
    try:
        wake_listeners.add(wake)
        with _listening(alias_of(task)):
            yield
    finally:
        with _registry_lock:
            _waiting[task.pk].discard(on_end)
            if not _waiting[task.pk]:
                del _waiting[task.pk]


@after_fork
def _after_fork() -> None:
    # The waiting threads and the connections stayed with the parent.
    global _registry_lock
    _registry_lock = threading.Lock()
    for registered in (_wait_queues, _listeners, _waiting):
        registered.clear()
