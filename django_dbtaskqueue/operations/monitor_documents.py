"""Pollers, failures and the audit as data, for the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from django_dbtaskqueue.core.masking import masked, masked_text
from django_dbtaskqueue.models import AuditEntry, FailureGroup, Poller
from django_dbtaskqueue.operations.bounded_reads import ApproxCount
from django_dbtaskqueue.operations.queue_stats import FailureStats
from django_dbtaskqueue.operations.serializers import document


class PollerDocument(TypedDict):
    """A poller as it last reported. ``alive``: it has not stopped, and has not missed three heartbeats."""

    poller: str
    host: str
    pid: int
    version: str
    state: str
    alive: bool
    queues: list[str]
    slots: int
    held: int
    finished: int
    failed: int
    started: datetime
    heartbeat: datetime
    requested_command: str


def poller_document(row: Poller, *, alive: bool, queues: Sequence[str]) -> PollerDocument:
    """Return a poller, with those of its queues that are shown."""
    own = {"poller": row.instance, "started": row.start_time, "heartbeat": row.heartbeat_time}
    return document(PollerDocument, row, alive=alive, queues=list(queues), **own)


class FailureDocument(TypedDict):
    """Failures that have queue, exception, place in the code and message in common.

    ``failed``: attempts that failed, by window. ``open``: tasks that are in ERROR or POISON because of it.
    """

    fingerprint: str
    queue: str
    error_type: str
    place: str
    message: str
    first_seen: datetime
    last_seen: datetime
    failed: Mapping[str, int]
    open: ApproxCount


def failure_document(group: FailureGroup, stats: FailureStats) -> FailureDocument:
    """Return a failure group, secrets masked."""
    message = masked_text(group.message)
    return document(FailureDocument, group, place=group.frame, message=message, failed=stats.failed, open=stats.open)


class AuditDocument(TypedDict):
    """One act of an operator."""

    id: int
    time: datetime
    actor: str
    source: str
    verb: str
    queue: str
    query: str
    reason: str
    changed: int
    skipped: int
    details: Mapping[str, object]
    operation: int | None


def audit_document(entry: AuditEntry) -> AuditDocument:
    """Return an audit entry, secrets masked."""
    details = masked(entry.details)
    known = details if isinstance(details, dict) else {}
    return document(AuditDocument, entry, id=entry.pk, details=known, operation=entry.operation_id)
