"""Checkout by hand, for people who bring their own loop."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.states import Status
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import checkout as stage
from django_dbtaskqueue.flow import usage
from django_dbtaskqueue.flow.enqueue import queue_settings
from django_dbtaskqueue.flow.rescue import rescue
from django_dbtaskqueue.flow.run import Processor, expiry, prepare
from django_dbtaskqueue.flow.scan import ScanCursor
from django_dbtaskqueue.flow.settle import SettlePort
from django_dbtaskqueue.pull.lease_token import ManualSettlePort, Token, lease_of

HEADS = 50  # tasks at the head of the line that are looked through for expired leases


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
    port = SettlePort(alias, session.model, keep=settings.keep, group_retry=settings.group_retry)
    taken = stage.take(
        session,
        ScanCursor(queue, settings.max_wait),
        strategy=stage.strategy_for(session, settings.strategy),
        poller_instance=poller_instance,
        limit=limit,
        lease=lease or settings.lease,
        port=port,
        tags=tags,
    )
    return [task for task in taken if _fit(task, settings)]


def take_one(queue: str, alias: str, *, poller_instance: str, tags: Sequence[str] = ()) -> Lease | None:
    """Take the first due task that is fit to be processed, or None; settle and pass over those that are not.

    Also ends what nobody else would where no poller runs: tasks whose holder died on their last attempt.
    """
    settings = queue_settings(queue, alias)
    port = ManualSettlePort.of(queue, alias, settings)
    session = Session.on(alias, port.model)
    while True:
        dead = _dead(session, queue) if usage.watched() else {}
        taken = stage.take(
            session,
            ScanCursor(queue, settings.max_wait),
            strategy=stage.strategy_for(session, settings.strategy),
            poller_instance=poller_instance,
            limit=1,
            lease=settings.lease,
            port=port,
            tags=tags,
        )
        if not taken:
            return None
        (task,) = taken
        if dead.get(task.id) == task.total_attempt - 1:
            port.tell(task, "lease_expired")
        port.tell(task, "take")
        if _fit(task, settings):
            return task


def next_due(queue: str, alias: str) -> float | None:
    """Return the seconds until the next task that is scheduled for later becomes due; None when there is none."""
    session = Session.of(queue, alias)
    params: dict[str, Any] = {"queue_name": queue}
    if session.postgresql:
        params["priorities"] = [priority for (priority,) in session.run(session.sql.priorities, params)]
    seconds: float | None = session.run(session.sql.next_due, params)[0][0]
    return seconds


def rescue_exhausted(queue: str, alias: str) -> None:
    """Write ERROR for tasks whose holder died on their last attempt: no checkout will take them again."""
    settings = queue_settings(queue, alias)
    port = ManualSettlePort.of(queue, alias, settings)
    for task, _ in rescue(Session.on(alias, port.model), queue, port, keep=settings.keep):
        port.tell(task, "lease_expired")


def _dead(session: Session, queue: str) -> dict[int, int]:
    """Return the tasks at the head of the line whose lease ran out, and the token it had."""
    due = session.model._default_manager.using(session.connection.alias).filter(queue=queue).due()
    heads = due.values_list("pk", "status", "total_attempt")[:HEADS]
    return {task_id: total for task_id, status, total in heads if status == Status.PROCESSING}


def resume(held: Token) -> Lease:
    """Return the lease that a token stands for, as its holder had it; raise ``LeaseLost`` when it is gone."""
    settings = queue_settings(held.queue, held.alias)
    task = lease_of(held, ManualSettlePort.of(held.queue, held.alias, settings))
    prepare(task, _processor(task, settings))
    return task


def _fit(task: Lease, settings: conf.QueueSettings) -> bool:
    """Decode a task. Settle one that is expired or cannot be decoded, and return False."""
    processor, port = _processor(task, settings), task.port
    expired = expiry(task, settings.expired)
    if expired is not None:
        (port.expire if isinstance(port, ManualSettlePort) else port.settle)(task, expired)
        return False
    unreadable = prepare(task, processor)
    if unreadable is not None:
        port.settle(task, unreadable)
    return unreadable is None


def _processor(task: Lease, settings: conf.QueueSettings) -> Processor:
    """Return who would process the task, for the payload's type and the retries."""
    if settings.retry is not conf.default_settings(task.queue).retry:
        task.policy = settings.retry  # the runtime override goes before what the processor declares
    known = registry.find(task.queue, task.payload_type)
    return known or Processor(task.queue, lambda _: None, policy=settings.retry)
