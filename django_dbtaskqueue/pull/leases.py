"""The leases of the pull API: their checkout and their port."""

import json
import random
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

from django_dbtaskqueue import registry
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.conf.overrides import overridden_settings
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import LeaseLost
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Release
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, aliases_of, model_for
from django_dbtaskqueue.flow import checkout as stage, observe, settle
from django_dbtaskqueue.flow.checkout import QueueShare, ScanCursor
from django_dbtaskqueue.flow.groups import Limiter
from django_dbtaskqueue.flow.port import SettlePort
from django_dbtaskqueue.flow.run import Processor, decode_task, expiry

P = TypeVar("P", bound=SettlePort)
OVERRIDDEN = ("retry", "reenqueue")  # settings that win over the processor's, if they were set while running


class PullPort(SettlePort):
    """The port of a lease that code took without a poller. It logs the lives of tasks, if their queue says so."""

    def _settle(self, session: Session, pairs: Sequence[settle.Decided]) -> None:
        try:
            super()._settle(session, pairs)
        except LeaseLost:
            for lease, settlement in [pair for pair in pairs if pair[0].lost]:
                observe.ended(lease, lease.result_of(settlement), by_code=True)
            raise
        for lease, settlement in pairs if self.log_level else ():
            notify.on_commit(session.connection, partial(observe.ended, lease, settlement, by_code=True))


class ManualSettlePort(PullPort):
    """The port of a lease that the pull API took: its calls are counted by the names of its verbs."""

    calls: ClassVar[Mapping[str, str]] = {"retry": "fail", "reenqueue": "release", "poison": "bury"}

    def release(self, lease: Lease) -> None:
        """Give the task back uncharged, in its place, or raise ``LeaseLost``."""
        session = self.session
        self._settle(session, [(lease, Release())])
        notify.wake_after_commit(session.connection, lease.queue)


def port_of(kind: type[P], queue: str, alias: str) -> P:
    """Return a port of a queue on one database."""
    port, settings = kind(alias, model_for(queue), key=queue), overridden_settings(queue, alias)
    default = conf.default_settings(queue)
    port.follow(settings, {name for name in OVERRIDDEN if getattr(settings, name) is not getattr(default, name)})
    return port


def checkout(queue: str, *, limit: int = 1, using: str | None = None, **options: Any) -> list[Lease]:
    """Take at most ``limit`` due tasks under a lease; see ``TaskManager.checkout``.

    A task whose payload cannot be decoded is settled as ERROR at once and left out.
    """
    if limit < 1:
        return []
    for alias in random.sample(aliases := aliases_of(queue, using), len(aliases)):
        if taken := take(queue, port_of(PullPort, queue, alias), limit=limit, **options):
            return taken
    return []


def take(
    queue: str,
    port: PullPort,
    *,
    poller_instance: str,
    limit: int = 1,
    lease: timedelta | None = None,
    tags: Sequence[str] = (),
    group: str | None = None,
    go_on: bool = False,
) -> list[Lease]:
    """Take the first due tasks on the port's database; settle those that cannot be processed, and leave them out.

    ``group``: of one group only. ``go_on``: take others when all were left out, to the end of the queue.
    """
    settings, session = overridden_settings(queue, port.alias), port.session
    strategy = stage.strategy_for(session, settings.strategy) if group is None else stage.FromGroup(group)
    due, limiter = stage.Checkout(session, poller_instance, lease or settings.lease, tags), Limiter.of(queue, settings)
    while True:
        cursor = ScanCursor(queue, settings.max_wait)
        taken = due.take([QueueShare(cursor, limit, port=port, strategy=strategy, limiter=limiter)], limit)
        if port.log_level:
            for task in taken:
                task.begun = clock.monotonic()
            notify.on_commit(session.connection, partial(observe.taken, taken))
        fitting = [task for task in taken if _fit(task, settings)]
        if fitting or not (go_on if taken else limiter and limiter.put_off):  # behind groups that must wait are others
            return fitting


def is_ready(queue: str, alias: str, *, tags: Sequence[str], group: str | None) -> bool:
    """Whether a task can be taken now, of the queue or of one of its groups."""
    session, limiter = Session.on(alias, model_for(queue)), Limiter.of(queue, overridden_settings(queue, alias))
    params = {"queue_name": queue, "tags": session.sql.dialect.array(tags), "limit": 1}
    return bool(stage.first_ready(session, params, group)) and (limiter is None or limiter.allows_one(session))


def seconds_until_due(queue: str, alias: str) -> float | None:
    """Return the seconds until the next task that is scheduled for later becomes due; None when there is none."""
    session = Session.on(alias, model_for(queue))
    found = session.run(session.sql.priorities, {"queue_name": queue}) if session.postgresql else ()
    return stage.next_due(session, {queue: [priority for (priority,) in found]}).get(queue)


def find_lease(alias: str, queue: str, task_id: int, total_attempt: int) -> Lease:
    """Return the lease that a token names; raise ``LeaseLost`` when it is gone."""
    port = port_of(ManualSettlePort, queue, alias)
    rows = json.dumps([{"task_id": task_id, "token": total_attempt}])
    if not (found := port.session.run(port.session.sql.held_leases, {"rows": rows})):
        raise LeaseLost(task_id, total_attempt, "from_token")
    *columns, left = found[0]
    (task,) = stage.leases([tuple(columns)], port, clock.monotonic() + left)
    decode_task(task, _processor(task, overridden_settings(queue, alias)))
    return task


def _fit(task: Lease, settings: conf.QueueSettings) -> bool:
    """Decode a task. Settle one that is expired or cannot be decoded, and return False."""
    processor = _processor(task, settings)
    if (refused := expiry(task, settings.expired) or decode_task(task, processor)) is not None:
        task.port.settle(task, refused)
    return refused is None


def _processor(task: Lease, settings: conf.QueueSettings) -> Processor:
    """Return the processor of the task, for the type of the payload and the retry policy."""
    return registry.find(task.queue, task.payload_type) or Processor(task.queue, lambda _: None, policy=settings.retry)
