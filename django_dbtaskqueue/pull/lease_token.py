"""The lease of a task that the pull API took: its port counts each call, and a token stands for it as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import NamedTuple

from django.core.signing import BadSignature, Signer

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core.exceptions import LeaseLost, TaskQueueError
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, facts
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session, model_for
from django_dbtaskqueue.flow import checkout, settle, usage
from django_dbtaskqueue.flow.settle import SettlePort

SIGNER = Signer(salt="django_dbtaskqueue.lease")


class ManualSettlePort(SettlePort):
    """The port of a lease that the pull API took: each call is counted, and sent as a signal."""

    @classmethod
    def of(cls, queue: str, alias: str, settings: conf.QueueSettings) -> ManualSettlePort:
        """Return the port of a queue with these settings."""
        port = cls(alias, model_for(queue), key=queue, keep=settings.keep, group_retry=settings.group_retry)
        if settings.reenqueue is not conf.default_settings(queue).reenqueue:
            port.reenqueue = settings.reenqueue
        return port

    def settle_all(self, pairs: Sequence[tuple[Lease, Outcome]]) -> None:
        """Write outcomes of one queue in one transaction, or none."""
        super().settle_all(pairs)
        for lease, outcome in pairs:
            self.tell(lease, facts(outcome).call)

    def touch(self, lease: Lease, delta: timedelta) -> None:
        """Extend the lease, and the time to live if there is one, or raise ``LeaseLost``."""
        super().touch(lease, delta)
        self.tell(lease, "touch")

    def release(self, lease: Lease) -> None:
        """Give the task back uncharged, in its place, or raise ``LeaseLost``."""
        session = Session.on(self.alias, self.model)
        if lease.id not in settle.release(session, [lease]):
            raise LeaseLost(lease.id, lease.total_attempt, "release")
        notify.after_commit(session.connection, lease.queue)
        self.tell(lease, "release")

    def expire(self, lease: Lease, outcome: Outcome) -> None:
        """Settle a task that was taken past its time to live."""
        super().settle_all([(lease, outcome)])
        self.tell(lease, "ttl")

    def tell(self, lease: Lease, call: str) -> None:
        """Count a call and tell of it, once it is committed."""
        usage.after_commit(Session.on(self.alias).connection, lease.queue, call, 1, (lease.id,))


class Token(NamedTuple):
    """A lease as text can hold it."""

    alias: str
    queue: str
    id: int
    total_attempt: int


def token(lease: Lease) -> str:
    """Return text that stands for the lease, signed with the site's SECRET_KEY: who has it holds the lease."""
    return SIGNER.sign_object(Token(lease.port.alias, lease.queue, lease.id, lease.total_attempt))


def read_token(text: str) -> Token:
    """Return what ``token`` put into the text; raise ``TaskQueueError`` for any other text."""
    try:
        return Token(*SIGNER.unsign_object(text))
    except (BadSignature, TypeError, ValueError):
        raise TaskQueueError(
            f"{text!r:.80} is no token of a lease: pass what queue(…).token(lease) returned, unchanged, to a process "
            "with the same SECRET_KEY."
        ) from None


def lease_of(held: Token, port: ManualSettlePort) -> Lease:
    """Return the lease a token stands for, its payload still text; raise ``LeaseLost`` when it is gone."""
    session = Session.on(port.alias, port.model)
    rows = json.dumps([{"task_id": held.id, "token": held.total_attempt}])
    found = session.run(session.sql.standing, {"rows": rows})
    if not found:
        raise LeaseLost(held.id, held.total_attempt, "from_token")
    *columns, left = found[0]
    (lease,) = checkout.leases([tuple(columns)], port, monotonic() + left)
    return lease
