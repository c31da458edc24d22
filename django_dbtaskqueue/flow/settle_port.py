"""The settle port: what a processor settles and reads its task through, in the transaction of its own thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar

from django.db import transaction

from django_dbtaskqueue.conf.queue import QueueSettings
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.lease import Lease, Steps
from django_dbtaskqueue.core.outcomes import Outcome, Settlement, Suspend
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import groups, usage
from django_dbtaskqueue.flow.dependencies import Parents, TaskKey, parents_of
from django_dbtaskqueue.flow.run import decide
from django_dbtaskqueue.flow.settle import resolve, settle
from django_dbtaskqueue.flow.steps import Journal
from django_dbtaskqueue.models import AbstractTask, Task


class SettlePort:
    """Settles on the calling thread's Django connection, in the transaction of that thread."""

    calls: ClassVar[Mapping[str, str]] = {}

    def __init__(self, alias: str, model: type[AbstractTask] = Task, *, key: str = "") -> None:
        self.alias, self.model, self.key = alias, model, key
        self.keep, self.group_retry, self.log_level = "keep", "hold", 0
        self.extra: Mapping[str, object] = {}
        self.reenqueue: Any = None

    def follow(self, settings: QueueSettings) -> None:
        """Obey these settings from the next settle on."""
        self.keep, self.group_retry = settings.keep, settings.group_retry
        self.log_level, self.extra = settings.life_level, settings.extra

    def time(self, text: str) -> datetime:
        return Session.on(self.alias, self.model).time(text)

    def settle(self, lease: Lease, outcome: Outcome) -> None:
        """Write one outcome, or raise ``LeaseLost``; ``ReenqueueDelayMissing`` when nothing says when it is due."""
        self.settle_all([(lease, outcome)])

    def settle_last(self, lease: Lease, outcome: Outcome | Suspend) -> None:
        session = Session.on(self.alias, self.model)
        session.ends = True
        self._settle(session, [(lease, decide(lease, outcome))])

    def settle_all(self, pairs: Sequence[tuple[Lease, Outcome]]) -> None:
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
                raise lease.gone(outcome.facts.verb)
        for lease, outcome in pairs:
            lease.outcome = outcome
        notify.on_commit(session.connection, partial(_settled, self.alias, pairs))
        if any(lease.group is not None or outcome.facts.wakes for lease, outcome in pairs):
            notify.after_commit(session.connection, pairs[0][0].queue)

    def stands(self, lease: Lease) -> bool:
        return lease.id in resolve(Session.on(self.alias, self.model), [lease])[1]

    def parents(self, lease: Lease) -> Parents:
        return parents_of(TaskKey(self.model._meta.label_lower, lease.id), self.alias)

    def journal(self, lease: Lease) -> Steps:
        return Journal(lease, self.alias, self.model)

    def touch(self, lease: Lease, delta: timedelta) -> None:
        session = Session.on(self.alias, self.model)
        seconds = delta.total_seconds()
        rows = session.run(session.sql.touch, {"id": lease.id, "total_attempt": lease.total_attempt, "delta": seconds})
        if not rows:
            raise lease.gone("touch")
        lease.until_text = str(rows[0][0])
        lease.deadline += seconds
        usage.after_commit(session.connection, {(lease.queue, "touch"): (lease.id,)})

    def report_progress(self, lease: Lease, done: float, note: str) -> None:
        session = Session.on(self.alias, self.model)
        text = json_payload.cut_bytes(json_payload.clean_text(f"{done:.0%} {note}".strip()))
        params = {"id": lease.id, "total_attempt": lease.total_attempt, "note": text}
        if not session.run(session.sql.progress, params):
            raise lease.gone("report_progress")


def _settled(alias: str, pairs: Sequence[tuple[Lease, Settlement]]) -> None:
    if groups.limit_memories:
        groups.note_ended(alias, (lease for lease, _ in pairs))
    for lease, _ in pairs:
        lease.settled = True
