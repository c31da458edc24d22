"""The port through which a processor settles by itself."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import transaction

from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Outcome, Settlement, facts
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.decide import decide
from django_dbtaskqueue.flow.settle import resolve, settle
from django_dbtaskqueue.models import AbstractTask, Task


class SettlePort:
    """Settles on the calling thread's Django connection, in the transaction of that thread."""

    def __init__(
        self,
        alias: str,
        model: type[AbstractTask] = Task,
        *,
        key: str = "",
        keep: str = "keep",
        group_retry: str = "hold",
    ) -> None:
        self.alias = alias
        self.key = key
        self.model = model
        self.keep = keep
        self.group_retry = group_retry
        self.reenqueue: Any = None

    def time(self, text: str) -> datetime:
        """Return a time as the database wrote it, as the site's models would show it."""
        return Session.on(self.alias, self.model).time(text)

    def settle(self, lease: Lease, outcome: Outcome) -> None:
        """Write one outcome, or raise ``LeaseLost``; ``ReenqueueDelayMissing`` when nothing says when it is due."""
        self.settle_all([(lease, outcome)])

    def settle_last(self, lease: Lease, outcome: Outcome) -> None:
        """``settle`` as the last act of the calling thread's outermost transaction."""
        session = Session.on(self.alias, self.model)
        session.ends = True
        self._settle(session, [(lease, decide(lease, outcome))])

    def settle_all(self, pairs: Sequence[tuple[Lease, Outcome]]) -> None:
        """Write outcomes of one queue in one transaction, or none and raise as ``settle`` does."""
        session = Session.on(self.alias, self.model)
        decided = [(lease, decide(lease, outcome)) for lease, outcome in pairs]
        if len(decided) == 1:
            self._settle(session, decided)
            return
        with transaction.atomic(using=self.alias, savepoint=False):
            self._settle(session, decided)

    def _settle(self, session: Session, pairs: Sequence[tuple[Lease, Settlement]]) -> None:
        settled = settle(session, pairs, keep=self.keep, group_retry=self.group_retry)
        for lease, outcome in pairs:
            if lease.id not in settled:
                raise lease.gone(facts(outcome).verb)
        for lease, outcome in pairs:
            lease.outcome = outcome
        notify.on_commit(session.connection, partial(_settled, pairs))
        if any(lease.group is not None or facts(outcome).wakes for lease, outcome in pairs):
            notify.after_commit(session.connection, pairs[0][0].queue)

    def stands(self, lease: Lease) -> bool:
        """Whether the lease is neither settled nor lost, as the calling thread's transaction sees it."""
        return lease.id in resolve(Session.on(self.alias, self.model), [lease])[1]

    def touch(self, lease: Lease, delta: timedelta) -> None:
        """Extend the lease by ``delta``, or raise ``LeaseLost``."""
        session = Session.on(self.alias, self.model)
        seconds = delta.total_seconds()
        rows = session.run(session.sql.touch, {"id": lease.id, "total_attempt": lease.total_attempt, "delta": seconds})
        if not rows:
            raise lease.gone("touch")
        lease.until_text = str(rows[0][0])
        lease.deadline += seconds

    def report_progress(self, lease: Lease, done: float, note: str) -> None:
        """Store progress in ``process_result``, or raise ``LeaseLost``."""
        session = Session.on(self.alias, self.model)
        text = json_payload.cut_bytes(json_payload.clean_text(f"{done:.0%} {note}".strip()))
        params = {"id": lease.id, "total_attempt": lease.total_attempt, "note": text}
        if not session.run(session.sql.progress, params):
            raise lease.gone("report_progress")


def _settled(pairs: Sequence[tuple[Lease, Settlement]]) -> None:
    for lease, _ in pairs:
        lease.settled = True
