"""The pull API: a queue for code with its own loop, without a poller.

::

    mail = queue("mail")
    mail.put({"to": "ada@example.org"})
    while task := mail.take(timeout=timedelta(minutes=1)):
        send(task.payload)
        mail.ack(task)

Everything runs on the calling thread's database connection, so it takes part in the caller's transaction if there is
one. Ownership is the lease: the code that has the lease or its token may ack, release and touch it, from any process.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, Self, TypeVar, Unpack
from uuid import uuid4

from django.core.signing import BadSignature, Signer
from django.db import connections, transaction
from django.db.models import Count, Q
from django.db.models.functions import Now

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.conf.queue import stored
from django_dbtaskqueue.core.columns import PutOptions
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Outcome, Poison, Reenqueue, check_delay
from django_dbtaskqueue.core.states import COMPLETED, CREATED, PROCESSING, Status, sources
from django_dbtaskqueue.db.session import Session, alias_for, aliases_of, model_for, only_alias
from django_dbtaskqueue.flow import move, usage
from django_dbtaskqueue.flow.enqueue import checked_text, enqueue
from django_dbtaskqueue.flow.groups import groups_of, lock_in_order
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.selection import with_row_locks
from django_dbtaskqueue.models import Limit, MinuteCount, Queue, Task, UsedReference
from django_dbtaskqueue.models.control import CALL
from django_dbtaskqueue.models.querysets import TaskQuerySet
from django_dbtaskqueue.operations.lookup import tasks_on
from django_dbtaskqueue.pull import blocking, leases
from django_dbtaskqueue.pull.leases import ManualSettlePort

__all__ = ["QueueHandle"]

T = TypeVar("T")

RESCUE_INTERVAL_S = 5.0  # between two rescues of one queue in one process
MAX_REMEMBERED_QUEUES = 4096
SIGNER = Signer(salt="django_dbtaskqueue.lease")  # of tokens, by SECRET_KEY: who has the text holds the lease
BATCH_TASKS = 1000  # tasks that one transaction of a verb changes
# The CREATED tasks of a queue, told apart.
WAITING = {"ready": Q(ready_time__lte=Now()), "delayed": Q(ready_time__gt=Now()), "parked": Q(ready_time__isnull=True)}
Verb = Callable[[TaskQuerySet], int]

_next_rescue: dict[tuple[str, str], float] = {}


def queue(name: str, *, using: str | None = None, tags: Sequence[str] = ()) -> "QueueHandle":
    """Return the handle of a queue, which need not exist yet. Cheap: nothing is read.

    ``using``: one database, of a queue with shards one shard. ``tags``: take tasks with these tags, too. Raises
    ``ImproperlyConfigured`` for a name no queue can have.
    """
    return QueueHandle(conf.valid_name(name), using, tuple(sorted(set(tags))))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Where a queue stands."""

    by_status: dict[str, int]  # every status, and ``total``, which does not count COMPLETED tasks
    by_call: dict[str, int]  # tasks by what anyone did to them since the queue was made: put, take, ack, …
    waiting: dict[str, int]  # CREATED tasks: ready, delayed (due later), parked (by their group, or for a processor)


@dataclass(frozen=True, slots=True)
class QueueHandle:
    """A queue to put into and take from, without a state. Where a task is asked for, a lease or its token will do.

    Every verb raises ``UnknownQueue`` when there is no such queue.
    """

    name: str
    using: str | None = None
    tags: tuple[str, ...] = ()

    def put(self, payload: Any = None, reference: str | None = None, **options: Unpack[PutOptions]) -> Task:
        """Insert a task; the options and errors are those of ``enqueue``."""
        return enqueue(self.name, reference, payload, using=self.using, **options)

    def take(self, timeout: timedelta | None = None, *, group: str | None = None) -> Lease | None:
        """Take the first due task under a lease; None when there is none, or none came within ``timeout``.

        ``group``: of this group of the queue only, without a driver that the setting ``strategy`` names. The attempt is
        charged. A task past its time to live, or whose payload cannot be read, is settled and passed over. The threads
        of one process are served in the order they came. A put's commit wakes them (on SQLite only from the same
        process; otherwise they poll every ``poll_interval``).

        Inside a transaction the lease is rolled back with it, and a thread does not wait for its turn, because it may
        hold locks. It does not wait at all where no new row can become visible: on SQLite, or above READ COMMITTED.
        """
        if timeout is not None:
            check_delay("take(timeout", timeout)
        return self._block(self._poll, timeout, group)

    def wait(self, timeout: timedelta, *, group: str | None = None) -> bool:
        """Wait until a task can be taken; False when none could within ``timeout``. Nothing is taken or changed.

        Another consumer may take the task first. Threads are woken as those in ``take``. ``group``: as there.
        """

        check_delay("wait(timeout", timeout)

        def find(aliases: tuple[str, ...], group: str | None) -> str | None:
            return next((one for one in aliases if leases.is_ready(self.name, one, tags=self.tags, group=group)), None)

        return self._block(find, timeout or None, group, takes=False) is not None

    def ack(self, task: Lease | str, result: Any = None) -> None:
        """Settle as COMPLETED, or as the queue's ``keep`` setting says. Raises ``LeaseLost``."""
        self._settle(task, Complete(result))

    def release(self, task: Lease | str, delay: timedelta | None = None) -> None:
        """Give the task back: uncharged and in its place, or due after ``delay`` with a new budget of attempts.

        Raises ``LeaseLost``.
        """
        if delay is not None:
            return self._settle(task, Reenqueue(delay))
        lease = self._held(task)
        lease.touched = True
        self._port(lease).release(lease)

    def touch(self, task: Lease | str, delta: timedelta) -> None:
        """Extend the lease, and the task's time to live, by ``delta``; ``ValueError`` if negative, or ``LeaseLost``."""
        check_delay("touch(delta", delta)
        if delta:
            lease = self._held(task)
            self._port(lease).touch(lease, delta)

    def bury(self, task: Lease | str | int, reason: str = "") -> bool:
        """Put a task aside, until ``kick``: POISON. By its holder, or by id while it is CREATED, else return False.

        Raises ``LeaseLost`` to the holder.
        """
        if isinstance(task, int):
            return self._one(task, partial(move.change_statuses, verb="cancel", call="bury"), (CREATED,))
        self._settle(task, Poison(reason))
        return True

    def token(self, task: Lease) -> str:
        """Return text that stands for the lease in any process with the same SECRET_KEY. Treat it as a secret."""
        lease = self._held(task)
        return SIGNER.sign_object((lease.port.alias, lease.queue, lease.id, lease.total_attempt))

    def from_token(self, token: str) -> Lease:
        """Return the lease a token stands for. Raises ``LeaseLost`` when it is gone."""
        try:
            alias, queue, *lease = SIGNER.unsign_object(token)
        except (BadSignature, TypeError, ValueError):
            raise TaskQueueError(
                f"{token!r:.80} is not the token of a lease: pass what queue(…).token(lease) returned, unchanged, to a "
                "process with the same SECRET_KEY."
            ) from None
        if queue != self.name or alias not in self._aliases():
            raise TaskQueueError(f"The token is of queue {queue!r} on database {alias!r}, not of {self}.")
        return leases.find_lease(alias, queue, *lease)

    def peek(self, id: int) -> Task | None:
        """Return a task without changing it; None when there is none with this id."""
        return self._tasks(self._only_alias()).filter(pk=id).first()  # type: ignore[return-value]

    def delete(self, id: int) -> bool:
        """Delete a task in any status and count the deletion; its holder gets ``LeaseLost``. False: there is none."""
        return self._one(id, TaskQuerySet.purge, tuple(Status))

    def kick(self, n: int) -> int:
        """Put at most ``n`` buried tasks back in the ready order, the oldest first; return how many."""
        done = 0
        for alias in self._aliases():
            while kicked := self._tasks(alias).kick(min(BATCH_TASKS, n - done)):
                done += kicked
        return done

    def release_all(self) -> int:
        """Make every task that is being processed ready again; the holders get ``LeaseLost``. Return how many."""
        return self._each(TaskQuerySet.release_all, sources("release_all"))

    def truncate(self) -> int:
        """Delete and count all tasks or none; holders get ``LeaseLost``. Tasks put meanwhile stay."""
        with self._atomic():
            return self._each(TaskQuerySet.purge, tuple(Status))

    def tasks_by_status(self, status: str) -> Iterator[Task]:
        """Iterate over the tasks in a status, oldest first, in pages, so that no long transaction is needed."""
        if status not in tuple(Status):
            raise ValueError(f"{status!r} is not a status; they are {', '.join(Status)}.")
        for alias in self._aliases():
            last = 0
            while page := list(self._tasks(alias).filter(status=status, pk__gt=last).order_by("pk")[:BATCH_TASKS]):
                yield from page  # type: ignore[misc]
                last = page[-1].pk

    def statistics(self) -> Statistics:
        """Count tasks by status and calls by name, over all shards.

        Calls are counted when they are committed; those of other processes a few seconds later, and a killed process
        takes its last few seconds with it.
        """
        by_status, by_call, waiting = dict.fromkeys(map(str, Status), 0), Counter[str](), Counter[str]()
        kinds = {kind: Count("pk", filter=Q(status=CREATED) & when) for kind, when in WAITING.items()}
        for alias in self._aliases():
            counts = self._tasks(alias).order_by().values_list("status").annotate(number=Count("pk"), **kinds)
            for status, number, *of_kinds in counts:
                by_status[status] += number
                waiting.update(dict(zip(kinds, of_kinds, strict=True)))
            by_call.update(usage.counter.counted(alias, self.name))
        total = sum(by_status.values()) - by_status[COMPLETED]
        return Statistics({**by_status, "total": total}, dict(by_call), {kind: waiting[kind] for kind in WAITING})

    def create(self, *, if_not_exists: bool = False, **settings: Any) -> Self:
        """Make the queue: a row with these settings as its runtime overrides, known to all processes in a second.

        Raises ``TaskQueueError`` when there is such a queue (with ``if_not_exists`` it stays as it is), and
        ``ImproperlyConfigured`` for a bad setting, or one that says where tasks live.
        """
        where = f"queue({self.name!r}).create()"
        overrides = stored(settings, where=where)
        made = False
        if not conf.is_known(self.name):
            alias = alias_for(self.name, self.using)
            _, made = Queue.objects.using(alias).get_or_create(name=self.name, defaults={"overrides": overrides})
        if not made and not if_not_exists:
            raise TaskQueueError(
                f"{where}: there is a queue {self.name!r}. Pass if_not_exists=True to use it as it is, or change the "
                "overrides of its row."
            )
        return self

    def drop(self) -> int:
        """Delete the queue's tasks, counters and row; return the number of tasks. All or nothing.

        Raises ``TaskQueueError`` while there are live leases, or threads of this process inside ``take``; those of
        others get ``UnknownQueue``. A queue in ``DBTASKQUEUE`` or with a processor remains known, empty.
        """
        aliases = self._aliases()
        if number := blocking.waiters(self.name, aliases):
            raise TaskQueueError(f"Queue {self.name!r} cannot be dropped: {number} threads are waiting in take().")
        dropped = 0
        with self._atomic():
            for alias in aliases:
                self._lock(alias)
                dropped += self._each(TaskQuerySet.purge, tuple(Status), (alias,))
                Queue.objects.using(alias).filter(pk=self.name).delete()
                MinuteCount.objects.using(alias).filter(kind=CALL, queue=self.name).delete()
                for model in (UsedReference, Limit):
                    model._default_manager.using(alias).filter(queue=self.name).delete()
                transaction.on_commit(partial(usage.discard, alias, self.name), alias)
        return dropped

    def _lock(self, alias: str) -> None:
        """Lock the queue and all its tasks, so that no task can be taken, or raise for a live lease."""
        list(Queue.objects.using(alias).select_for_update().filter(pk=self.name))
        tasks = self._tasks(alias)
        rows = with_row_locks(tasks, wait=True).values_list("queue", "group_key")
        lock_in_order(Session(connections[alias], tasks.model), lambda: list(rows.all()), groups_of)
        if live := tasks.filter(status=PROCESSING, next_process_time__gt=Now()).count():
            raise TaskQueueError(
                f"Queue {self.name!r} cannot be dropped: {live} tasks are being processed. Wait for them, or call "
                "release_all() first; their holders then get LeaseLost."
            )

    def _aliases(self) -> tuple[str, ...]:
        """Return the databases of the queue; raise ``UnknownQueue`` when there is none."""
        aliases = aliases_of(self.name, self.using)
        overridden_settings(self.name, aliases[0])
        return aliases

    def _only_alias(self) -> str:
        self._aliases()
        return only_alias(self.name, self.using)

    def _tasks(self, alias: str) -> TaskQuerySet:
        return tasks_on(alias, model_for(self.name)).filter(queue=self.name)

    def _atomic(self) -> ExitStack:
        stack = ExitStack()
        for alias in self._aliases():
            stack.enter_context(transaction.atomic(using=alias))
        return stack

    def _one(self, id: int, verb: Verb, statuses: Iterable[Status]) -> bool:
        return bool(verb(self._tasks(self._only_alias()).filter(pk=id, status__in=statuses)))

    def _each(self, verb: Verb, statuses: Iterable[Status], aliases: Iterable[str] = ()) -> int:
        """Run a verb over all tasks in some statuses, in portions; return how many were changed."""
        done = 0
        for alias in aliases or self._aliases():
            tasks = self._tasks(alias).filter(status__in=statuses)
            ids = list(tasks.order_by("pk").values_list("pk", flat=True))
            for start in range(0, len(ids), BATCH_TASKS):
                done += verb(tasks.filter(pk__in=ids[start : start + BATCH_TASKS]))
        return done

    def _block(
        self,
        poll: Callable[[tuple[str, ...], str | None], T | None],
        timeout: timedelta | None,
        group: str | None,
        *,
        takes: bool = True,
    ) -> T | None:
        if group is not None:
            checked_text("group", group)
        until = None if timeout is None else clock.monotonic() + timeout.total_seconds()
        aliases = self._aliases()
        inside = any(connections[alias].in_atomic_block for alias in aliases)
        if inside and not all(_sees_news(alias) for alias in aliases):
            until = None
        key = blocking.WaitKey(self.name, aliases, self.tags, group, takes)
        pause = partial(self._pause, aliases)
        return blocking.take_waiting(key, partial(poll, aliases, group), until, pause, alone=inside)

    def _poll(self, aliases: tuple[str, ...], group: str | None) -> Lease | None:
        for alias in random.sample(aliases, len(aliases)):
            port, instance = leases.port_of(ManualSettlePort, self.name, alias), _instance(os.getpid())
            if taken := leases.take(self.name, port, poller_instance=instance, tags=self.tags, group=group, go_on=True):
                return taken[0]
            if (now := clock.monotonic()) >= _next_rescue.get((alias, self.name), 0.0):
                if len(_next_rescue) >= MAX_REMEMBERED_QUEUES:
                    _next_rescue.clear()
                _next_rescue[alias, self.name] = now + RESCUE_INTERVAL_S
                rescue(port.session, self.name, port)  # no checkout takes a task that died on its last attempt
        return None

    def _pause(self, aliases: tuple[str, ...]) -> float:
        """Return the seconds until the next poll when no wake-up comes."""
        settings = overridden_settings(self.name, aliases[0])
        seconds = min(settings.poll_interval, settings.lease / 10).total_seconds() * random.uniform(0.8, 1.2)
        due = [wait for alias in aliases if (wait := leases.seconds_until_due(self.name, alias)) is not None]
        return min([seconds, *[max(0.0, wait) + 0.001 for wait in due]])

    def _held(self, task: Lease | str) -> Lease:
        if isinstance(task, str):
            return self.from_token(task)
        if not isinstance(task, Lease):
            raise TypeError(f"{task!r:.80} is neither a lease, as take() returns it, nor the token of one.")
        if task.queue != self.name:
            raise TaskQueueError(f"Task {task.id} is of queue {task.queue!r}, not of {self.name!r}.")
        return task

    def _port(self, lease: Lease) -> ManualSettlePort:
        port = lease.port
        return port if isinstance(port, ManualSettlePort) else leases.port_of(ManualSettlePort, self.name, port.alias)

    def _settle(self, task: Lease | str, outcome: Outcome) -> None:
        lease = self._held(task)
        lease.touched = True
        self._port(lease).settle(lease, outcome)


@lru_cache(maxsize=1)
def _instance(pid: int) -> str:
    """Return the instance name under which this process takes tasks; a fork gets another one."""
    return f"{socket.gethostname()}:{pid}:pull-{uuid4().hex[:12]}"[-200:]


def _sees_news(alias: str) -> bool:
    """Whether something committed by others can become visible in the current transaction."""
    if not connections[alias].in_atomic_block:
        return True
    session = Session.on(alias)
    return session.postgresql and bool(session.run("SHOW transaction_isolation", {})[0][0] == "read committed")
