"""Merging: the older what pollers counted, the fewer rows say it. Sums stay what they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import connections, transaction
from django.db.models import Model
from django.db.models.functions import Now
from django.utils.timezone import make_naive

from django_dbtaskqueue.core.sql.stats import crowded_sql
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import FailureCount, FailureGroup, Metric

SPANS = 50  # spans of time that one merge takes on in each level
KEPT = timedelta(days=90)  # counts and groups of failures


@dataclass(frozen=True, slots=True)
class Level:
    """What is older than ``age`` gets one row for each span of ``seconds``."""

    seconds: int
    age: timedelta
    until: timedelta  # when the next level takes over


LEVELS = (
    Level(60, timedelta(minutes=3), timedelta(hours=3)),
    Level(600, timedelta(hours=3), timedelta(days=2)),
    Level(3600, timedelta(days=2), timedelta(days=4)),
)
KEYS: dict[type[Model], tuple[str, ...]] = {Metric: ("queue", "outcome"), FailureCount: ("fingerprint",)}


def merge(alias: str) -> int:
    """Merge what is due on one database; return how many rows went.

    Rows that another process is merging are passed over, so nobody waits and nothing is counted twice.
    """
    session = Session.on(alias)
    gone = 0
    for model, keys in KEYS.items():
        for level in LEVELS:
            for start in _crowded(session, model, keys, level):
                gone += _merge(session, model, keys, start, timedelta(seconds=level.seconds))
    return gone


def forget(alias: str) -> int:
    """Delete what is older than three months; return how many rows went."""
    old = [
        Metric.objects.using(alias).filter(minute__lt=Now() - KEPT),
        FailureCount.objects.using(alias).filter(minute__lt=Now() - KEPT),
        FailureGroup.objects.using(alias).filter(last_seen__lt=Now() - KEPT),
    ]
    return sum(rows.delete()[0] for rows in old)


def _crowded(session: Session, model: type[Model], keys: Iterable[str], level: Level) -> list[datetime]:
    """Return the beginnings of spans in which one key has several rows."""
    now = session.time(session.run(f"SELECT {session.sql.dialect.now}", {})[0][0])
    columns = [str(model._meta.get_field(name).column) for name in keys]  # type: ignore[union-attr]
    last = now.timestamp() - level.age.total_seconds()
    # Whole spans only, or one would be merged again and again while it ages.
    end = datetime.fromtimestamp(last // level.seconds * level.seconds, tz=UTC)
    params = {
        "step": level.seconds,
        "start": session.time_text(now - level.until - timedelta(hours=1)),
        "end": session.time_text(end - timedelta(milliseconds=1)),
        "limit": SPANS,
    }
    sql = crowded_sql(session.sql.dialect, f'"{model._meta.db_table}"', columns)
    return [datetime.fromtimestamp(row[0] * level.seconds, tz=UTC) for row in session.run(sql, params)]


def _merge(session: Session, model: Any, keys: tuple[str, ...], start: datetime, length: timedelta) -> int:
    alias, stored = session.connection.alias, session.stored_time
    first, end = _as_stored(stored, start), _as_stored(stored, start + length)
    with transaction.atomic(using=alias):
        rows = model.objects.using(alias).filter(minute__gte=first, minute__lt=end)
        if connections[alias].features.has_select_for_update_skip_locked:
            rows = rows.select_for_update(skip_locked=True)
        groups: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for row in rows.order_by("pk"):
            groups[tuple(getattr(row, name) for name in keys)].append(row)
        several = [group for group in groups.values() if len(group) > 1]
        going = [row.pk for group in several for row in group]
        model.objects.using(alias).filter(pk__in=going).delete()
        model.objects.using(alias).bulk_create(_sum(group, first) for group in several)
    return len(going) - len(several)


def _as_stored(stored: Any, time: datetime) -> datetime:
    found: datetime = stored(time if settings.USE_TZ else make_naive(time))
    return found


def _sum(group: list[Any], minute: datetime) -> Any:
    """Return one row that says what several said."""
    total = type(group[0])(**{field.name: getattr(group[0], field.name) for field in group[0]._meta.concrete_fields})
    total.pk, total.minute = None, minute
    total.count = sum(row.count for row in group)
    if isinstance(total, Metric):
        total.run_seconds = sum(row.run_seconds for row in group)
        total.wait_seconds = sum(row.wait_seconds for row in group)
        total.runs, total.waits = _added(row.runs for row in group), _added(row.waits for row in group)
    return total


def _added(histograms: Iterable[dict[str, int]]) -> dict[str, int]:
    total: defaultdict[str, int] = defaultdict(int)
    for histogram in histograms:
        for number, count in histogram.items():
            total[number] += count
    return dict(total)
