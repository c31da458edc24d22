"""Failures by what they have in common, with how often in which time: read from counts, not from the task table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, Sum
from django.db.models.functions import Now

from django_dbtaskqueue.core.sql.stats import Reading
from django_dbtaskqueue.db.session import Session, alias_for
from django_dbtaskqueue.models import Attempt, FailureCount, FailureGroup, Task
from django_dbtaskqueue.operations.lookup import locations
from django_dbtaskqueue.operations.paginators import Count
from django_dbtaskqueue.operations.planner_hints import by_index

WINDOWS = {
    "1h": timedelta(hours=1),
    "3h": timedelta(hours=3),
    "24h": timedelta(days=1),
    "3d": timedelta(days=3),
    "7d": timedelta(days=7),
}
SHOWN = 100  # groups on a page
OPEN = 1000  # tasks of one group that are counted


@dataclass(frozen=True, slots=True)
class FailureFigures:
    """One group of failures."""

    fingerprint: str
    queue: str
    error_type: str
    frame: str  # module:function of the project's innermost call, or ''
    message: str  # with what varies replaced
    first_seen: datetime
    last_seen: datetime
    counts: Mapping[str, int]  # attempts that failed, by window: "1h", "3h", "24h", "3d", "7d"
    open: Count  # tasks that stand in ERROR or POISON for it

    @property
    def error(self) -> str:
        """The exception's class without its module."""
        return self.error_type.rpartition(".")[2]


def failure_groups(using: str | None = None, *, queue: str | None = None, limit: int = SHOWN) -> list[FailureFigures]:
    """Return the groups that failed last, the latest first, over the last seven days; of one queue, or of all.

    A constant number of queries for each task table, whatever there is.
    """
    alias = alias_for(queue or "", using, write=False)
    wanted = Q(last_seen__gte=Now() - WINDOWS["7d"])
    if queue is not None:
        wanted &= Q(queue=queue)
    groups = list(FailureGroup.objects.using(alias).filter(wanted).order_by("-last_seen", "fingerprint")[:limit])
    return figures_of(groups, alias)


def figures_of(groups: Sequence[FailureGroup], alias: str) -> list[FailureFigures]:
    """Return the figures of these groups, in their order."""
    prints = [group.fingerprint for group in groups]
    counts, waiting = _counts(prints, alias), _open(prints, alias)
    return [
        FailureFigures(
            group.fingerprint,
            group.queue,
            group.error_type,
            group.frame,
            group.message,
            group.first_seen,
            group.last_seen,
            counts[group.fingerprint],
            waiting[group.fingerprint],
        )
        for group in groups
    ]


def sample(fingerprint: str, using: str | None = None) -> Attempt | None:
    """Return the latest failed attempt of a group, with its traceback, or None when it is gone."""
    attempts = Attempt.objects.using(alias_for("", using, write=False))
    return attempts.filter(fingerprint=fingerprint).order_by("-pk").first()


def _counts(prints: Sequence[str], alias: str) -> dict[str, dict[str, int]]:
    found = {one: dict.fromkeys(WINDOWS, 0) for one in prints}
    if prints:
        rows = FailureCount.objects.using(alias).filter(fingerprint__in=prints, minute__gte=Now() - WINDOWS["7d"])
        sums = {f"in_{name}": Sum("count", filter=Q(minute__gte=Now() - span)) for name, span in WINDOWS.items()}
        for one, *numbers in rows.values_list("fingerprint").annotate(**sums).order_by():
            found[one] = {name: number or 0 for name, number in zip(WINDOWS, numbers, strict=True)}
    return found


def _open(prints: Sequence[str], alias: str) -> dict[str, Count]:
    numbers: defaultdict[str, int] = defaultdict(int)
    places = [place for place in locations() if place[0] == alias] or [(alias, Task)]
    for place in places if prints else ():
        session = Session.on(*place)
        sql = Reading(session.sql.tables, session.sql.dialect).open_failures(OPEN + 1)
        with by_index(session):
            for name, number in session.run(sql, {"prints": session.sql.dialect.array(prints)}):
                numbers[name] += number
    return {one: Count(min(numbers[one], OPEN), more=numbers[one] > OPEN) for one in prints}
