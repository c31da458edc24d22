"""The tables. ``tasks``: TASKS and what it leaves; ``control``: queues, pollers and their counters;
``metrics``: what pollers count; ``operations``: what operators did and do; ``pipeline``: what Spark's jobs keep."""

from django_dbtaskqueue.models.control import DeletedTasks, Poller, Queue, UsageCount
from django_dbtaskqueue.models.metrics import FailureCount, FailureGroup, Metric
from django_dbtaskqueue.models.operations import AuditEntry, BulkOperation, BulkSkip, SavedSearch
from django_dbtaskqueue.models.pages import Doctor, Overview, PoisonTask
from django_dbtaskqueue.models.pipeline import ArchiveBatch, PipelineReport, StreamLedger
from django_dbtaskqueue.models.tasks import (
    ENDED,
    FAILED,
    STATUS_CHOICES,
    STATUSES,
    AbstractTask,
    Attempt,
    Task,
    TaskColumns,
    TaskHistory,
    TemporaryTask,
)

__all__ = [
    "ENDED",
    "FAILED",
    "STATUSES",
    "STATUS_CHOICES",
    "AbstractTask",
    "ArchiveBatch",
    "Attempt",
    "AuditEntry",
    "BulkOperation",
    "BulkSkip",
    "DeletedTasks",
    "Doctor",
    "FailureCount",
    "FailureGroup",
    "Metric",
    "Overview",
    "PipelineReport",
    "PoisonTask",
    "Poller",
    "Queue",
    "SavedSearch",
    "StreamLedger",
    "Task",
    "TaskColumns",
    "TaskHistory",
    "TemporaryTask",
    "UsageCount",
]
