"""The tables. ``tasks``: TASKS, its history and failed attempts; ``control``: queues, schedules, pollers and what is
counted; ``operations``: what operators did and do; ``workflows``: what waits for what, and batches; ``archive``: what
the data pipeline keeps."""

from django_dbtaskqueue.models.archive import ArchiveBatch, PipelineReport, StreamLedger
from django_dbtaskqueue.models.control import (
    DeletedTasks,
    Doctor,
    FailureCount,
    FailureGroup,
    GroupLimit,
    Metric,
    Overview,
    Poller,
    Queue,
    QueueLimit,
    Schedule,
    UsageCount,
)
from django_dbtaskqueue.models.operations import (
    ApiToken,
    AuditEntry,
    BulkOperation,
    BulkSkip,
    SavedSearch,
    TaskChange,
)
from django_dbtaskqueue.models.tasks import (
    AbstractTask,
    Attempt,
    PoisonTask,
    ReceivedTransfer,
    Signal,
    Step,
    Task,
    TaskColumns,
    TaskHistory,
    TemporaryTask,
    UsedReference,
)
from django_dbtaskqueue.models.workflows import Batch, Dependency, Hold

__all__ = [
    "AbstractTask",
    "ApiToken",
    "ArchiveBatch",
    "Attempt",
    "AuditEntry",
    "Batch",
    "BulkOperation",
    "BulkSkip",
    "DeletedTasks",
    "Dependency",
    "Doctor",
    "FailureCount",
    "FailureGroup",
    "GroupLimit",
    "Hold",
    "Metric",
    "Overview",
    "PipelineReport",
    "PoisonTask",
    "Poller",
    "Queue",
    "QueueLimit",
    "ReceivedTransfer",
    "SavedSearch",
    "Schedule",
    "Signal",
    "Step",
    "StreamLedger",
    "Task",
    "TaskChange",
    "TaskColumns",
    "TaskHistory",
    "TemporaryTask",
    "UsageCount",
    "UsedReference",
]
