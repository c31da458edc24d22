"""Metrics: what became of attempts, by queue and minute, and failures by what they have in common.

A poller counts each settled batch in memory and appends the counts every few seconds. A killed poller loses what it
counted since then; nothing else depends on it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from math import log10
from typing import Any, NamedTuple, Protocol

from django_dbtaskqueue.core.failure_signature import FailureSignature, signature_of
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE_FACTS, Facts, Settlement
from django_dbtaskqueue.db.minute_counts import CountKey, MinuteCounter
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import FailureGroup
from django_dbtaskqueue.models.control import FAILURE, OUTCOME

logger = logging.getLogger("django_dbtaskqueue")

LOST_FACTS = Facts("lost", "lost", "")  # of an outcome that came too late
SAMPLED_ATTEMPTS = 8  # of a batch, whose durations go into the histograms
MAX_FAILURE_GROUPS = 1000  # between two writes
# Histograms: each class of durations is a third wider than the one before. Right to about 15 %.
MIN_SECONDS = 0.0001  # shorter durations count as this
CLASSES_PER_DECADE = 8
LAST_CLASS = 96  # 10**8 seconds


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


@dataclass(slots=True)
class Sums:
    """What was counted."""

    count: int = 0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0
    runs: Counter[int] = field(default_factory=Counter)
    waits: Counter[int] = field(default_factory=Counter)

    def add(self, ended: Sequence[Ended]) -> None:
        """Count a batch. The histograms get a sample of it, weighted so that they speak for all."""
        self.count += len(ended)
        self.run_seconds += sum([done.seconds for done in ended])
        step = -(-len(ended) // SAMPLED_ATTEMPTS)
        for start in range(0, len(ended), step):
            done, weight = ended[start], min(step, len(ended) - start)
            waited = _waited(done.lease)
            self.runs[class_of(done.seconds)] += weight
            self.waits[class_of(waited)] += weight
            self.wait_seconds += waited * weight

    def update(self, other: Sums) -> Sums:
        """Add what was counted elsewhere; return these sums."""
        self.count += other.count
        self.run_seconds += other.run_seconds
        self.wait_seconds += other.wait_seconds
        self.runs.update(other.runs)
        self.waits.update(other.waits)
        return self

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Failures(NamedTuple):
    """The failed attempts of one group."""

    signature: FailureSignature
    number: int


class FailureCounter(MinuteCounter[Failures]):
    """Failed attempts by group. Each batch makes its groups, or notes when they were seen last."""

    def __init__(self) -> None:
        super().__init__(
            lambda one, more: one._replace(number=one.number + more.number),
            lambda failures: {"count": failures.number},
            MAX_FAILURE_GROUPS,
        )

    def _append(self, session: Session, counts: Mapping[CountKey, Failures]) -> datetime:
        with session.atomic():
            minute = super()._append(session, counts)
            FailureGroup.objects.using(session.connection.alias).bulk_create(
                [
                    FailureGroup(
                        fingerprint=key.name, queue=key.queue, error_type=kind.error_type, frame=kind.frame,
                        message=kind.message, first_seen=minute, last_seen=minute,
                    )
                    for key, (kind, _number) in sorted(counts.items())  # rows are locked in one order everywhere
                ],
                update_conflicts=True, unique_fields=["fingerprint"], update_fields=["last_seen"],
            )  # fmt: skip
        return minute


class Collector:
    """Counts of one poller that are not stored yet. Any thread may add."""

    def __init__(self) -> None:
        self.also: Callable[[CountKey, Sums], None] | None = None  # gets each count, too
        self.outcomes = MinuteCounter[Sums](Sums.update, Sums.columns)
        self.failures = FailureCounter()

    def add(self, alias: str, queue: str, ended: Sequence[Ended]) -> None:
        """Count the attempts of a batch of one queue, once they are settled. Never raises."""
        try:
            by_outcome: dict[str, list[Ended]] = {}
            for done in ended:
                lease, outcome = done.lease, done.settlement
                if outcome is None or lease.settled:
                    outcome = lease.outcome  # the processor settled it itself
                known = COMPLETE_FACTS if outcome is None else outcome.facts
                if lease.lost and not lease.settled:
                    known = LOST_FACTS
                by_outcome.setdefault(known.counts_as, []).append(done)
                if known.error is not None:
                    signature = signature_of(known.error, queue)
                    key = CountKey(alias, FAILURE, queue, signature.fingerprint)
                    self.failures.add(key, Failures(signature, 1))
            for name, batch in by_outcome.items():
                sums = Sums()
                sums.add(batch)
                key = CountKey(alias, OUTCOME, queue, name)
                if self.also is not None:
                    self.also(key, sums)
                self.outcomes.add(key, sums)  # the last to have the sums: it changes them
        except Exception:
            logger.exception("Attempts of %s were not counted", queue)

    def aliases(self) -> set[str]:
        """Return the databases with something to store."""
        return self.outcomes.aliases() | self.failures.aliases()

    def store(self, alias: str) -> None:
        """Append what was counted on one database, on the calling thread's connection. Raises its errors."""
        session = Session.on(alias)
        self.outcomes.store(session)
        self.failures.store(session)


def _waited(lease: Lease) -> float:
    """Return the seconds between due and taken, at least 0: clocks of replicas may disagree."""
    return max(0.0, (_time(lease.start_text) - _time(lease.ready_text)).total_seconds())


def _time(value: str | datetime) -> datetime:
    """Return a time as the database wrote it; SQLite's are read already."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


# -- histograms --------------------------------------------------------------------------------------------------------


def class_of(seconds: float) -> int:
    """Return the class a duration falls into, from 0."""
    if seconds <= MIN_SECONDS:
        return 0
    return min(LAST_CLASS, int(CLASSES_PER_DECADE * log10(seconds / MIN_SECONDS)) + 1)


def upper(number: int) -> float:
    """Return the longest duration of a class, in seconds."""
    return float(MIN_SECONDS * 10 ** (number / CLASSES_PER_DECADE))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the duration that ``share`` of all stay within, in seconds; None when nothing was counted.

    Within its class the durations are taken to be spread evenly.
    """
    wanted = share * sum(counts.values())
    if not wanted:
        return None
    seen = 0.0
    for number in sorted(counts):
        seen += counts[number]
        if seen >= wanted:
            low = upper(number - 1) if number else 0.0
            return low + (upper(number) - low) * (1 - (seen - wanted) / counts[number])
    return upper(max(counts))
