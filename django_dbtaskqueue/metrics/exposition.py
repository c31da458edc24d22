"""Exposition: the metrics that Prometheus gets, of the database and of one process, and their text.

The library ``prometheus-client`` is an extra: it is imported when metrics are read for the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured

from django_dbtaskqueue.metrics import upper

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector as Foreign

    Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

# Every fourth class of the histograms, from 1 ms to 10,000 s: two buckets in each power of ten.
BUCKET_CLASSES = range(8, 65, 4)


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric: its name as Prometheus stores it, its type, its help text, and its labels."""

    name: str
    type: str  # "gauge", "counter" or "histogram"
    help: str
    labels: tuple[str, ...] = ()


DATABASE_METRICS = (
    Definition("dbtaskqueue_tasks", "gauge", "Tasks by status; large numbers are estimates", ("queue", "status")),
    Definition(
        "dbtaskqueue_oldest_due_age_seconds", "gauge", "How long the task that waits longest has been due", ("queue",)
    ),
    Definition(
        "dbtaskqueue_expired_leases", "gauge", "Tasks whose lease ran out and that no poller has taken over", ("queue",)
    ),
    Definition("dbtaskqueue_queue_paused", "gauge", "1 while the queue is paused", ("queue",)),
    Definition("dbtaskqueue_queue_pollers", "gauge", "Pollers alive that serve the queue", ("queue",)),
    Definition("dbtaskqueue_pollers", "gauge", "Pollers alive"),
    Definition(
        "dbtaskqueue_limited_running_tasks", "gauge", "Tasks that count under the queue's max_running",
        ("queue", "database"),
    ),
    Definition("dbtaskqueue_limit_max_running", "gauge", "The queue's max_running", ("queue", "database")),
    Definition(
        "dbtaskqueue_limit_rate_tokens", "gauge", "Tasks that the queue's rate allows to start now",
        ("queue", "database"),
    ),
    Definition(
        "dbtaskqueue_held_back_tasks", "gauge",
        "Due tasks that wait because the limit is reached; at most 1,000 of each priority are counted",
        ("queue", "database", "limit"),
    ),
    Definition(
        "dbtaskqueue_enqueued_tasks_total", "counter", "Tasks enqueued since midnight UTC; starts again each day",
        ("queue",),
    ),
    Definition(
        "dbtaskqueue_attempts_total", "counter", "Attempts that ended since midnight UTC; starts again each day",
        ("queue", "outcome"),
    ),
    Definition(
        "dbtaskqueue_run_seconds_total", "counter", "Run time of attempts since midnight UTC; starts again each day",
        ("queue",),
    ),
    Definition(
        "dbtaskqueue_wait_seconds_total", "counter",
        "Time from due to checkout of attempts since midnight UTC; starts again each day", ("queue",),
    ),
    Definition(
        "dbtaskqueue_recent_run_seconds", "gauge", "Run time of attempts, last hour", ("queue", "percentile")
    ),
    Definition(
        "dbtaskqueue_recent_wait_seconds", "gauge", "Time from due to checkout, last hour", ("queue", "percentile")
    ),
    Definition(
        "dbtaskqueue_schedule_next_timestamp_seconds", "gauge", "The schedule's next tick", ("schedule", "queue")
    ),
    Definition(
        "dbtaskqueue_schedule_last_timestamp_seconds", "gauge", "The schedule's last tick", ("schedule", "queue")
    ),
    Definition("dbtaskqueue_schedule_paused", "gauge", "1 while the schedule is paused", ("schedule", "queue")),
)  # fmt: skip
PROCESS_METRICS = (
    Definition("dbtaskqueue_poller_info", "gauge", "1 for the state that the process is in", ("state", "version")),
    Definition("dbtaskqueue_poller_slots", "gauge", "Tasks that can run at the same time"),
    Definition("dbtaskqueue_poller_running_tasks", "gauge", "Calls of processors that run now"),
    Definition("dbtaskqueue_poller_finished_total", "counter", "Attempts that ended"),
    Definition("dbtaskqueue_poller_failed_total", "counter", "Attempts that failed"),
)
POLLER_METRICS = (
    *PROCESS_METRICS,
    Definition("dbtaskqueue_poller_leases", "gauge", "Leases without a stored outcome"),
    Definition("dbtaskqueue_poller_last_poll_timestamp_seconds", "gauge", "When a poll last worked"),
    Definition("dbtaskqueue_poller_last_heartbeat_timestamp_seconds", "gauge", "When the poller last reported"),
    Definition("dbtaskqueue_poller_attempts_total", "counter", "Attempts by outcome", ("queue", "outcome")),
    Definition("dbtaskqueue_poller_run_seconds", "histogram", "Run time of attempts", ("queue",)),
    Definition("dbtaskqueue_poller_wait_seconds", "histogram", "Time from due to checkout", ("queue",)),
)


class Exposition:
    """The values of some metrics at one moment: a collector of ``prometheus_client``."""

    def __init__(self, definitions: Iterable[Definition]) -> None:
        self._families = {one.name: _family(one) for one in definitions}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add the value of a gauge or counter, with its labels in the order of the definition."""
        self._families[name].add_metric(labels, value)  # type: ignore[call-arg,arg-type]

    def add_histogram(self, name: str, classes: Mapping[int, int], seconds: float, *labels: str) -> None:
        """Add a histogram: how many durations fell into each class, and the sum of all durations."""
        steps = [0, *(number + 1 for number in BUCKET_CLASSES), max(classes, default=0) + 1]
        counts = (sum(classes.get(one, 0) for one in range(low, high)) for low, high in pairwise(steps))
        edges = [*(f"{upper(number):.3g}" for number in BUCKET_CLASSES), "+Inf"]
        buckets = [(edge, float(count)) for edge, count in zip(edges, accumulate(counts), strict=True)]
        self._families[name].add_metric(labels, buckets, seconds)  # type: ignore[arg-type]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._families.values()


def text_of(collectors: Iterable[Foreign | Exposition], accept: str) -> tuple[bytes, str]:
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


def _family(definition: Definition) -> Family:
    client()
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    labels: Sequence[str] = definition.labels
    return families[definition.type](definition.name, f"{definition.help}.", labels=labels)  # type: ignore[no-any-return]
