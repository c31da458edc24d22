"""Metrics: what became of attempts, by queue and minute, and failures by what they have in common.

A poller counts each settled batch in memory and appends the counts every few seconds. A killed poller loses what it
counted since then; nothing else depends on it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from itertools import accumulate, pairwise
from math import log10
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.failure_signature import FailureSignature, signature_of
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import COMPLETE_FACTS, Lost, Settlement
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow.usage import CountKey, MinuteCounter
from django_dbtaskqueue.models import FailureGroup
from django_dbtaskqueue.models.control import FAILURE, OUTCOME

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector as Foreign


Ended = tuple[Lease, Settlement | Lost | None, float]  # an attempt, what became of it if known, its run seconds

SAMPLED_ATTEMPTS = 8  # of a batch, whose durations go into the histograms
MAX_FAILURE_GROUPS = 1000  # between two writes
# Histograms: each class of durations is a third wider than the one before. Right to about 15 %.
MIN_SECONDS = 0.0001  # shorter durations count as this
CLASSES_PER_DECADE = 8
LAST_CLASS = 96  # 10**8 seconds


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
        self.run_seconds += sum([seconds for _, _, seconds in ended])
        step = -(-len(ended) // SAMPLED_ATTEMPTS)
        for start in range(0, len(ended), step):
            (lease, _, seconds), weight = ended[start], min(step, len(ended) - start)
            times: tuple[str | datetime, ...] = lease.start_text, lease.ready_text  # SQLite's are read already
            taken, due = [datetime.fromisoformat(one) if isinstance(one, str) else one for one in times]
            waited = max(0.0, (taken - due).total_seconds())  # clocks of replicas may disagree
            self.runs[class_of(seconds)] += weight
            self.waits[class_of(waited)] += weight
            self.wait_seconds += waited * weight

    def update(self, other: "Sums") -> "Sums":
        for name, value in other.columns().items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def columns(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


class Failures(NamedTuple):
    """The failed attempts of one group."""

    signature: FailureSignature
    number: int


class FailureCounter(MinuteCounter[Failures]):
    """Failed attempts by group. Each batch makes its groups, or notes when they were seen last."""

    def __init__(self) -> None:
        super().__init__(
            lambda one, more: Failures(more.signature, one.number + more.number),
            lambda failures: {"count": failures.number},
            MAX_FAILURE_GROUPS,
        )

    def _append(self, session: Session, counts: Mapping[CountKey, Failures]) -> datetime:
        with session.atomic():
            minute = super()._append(session, counts)
            seen = {"release": conf.settings().release, "first_seen": minute, "last_seen": minute}
            FailureGroup.objects.using(session.connection.alias).bulk_create(
                # Rows are locked in one order everywhere.
                [FailureGroup(queue=key.queue, **kind._asdict(), **seen) for key, (kind, _) in sorted(counts.items())],
                update_conflicts=True, unique_fields=["fingerprint"], update_fields=["last_seen", "newest"],
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
            for one in ended:
                known = COMPLETE_FACTS if one[1] is None else one[1].facts
                by_outcome.setdefault(known.counts_as, []).append(one)
                if known.error is not None:
                    signature = signature_of(known.error, queue)
                    self.failures.add(CountKey(alias, FAILURE, queue, signature.fingerprint), Failures(signature, 1))
            for name, batch in by_outcome.items():
                sums = Sums()
                sums.add(batch)
                key = CountKey(alias, OUTCOME, queue, name)
                if self.also is not None:
                    self.also(key, sums)
                self.outcomes.add(key, sums)  # the last to have the sums: it changes them
        except Exception:
            logger.exception("Attempts of %s were not counted", queue)

    def store(self, alias: str) -> None:
        """Append what was counted on one database, on the calling thread's connection. Raises its errors."""
        session = Session.on(alias)
        self.outcomes.store(session)
        self.failures.store(session)


def class_of(seconds: float) -> int:
    """Return the class a duration falls into, from 0."""
    if seconds <= MIN_SECONDS:
        return 0
    return min(LAST_CLASS, int(CLASSES_PER_DECADE * log10(seconds / MIN_SECONDS)) + 1)


def upper(number: int) -> float:
    """Return the longest duration of a class, in seconds."""
    return float(MIN_SECONDS * 10 ** (number / CLASSES_PER_DECADE))


# The metrics that Prometheus gets are defined where they are filled: ``api.prometheus``, ``poller.probe_port``.
# The library ``prometheus-client`` is an extra: it is imported when metrics are read for the first time.

# Every fourth class of the histograms, from 1 ms to 10,000 s: two buckets in each power of ten.
BUCKET_CLASSES = range(8, 65, 4)


class MetricSpec(NamedTuple):
    """One metric: its name as Prometheus stores it, its type, its help text, and its labels."""

    name: str
    type: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...]


def metric(name: str, text: str, *labels: str, type: str = "") -> MetricSpec:
    """Return a metric. Without a type it is a counter if its name ends with ``_total``, otherwise a gauge."""
    return MetricSpec(name, type or ("counter" if name.endswith("_total") else "gauge"), text, labels)


class Exposition:
    """The values of some metrics at one moment: a collector of ``prometheus_client``."""

    def __init__(self, definitions: Iterable[MetricSpec]) -> None:
        client()
        from prometheus_client import core

        self._families: dict[str, Any] = {}
        for one in definitions:
            family = getattr(core, f"{one.type.title()}MetricFamily")
            self._families[one.name] = family(one.name, f"{one.help}.", labels=one.labels)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add the value of a gauge or counter, with its labels in the order of the definition."""
        self._families[name].add_metric(labels, value)

    def add_histogram(self, name: str, classes: Mapping[int, int], seconds: float, *labels: str) -> None:
        """Add a histogram: how many durations fell into each class, and the sum of all durations."""
        steps = [0, *(number + 1 for number in BUCKET_CLASSES), max(classes, default=0) + 1]
        counts = (sum(classes.get(one, 0) for one in range(low, high)) for low, high in pairwise(steps))
        edges = [*(f"{upper(number):.3g}" for number in BUCKET_CLASSES), "+Inf"]
        buckets = [(edge, float(count)) for edge, count in zip(edges, accumulate(counts), strict=True)]
        self._families[name].add_metric(labels, buckets, seconds)

    def collect(self) -> "Iterator[Metric]":
        yield from self._families.values()


def exposed(collectors: "Iterable[Foreign | Exposition]", accept: str) -> tuple[bytes, str]:
    """Return the text of some collectors, and its content type: OpenMetrics for a client that asks for it."""
    client()
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def client() -> ModuleType:
    """Return ``prometheus_client``; raise ``ImproperlyConfigured`` if it is not installed."""
    try:
        import prometheus_client
    except ImportError:
        raise ImproperlyConfigured(
            'Metrics need the package prometheus-client: pip install "django-dbtaskqueue[prometheus]".'
        ) from None
    return prometheus_client
