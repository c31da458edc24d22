"""The tables. ``tasks``: TASKS and what it leaves; ``control``: queues, pollers and their counters;
``metrics``: what pollers count; ``operations``: what operators did and do; ``archive``: what Spark's jobs keep."""

from django_dbtaskqueue.models.archive import ArchiveBatch, PipelineReport, StreamLedger
from django_dbtaskqueue.models.control import DeletedTasks, Doctor, Overview, Poller, Queue, UsageCount
from django_dbtaskqueue.models.metrics import FailureCount, FailureGroup, Metric
from django_dbtaskqueue.models.operations import AuditEntry, BulkOperation, BulkSkip, SavedSearch
from django_dbtaskqueue.models.tasks import (
    AbstractTask,
    Attempt,
    PoisonTask,
    Task,
    TaskColumns,
    TaskHistory,
    TemporaryTask,
)

__all__ = [
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
