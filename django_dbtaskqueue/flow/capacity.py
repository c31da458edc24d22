"""Capacity: a queue that holds no more than so many live tasks.

Exact, by a lock on the queue's row: producers of a queue with a capacity take turns until they commit. That is its
price; a queue without one pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic

from django_dbtaskqueue.core.exceptions import QueueFull
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Queue

LOOK = 0.05  # seconds between two looks for room


@contextmanager
def room(session: Session, queue: str, capacity: int | None, wanted: int, timeout: timedelta | None) -> Iterator[None]:
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
        threading.Event().wait(LOOK)  # the savepoint is rolled back, so others can settle meanwhile


def _claim(session: Session, queue: str, capacity: int, wanted: int) -> None:
    """Lock the queue's row and count what is live; raise ``QueueFull`` when there is not enough room."""
    alias = session.connection.alias
    Queue.objects.using(alias).bulk_create([Queue(name=queue)], ignore_conflicts=True)
    Queue.objects.using(alias).select_for_update().get(pk=queue)
    live = session.run(session.sql.live, {"queue_name": queue, "limit": capacity + 1})[0][0]
    if live + wanted > capacity:
        raise QueueFull(queue, capacity)
