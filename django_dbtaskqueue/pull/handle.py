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

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, TypeVar, Unpack
from uuid import uuid4

from django.db import connections

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import queue_settings
from django_dbtaskqueue.core.columns import PutOptions
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Outcome, Poison, Reenqueue
from django_dbtaskqueue.core.states import CREATED
from django_dbtaskqueue.flow import move
from django_dbtaskqueue.flow.enqueue import checked_text, enqueue
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.pull import blocking, leases
from django_dbtaskqueue.pull.leases import ManualSettlePort
from django_dbtaskqueue.pull.queue_admin import QueueAdmin

__all__ = ["QueueHandle"]

T = TypeVar("T")

RESCUE_INTERVAL_S = 5.0  # between two rescues of one queue in one process
MAX_REMEMBERED_QUEUES = 4096
POLL_JITTER = (0.8, 1.2)
_next_rescue: dict[tuple[str, str], float] = {}


def queue(name: str, *, using: str | None = None, tags: Sequence[str] = ()) -> QueueHandle:
    """Return the handle of a queue, which need not exist yet. Cheap: nothing is read.

    ``using``: one database, of a queue with shards one shard. ``tags``: take tasks with these tags, too. Raises
    ``ImproperlyConfigured`` for a name no queue can have.
    """
    return QueueHandle(conf.valid_name(name), using, tuple(sorted(set(tags))))


@dataclass(frozen=True, slots=True)
class QueueHandle(QueueAdmin):
    """A queue to put into and take from. A handle has no state and may be shared between threads.

    Every verb raises ``UnknownQueue`` when there is no such queue. Where a task is asked for, a lease or its token
    will do.
    """

    tags: tuple[str, ...] = ()

    def put(self, payload: Any = None, reference: str | None = None, **options: Unpack[PutOptions]) -> Task:
        """Insert a task; the options and errors are those of ``enqueue``."""
        return enqueue(self.name, reference, payload, using=self.using, **options)

    def take(self, timeout: timedelta | None = None, *, group: str | None = None) -> Lease | None:
        """Take the first due task under a lease; None when there is none, or none came within ``timeout``.

        ``group``: of this group of the queue only. A driver that the setting ``strategy`` names is not asked then.

        The attempt is charged. A task past its time to live, or whose payload cannot be read, is settled and passed
        over. The threads of one process are served in the order they came; between processes the database decides.
        A waiting thread is woken by the put's commit (on SQLite only from the same process; otherwise it polls
        every ``poll_interval``).

        Inside a transaction the lease is the transaction's: rolled back with it. A thread in it does not wait for
        its turn, because it may hold locks that others wait for. Where no new row can become visible in the transaction
        (on SQLite, or when it is stricter than READ COMMITTED) ``take`` does not wait. ``touch`` extends the lease.
        """
        return self._block(self._poll, None if timeout is None else _checked("timeout", timeout), group)

    def wait(self, timeout: timedelta, *, group: str | None = None) -> bool:
        """Wait until a task can be taken; False when none could within ``timeout``. Nothing is taken or changed.

        Another consumer may take the task first: ``take`` may still find nothing. The threads of one process that wait
        share one poll of the database; they are woken as those in ``take``. ``group``: as in ``take``.
        """
        return self._block(self._find, _checked("timeout", timeout) or None, group, takes=False) is not None

    def ack(self, task: Lease | str, result: Any = None) -> None:
        """Settle as COMPLETED, or as the queue's ``keep`` setting says. Raises ``LeaseLost``."""
        self._settle(task, Complete(result))

    def release(self, task: Lease | str, delay: timedelta | None = None) -> None:
        """Give the task back: uncharged and in its place, or due after ``delay`` with a new budget of attempts.

        Raises ``LeaseLost``.
        """
        if delay is not None:
            return self._settle(task, Reenqueue(_checked("delay", delay)))
        lease = self._held(task)
        lease.touched = True
        self._port(lease).release(lease)

    def touch(self, task: Lease | str, delta: timedelta) -> None:
        """Extend the lease, and the task's time to live if it has one, by ``delta``; zero is a no-op.

        Raises ``TypeError`` for None, ``ValueError`` for a negative delta, ``LeaseLost``.
        """
        if _checked("delta", delta):
            lease = self._held(task)
            self._port(lease).touch(lease, delta)

    def bury(self, task: Lease | str | int, reason: str = "") -> bool:
        """Put a task aside, until ``kick``: POISON. By its holder, or by id while it is CREATED.

        Returns whether it was changed: by id, a task in any other status is not. Raises ``LeaseLost`` to the holder.
        """
        if isinstance(task, int):
            return self._one(task, partial(move.change, verb="cancel", call="bury"), (CREATED,))
        self._settle(task, Poison(reason))
        return True

    def token(self, task: Lease) -> str:
        """Return text that stands for the lease in any process with the same SECRET_KEY. Treat it as a secret."""
        lease = self._held(task)
        held = leases.Token(lease.port.alias, lease.queue, lease.id, lease.total_attempt)
        return leases.SIGNER.sign_object(held)

    def from_token(self, token: str) -> Lease:
        """Return the lease a token stands for. Raises ``LeaseLost`` when it is gone."""
        held = leases.read_token(token)
        if held.queue != self.name or held.alias not in self._aliases():
            raise TaskQueueError(f"The token is of queue {held.queue!r} on database {held.alias!r}, not of {self}.")
        return leases.resume(held)

    def peek(self, id: int) -> Task | None:
        """Return a task without changing it; None when there is none with this id."""
        return self._tasks(self._only_alias()).filter(pk=id).first()  # type: ignore[return-value]

    # -- what the verbs are made of ----------------------------------------------------------------------------------

    def _block(
        self,
        poll: Callable[[tuple[str, ...], str | None], T | None],
        timeout: timedelta | None,
        group: str | None,
        *,
        takes: bool = True,
    ) -> T | None:
        """Poll until something is found or the time is over."""
        if group is not None:
            checked_text("group", group)
        until = None if timeout is None else clock.monotonic() + timeout.total_seconds()
        aliases = self._aliases()
        inside = any(connections[alias].in_atomic_block for alias in aliases)
        if inside and not all(_sees_news(alias) for alias in aliases):
            until = None
        key = blocking.WaitKey(self.name, aliases, self.tags, group, takes)
        pause = partial(self._pause, aliases)
        return blocking.take(key, partial(poll, aliases, group), until, pause, alone=inside)

    def _find(self, aliases: tuple[str, ...], group: str | None) -> str | None:
        """Return the first database with a task that can be taken."""
        return next((one for one in aliases if leases.is_ready(self.name, one, tags=self.tags, group=group)), None)

    def _poll(self, aliases: tuple[str, ...], group: str | None) -> Lease | None:
        """Poll once; on a queue with shards each shard, in random order."""
        for alias in random.sample(aliases, len(aliases)):
            instance = _instance(os.getpid())
            if task := leases.take_one(self.name, alias, poller_instance=instance, tags=self.tags, group=group):
                return task
            if (now := clock.monotonic()) >= _next_rescue.get((alias, self.name), 0.0):
                if len(_next_rescue) >= MAX_REMEMBERED_QUEUES:
                    _next_rescue.clear()
                _next_rescue[alias, self.name] = now + RESCUE_INTERVAL_S
                leases.rescue_exhausted(self.name, alias)
        return None

    def _pause(self, aliases: tuple[str, ...]) -> float:
        """Return the seconds until the next poll when no wake-up comes."""
        settings = queue_settings(self.name, aliases[0])
        seconds = min(settings.poll_interval, settings.lease / 10).total_seconds() * random.uniform(*POLL_JITTER)
        due = [wait for alias in aliases if (wait := leases.next_due(self.name, alias)) is not None]
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
        return port if isinstance(port, ManualSettlePort) else ManualSettlePort.of(self.name, port.alias)

    def _settle(self, task: Lease | str, outcome: Outcome) -> None:
        lease = self._held(task)
        lease.touched = True
        self._port(lease).settle(lease, outcome)


@lru_cache(maxsize=1)
def _instance(pid: int) -> str:
    """Return the instance name under which this process takes tasks; a fork gets another one."""
    return f"{socket.gethostname()}:{pid}:pull-{uuid4().hex[:12]}"[-200:]


def _checked(name: str, value: Any) -> timedelta:
    if not isinstance(value, timedelta):
        raise TypeError(f"{name}={value!r} must be a timedelta, e.g. timedelta(seconds=30).")
    if value < timedelta(0):
        raise ValueError(f"{name}={value!r} must not be negative.")
    return value


def _sees_news(alias: str) -> bool:
    """Whether something committed by others can become visible in the current transaction."""
    connection = connections[alias]
    if not connection.in_atomic_block:
        return True
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        return bool(cursor.fetchone()[0] == "read committed")
