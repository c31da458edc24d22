"""What the demo measured. All counts are over the whole database, earlier runs included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import Count, DurationField, ExpressionWrapper, F

from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.models import Attempt, MinuteCount, Task, TaskHistory
from example_project.flights.demo.setup import Database
from example_project.flights.desk import QUEUE
from example_project.flights.models import Filing

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Run:
    """What only this run knows."""

    rolled_back: int
    rolled_back_present: int
    finished: int
    enqueue_seconds: float
    drain_seconds: float
    retried: int  # this and the waits of tasks that were still in the tables
    wait_ms: dict[str, float | None]
    archived: Mapping[str, int] = field(default_factory=dict)  # by status, counted by reading the lake
    pipeline: Mapping[str, Any] = field(default_factory=dict)  # what its jobs returned


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a demo. ``enqueued`` counts committed filings, so it does not depend on the queue's own tables."""

    database: Database
    run: Run
    enqueued: int
    hot: int
    history: int
    archived: int
    deleted: int
    by_status: dict[str, int]
    attempts_failed: int

    @property
    def conservation_ok(self) -> bool:
        """Return whether every task ever enqueued is still accounted for."""
        return self.enqueued == self.hot + self.history + self.archived + self.deleted

    @property
    def tasks_per_second(self) -> float:
        """Return the speed of this run's drain."""
        return round(self.run.finished / self.run.drain_seconds, 1)

    def as_json(self) -> dict[str, Any]:
        """Return the machine-readable form."""
        return {
            "database": asdict(self.database),
            "enqueued": self.enqueued,
            "hot": self.hot,
            "history": self.history,
            "archived": self.archived,
            "deleted": self.deleted,
            "rolled_back_present": self.run.rolled_back_present,
            "by_status": self.by_status,
            "attempts_failed": self.attempts_failed,
            "conservation_ok": self.conservation_ok,
            "duration_s": round(self.run.enqueue_seconds + self.run.drain_seconds, 3),
            "drain_tasks_per_s": self.tasks_per_second,
            "wait_ms": self.run.wait_ms,
            "pipeline": self.run.pipeline,
        }


def take(database: Database, run: Run) -> Figures:
    """Count everything."""
    hot, history = statuses(Task), statuses(TaskHistory)
    return Figures(
        database=database,
        run=run,
        enqueued=Filing.objects.count(),
        hot=sum(hot.values()),
        history=sum(history.values()),
        archived=sum(run.archived.values()),
        deleted=sum(MinuteCount.objects.filter(kind="deletion", queue=QUEUE).values_list("count", flat=True)),
        by_status={status: hot[status] + history[status] + run.archived.get(status, 0) for status in hot},
        attempts_failed=Attempt.objects.filter(queue=QUEUE).count(),
    )


def statuses(model: type[Task] | type[TaskHistory]) -> dict[str, int]:
    """Count the tasks of the claims queue by status, all five present."""
    rows = model.objects.filter(queue=QUEUE).values_list("status").annotate(Count("id"))
    return {str(status): 0 for status in Status} | dict(rows)


def kept() -> int:
    """Count the tasks in TASKS and in the history."""
    return sum(statuses(Task).values()) + sum(statuses(TaskHistory).values())


def finished() -> int:
    """Count those of them in a terminal status."""
    hot, history = statuses(Task), statuses(TaskHistory)
    return sum(hot[status] + history[status] for status in TERMINAL)


def retried() -> int:
    """Count the tasks that were taken more than once."""
    return sum(model.objects.filter(queue=QUEUE, total_attempt__gt=1).count() for model in (Task, TaskHistory))


def waits() -> dict[str, float | None]:
    """Return percentiles of the time from enqueue to start, of tasks in TASKS that one attempt settled; None: no such.

    A retried task keeps only its last start, and its backing off is no waiting in line.
    """
    wait = ExpressionWrapper(F("start_time") - F("create_time"), output_field=DurationField())
    settled = Task.objects.filter(queue=QUEUE, finish_time__isnull=False, total_attempt=1)
    ranked = settled.annotate(waited=wait).order_by("waited").values_list("waited", flat=True)
    count = settled.count()
    return {f"p{percent}": _milliseconds(ranked[count * percent // 100]) if count else None for percent in PERCENTILES}


def _milliseconds(wait: timedelta) -> float:
    return round(wait / timedelta(milliseconds=1), 1)
