"""Checkout by hand, for people who bring their own loop."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django_dbtaskqueue import conf, registry
from django_dbtaskqueue.flow import checkout as stage
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.flow.process import Processor, expiry, prepare
from django_dbtaskqueue.flow.settle import SettleDoor
from django_dbtaskqueue.lease import Lease
from django_dbtaskqueue.session import Session


def checkout(
    queue: str,
    *,
    poller_instance: str,
    limit: int = 1,
    lease: timedelta | None = None,
    tags: Sequence[str] = (),
    using: str | None = None,
) -> list[Lease]:
    """Take at most ``limit`` due tasks under a lease; see ``TaskManager.checkout``.

    A task whose payload cannot be decoded is settled as ERROR at once and left out.
    """
    if limit < 1:
        return []
    session = Session.of(queue, using)
    alias = session.connection.alias
    settings = queue_settings(queue, alias)
    door = SettleDoor(alias, session.model, keep=settings.keep, group_retry=settings.group_retry)
    taken = stage.take(
        session,
        stage.Line(queue, settings.max_wait),
        strategy=stage.strategy_for(session, settings.strategy),
        poller_instance=poller_instance,
        limit=limit,
        lease=lease or settings.lease,
        door=door,
        tags=tags,
    )
    return [task for task in taken if _live(task, settings) and _readable(task, settings)]


def _live(task: Lease, settings: conf.QueueSettings) -> bool:
    expired = expiry(task, settings.expired)
    if expired is not None:
        task.door.settle(task, expired)
    return expired is None


def _readable(task: Lease, settings: conf.QueueSettings) -> bool:
    known = registry.find(task.queue, task.payload_type)
    unreadable = prepare(task, known or Processor(task.queue, lambda _: None, policy=settings.retry))
    if unreadable is not None:
        task.door.settle(task, unreadable)
    return unreadable is None
