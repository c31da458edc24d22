"""Placement: which database a task goes to, and whether its queue has room for it.

A queue with shards is spread over several databases; a task stays where it was enqueued. A queue with a capacity holds
at most that many live tasks. The limit is exact, by a lock on the queue's row: producers of such a queue take turns
until they commit. A queue without a capacity pays nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any, TypeVar
from zlib import crc32

from django.db import connections
from django.db.utils import InterfaceError, OperationalError
from django.utils.module_loading import import_string

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core.exceptions import EnqueueError, QueueFull
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Queue

logger = logging.getLogger(__name__)
T = TypeVar("T")
CAPACITY_POLL_INTERVAL_S = 0.05
_turn = [0]


def route(settings: QueueSettings, reference: str | None, payload: Any) -> str:
    """Return the shard of a task: the router's word, else the reference's hash, else each in turn."""
    shards = settings.shards
    if settings.router is not None:
        router = import_string(settings.router) if isinstance(settings.router, str) else settings.router
        chosen = router(reference, payload, tuple(shards))
        if chosen not in shards:
            raise EnqueueError(f"router returned {chosen!r}, which is not one of the shards {', '.join(shards)}.")
        return str(chosen)
    if reference is None:
        _turn[0] += 1
        return shards[_turn[0] % len(shards)]
    return shards[crc32(reference.encode()) % len(shards)]


def with_fail_over(chosen: str, shards: Sequence[str], insert: Callable[[str], T]) -> T:
    """Run ``insert(alias)`` on the chosen shard, or on the next one if that is down and holds no transaction."""
    start = list(shards).index(chosen)
    candidates = [*shards[start:], *shards[:start]]
    for alias in candidates[:-1]:
        try:
            return insert(alias)
        except (OperationalError, InterfaceError) as error:
            if connections[alias].in_atomic_block:
                raise
            connections[alias].close()
            logger.warning("Shard %s is down, enqueueing on the next one: %s", alias, error)
    return insert(candidates[-1])


@contextmanager
def free_capacity(
    session: Session, queue: str, capacity: int | None, wanted: int, timeout: timedelta | None
) -> Iterator[None]:
    """Give ``wanted`` places in the queue to the block, or raise ``QueueFull`` after ``timeout``.

    Inside a SQLite transaction no room can appear, so it is raised at once.
    """
    if capacity is None:
        yield
        return
    can_wait = session.postgresql or not session.connection.in_atomic_block
    deadline = monotonic() + (timeout.total_seconds() if timeout is not None and can_wait else 0.0)
    while True:
        try:
            with session.atomic():
                _claim(session, queue, capacity, wanted)
                yield
                return
        except QueueFull:
            if monotonic() >= deadline:
                raise
        threading.Event().wait(CAPACITY_POLL_INTERVAL_S)  # without the lock, so that others can settle


def _claim(session: Session, queue: str, capacity: int, wanted: int) -> None:
    """Lock the queue's row and count what is live; raise ``QueueFull`` when there is not enough room."""
    alias = session.connection.alias
    session.run(session.sql.make_queue, {"queue_name": queue})
    Queue.objects.using(alias).select_for_update().get(pk=queue)
    for sql in (session.sql.live, session.sql.live_unexpired):  # the second reads more, and is rarely needed
        live = session.run(sql, {"queue_name": queue, "limit": capacity + 1})[0][0]
        if live + wanted <= capacity:
            return
    raise QueueFull(queue, capacity)
