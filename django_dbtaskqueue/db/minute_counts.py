"""Rows of counts by the minute: rolled up as they get older, in the end deleted.

Each process appends its own rows, so it never waits for another process. Several rows can stand for one minute. The
roll-up makes one row of them, first for each minute, in the end for each hour or day. The sums stay the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from django.db import OperationalError, connections, transaction
from django.db.models.functions import Now

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import Pauses
from django_dbtaskqueue.core.sql.stats import StatsStatements
from django_dbtaskqueue.models import FailureGroup, MinuteCount
from django_dbtaskqueue.models.control import CALL, DELETION, FAILURE, OUTCOME

if TYPE_CHECKING:
    from django_dbtaskqueue.db.session import Session

SPANS_PER_ROLL_UP = 50  # spans of time that one roll-up takes on in each level
METRICS_MAX_AGE = timedelta(days=90)  # of outcomes and failures; calls and deletions are kept for ever
FAILED_SPAN_S = 300.0, 3600.0  # before a span whose rows cannot be rolled up is tried again


class Level(NamedTuple):
    """Rows that are older than ``age`` become one row for each span of ``seconds``."""

    seconds: int
    age: timedelta
    until: timedelta  # the age at which the next level takes over


UP_TO_HOURS = (
    Level(60, timedelta(minutes=3), timedelta(hours=3)),
    Level(600, timedelta(hours=3), timedelta(days=2)),
    Level(3600, timedelta(days=2), timedelta(days=4)),
)
UP_TO_DAYS = (*UP_TO_HOURS, Level(86_400, timedelta(days=4), timedelta(days=30)))
LEVELS = {OUTCOME: UP_TO_HOURS, FAILURE: UP_TO_HOURS, CALL: UP_TO_DAYS, DELETION: UP_TO_DAYS}  # by kind
_pauses = Pauses[tuple[str, str, int, datetime]](*FAILED_SPAN_S, beyond=OperationalError)


def roll_up(session: Session, kinds: Iterable[str] = LEVELS) -> int:
    """Roll up what is due of these kinds on one database; return how many rows went.

    Passes over rows that another process is rolling up, so it never waits, and nothing is counted twice.
    """
    gone = 0
    for kind in kinds:
        for level in LEVELS[kind]:
            for start in _crowded(session, kind, level):
                span = session.connection.alias, kind, level.seconds, start
                if span not in _pauses.resting():
                    with _pauses.around(span, partial(logger.warning, "Counts of %s are not rolled up: %s", span)):
                        gone += _merge(session, kind, start, timedelta(seconds=level.seconds))
    return gone


def delete_old(alias: str) -> int:
    """Delete metrics and groups of failures that are older than three months; return how many rows went."""
    limit = Now() - METRICS_MAX_AGE
    old = MinuteCount.objects.using(alias).filter(kind__in=(OUTCOME, FAILURE), minute__lt=limit)
    groups = FailureGroup.objects.using(alias).filter(last_seen__lt=limit)
    return sum(rows.delete()[0] for rows in (old, groups))


def _crowded(session: Session, kind: str, level: Level) -> list[datetime]:
    """Return the beginnings of spans in which one queue has several rows of a name."""
    now = session.now()
    last = now.timestamp() - level.age.total_seconds()
    # Whole spans only: otherwise a span would be rolled up again and again while it ages.
    end = datetime.fromtimestamp(last // level.seconds * level.seconds, tz=UTC)
    params = {
        "kind": kind,
        "step": level.seconds,
        "start": session.time_text(now - level.until - timedelta(hours=1)),
        "end": session.time_text(end - timedelta(milliseconds=1)),
        "limit": SPANS_PER_ROLL_UP,
    }
    rows = session.run(StatsStatements(session.sql.tables, session.sql.dialect).crowded, params)
    return [datetime.fromtimestamp(row[0] * level.seconds, tz=UTC) for row in rows]


def _merge(session: Session, kind: str, start: datetime, length: timedelta) -> int:
    alias = session.connection.alias
    first, end = session.stored_time(start), session.stored_time(start + length)
    with transaction.atomic(using=alias):
        rows = MinuteCount.objects.using(alias).filter(kind=kind, minute__gte=first, minute__lt=end)
        if connections[alias].features.has_select_for_update_skip_locked:
            rows = rows.select_for_update(skip_locked=True)
        groups: defaultdict[tuple[str, str], list[MinuteCount]] = defaultdict(list)
        for row in rows.order_by("pk"):
            groups[row.queue, row.name].append(row)
        several = [group for group in groups.values() if len(group) > 1]
        going = [row.pk for group in several for row in group]
        MinuteCount.objects.using(alias).filter(pk__in=going).delete()
        MinuteCount.objects.using(alias).bulk_create(_sum(group, first) for group in several)
    return len(going) - len(several)


def _sum(group: list[MinuteCount], minute: datetime) -> MinuteCount:
    total = MinuteCount(kind=group[0].kind, queue=group[0].queue, name=group[0].name, minute=minute)
    for name in ("count", "run_seconds", "wait_seconds"):
        setattr(total, name, sum(getattr(row, name) for row in group))
    for name in ("runs", "waits"):
        setattr(total, name, dict(sum((Counter(getattr(row, name)) for row in group), Counter[str]())))
    return total
