"""The tables. ``tasks``: TASKS, its history and failed attempts; ``control``: queues, schedules, pollers and what is
counted; ``operations``: what operators did and do; ``workflows``: what waits for what, and batches; ``archive``: what
the data pipeline keeps."""

from django_dbtaskqueue.models.archive import ArchiveBatch, FinishEvent, PipelineReport, StreamPosition
from django_dbtaskqueue.models.control import (
    Doctor,
    FailureGroup,
    Limit,
    MinuteCount,
    Overview,
    Poller,
    Queue,
    Schedule,
)
from django_dbtaskqueue.models.operations import (
    ApiToken,
    AuditEntry,
    BulkOperation,
    SavedSearch,
    TaskChange,
)
from django_dbtaskqueue.models.tasks import (
    AbstractTask,
    Attempt,
    Batch,
    Dependency,
    Hold,
    PoisonTask,
    Step,
    Task,
    TaskColumns,
    TaskHistory,
    TemporaryTask,
    UsedReference,
)

__all__ = [
    "AbstractTask",
    "ApiToken",
    "ArchiveBatch",
    "Attempt",
    "AuditEntry",
    "Batch",
    "BulkOperation",
    "Dependency",
    "Doctor",
    "FailureGroup",
    "FinishEvent",
    "Hold",
    "Limit",
    "MinuteCount",
    "Overview",
    "PipelineReport",
    "PoisonTask",
    "Poller",
    "Queue",
    "SavedSearch",
    "Schedule",
    "Step",
    "StreamPosition",
    "Task",
    "TaskChange",
    "TaskColumns",
    "TaskHistory",
    "TemporaryTask",
    "UsedReference",
]
