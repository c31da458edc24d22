"""Metrics: what became of attempts, by queue and minute, and failures by what they have in common.

Counted in a poller's memory for each settled batch, appended in one transaction every few seconds. A killed poller
loses what it counted since; nothing else depends on it.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from django.db import transaction

from django_dbtaskqueue.core.failure_signature import FailureSignature, signature_of
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE, Settlement, facts
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.metrics.histogram import class_of
from django_dbtaskqueue.models import FailureCount, FailureGroup, Metric

logger = logging.getLogger("django_dbtaskqueue")

SAMPLE = 8  # attempts of a batch whose durations go into the histograms
MOST_KINDS = 1000  # groups of failures between two writes


class Ended(Protocol):
    """An attempt that ended; ``poller.executors.Done`` is one."""

    @property
    def lease(self) -> Lease:
        """Whose attempt it was."""

    @property
    def settlement(self) -> Settlement | None:
        """How it ended; None when the processor settled it by itself."""

    @property
    def seconds(self) -> float:
        """How long it ran."""


class Key(NamedTuple):
    """What is counted."""

    alias: str
    queue: str
    outcome: str


@dataclass(slots=True)
class Sums:
    """What was counted."""

    count: int = 0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0
    runs: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    waits: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, ended: Sequence[Ended]) -> None:
        """Count a batch. The histograms get a sample of it, weighted so that they speak for all."""
        self.count += len(ended)
        self.run_seconds += sum([done.seconds for done in ended])
        step = -(-len(ended) // SAMPLE)
        for start in range(0, len(ended), step):
            done, weight = ended[start], min(step, len(ended) - start)
            waited = _waited(done.lease)
            self.runs[class_of(done.seconds)] += weight
            self.waits[class_of(waited)] += weight
            self.wait_seconds += waited * weight

    def update(self, other: Sums) -> None:
        """Add what was counted elsewhere."""
        self.count += other.count
        self.run_seconds += other.run_seconds
        self.wait_seconds += other.wait_seconds
        for mine, theirs in ((self.runs, other.runs), (self.waits, other.waits)):
            for number, count in theirs.items():
                mine[number] += count


class Failure(NamedTuple):
    """One group of failures, and how many attempts it had."""

    queue: str
    kind: FailureSignature
    number: int


class Collector:
    """Counts of one poller that are not stored yet. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Key, Sums] = {}
        self._failures: dict[tuple[str, str], Failure] = {}  # by alias and fingerprint

    def add(self, alias: str, queue: str, ended: Sequence[Ended]) -> None:
        """Count the attempts of a batch of one queue, once they are settled. Never raises."""
        try:
            self._add(alias, queue, ended)
        except Exception:
            logger.exception("Attempts of %s were not counted", queue)

    def _add(self, alias: str, queue: str, ended: Sequence[Ended]) -> None:
        completed: list[Ended] = []
        others: list[Ended] = []
        for done in ended:
            plain = done.settlement is not None and facts(done.settlement) is COMPLETE and not done.lease.lost
            (completed if plain else others).append(done)
        if completed:
            with self._lock:
                self._sums.setdefault(Key(alias, queue, COMPLETE.counts_as), Sums()).add(completed)
        if others:
            self._add_others(alias, queue, others)

    def aliases(self) -> set[str]:
        """Return the databases with something to store."""
        with self._lock:
            return {key.alias for key in self._sums} | {alias for alias, _ in self._failures}

    def store(self, alias: str) -> None:
        """Append what was counted on one database, on the calling thread's connection. Raises its errors."""
        sums, failures = self._take(alias)
        if not sums and not failures:
            return
        try:
            _append(alias, sums, failures)
        except BaseException:
            with self._lock:
                self._put_back(alias, sums, failures)
            raise

    def _add_others(self, alias: str, queue: str, ended: Iterable[Ended]) -> None:
        by_outcome: defaultdict[str, list[Ended]] = defaultdict(list)
        failed: list[Failure] = []
        for done in ended:
            name, error = _counted(done)
            by_outcome[name].append(done)
            if error is not None:
                failed.append(Failure(queue, signature_of(error, queue), 1))
        with self._lock:
            for name, batch in by_outcome.items():
                self._sums.setdefault(Key(alias, queue, name), Sums()).add(batch)
            for failure in failed:
                self._fail(alias, failure)

    def _fail(self, alias: str, failure: Failure) -> None:
        place = (alias, failure.kind.fingerprint)
        known = self._failures.get(place)
        if known is not None:
            self._failures[place] = known._replace(number=known.number + failure.number)
        elif len(self._failures) < MOST_KINDS:
            self._failures[place] = failure

    def _take(self, alias: str) -> tuple[dict[Key, Sums], list[Failure]]:
        with self._lock:
            sums = {key: self._sums.pop(key) for key in [key for key in self._sums if key.alias == alias]}
            places = [place for place in self._failures if place[0] == alias]
            return sums, [self._failures.pop(place) for place in places]

    def _put_back(self, alias: str, sums: dict[Key, Sums], failures: Iterable[Failure]) -> None:
        for key, counted in sums.items():
            self._sums.setdefault(key, Sums()).update(counted)
        for failure in failures:
            self._fail(alias, failure)


def _counted(done: Ended) -> tuple[str, BaseException | str | None]:
    """Return what an attempt counts as, and the error it failed with."""
    lease = done.lease
    if lease.lost and not lease.settled:
        return "lost", None
    outcome = lease.outcome if done.settlement is None or lease.settled else done.settlement
    known = COMPLETE if outcome is None else facts(outcome)
    return known.counts_as, known.error


def _waited(lease: Lease) -> float:
    """Return the seconds between due and taken; clocks of replicas may disagree, so never less than none."""
    return max(0.0, (_time(lease.start_text) - _time(lease.ready_text)).total_seconds())


def _time(value: Any) -> datetime:
    """Return a time as the database wrote it; SQLite's are read already."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def minute_of(session: Session) -> datetime:
    """Return the present minute by the database's clock, as a model holds it."""
    now = session.time(session.run(f"SELECT {session.sql.dialect.now}", {})[0][0])
    return session.stored_time(now.replace(second=0, microsecond=0))


def _append(alias: str, sums: dict[Key, Sums], failures: Sequence[Failure]) -> None:
    session = Session.on(alias)
    with transaction.atomic(using=alias):
        minute = minute_of(session)
        Metric.objects.using(alias).bulk_create(
            Metric(
                queue=key.queue,
                minute=minute,
                outcome=key.outcome,
                count=one.count,
                run_seconds=one.run_seconds,
                wait_seconds=one.wait_seconds,
                runs=dict(one.runs),
                waits=dict(one.waits),
            )
            for key, one in sums.items()
        )
        _append_failures(alias, minute, failures)


def _append_failures(alias: str, minute: datetime, failures: Sequence[Failure]) -> None:
    if not failures:
        return
    groups = [
        FailureGroup(
            fingerprint=kind.fingerprint,
            queue=queue,
            error_type=kind.error_type,
            frame=kind.frame,
            message=kind.message,
            first_seen=minute,
            last_seen=minute,
        )
        for queue, kind, _ in sorted(failures, key=lambda one: one.kind.fingerprint)  # locked in one order everywhere
    ]
    FailureGroup.objects.using(alias).bulk_create(
        groups, update_conflicts=True, unique_fields=["fingerprint"], update_fields=["last_seen"]
    )
    FailureCount.objects.using(alias).bulk_create(
        FailureCount(fingerprint=kind.fingerprint, minute=minute, count=count) for _, kind, count in failures
    )
