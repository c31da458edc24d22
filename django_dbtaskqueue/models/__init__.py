"""The tables. ``tasks``: TASKS, its history and failed attempts; ``control``: queues, schedules, pollers and what is
counted, what operators do, and what the data pipeline keeps."""

from django_dbtaskqueue.models.control import (
    ApiToken,
    ArchiveBatch,
    AuditEntry,
    BulkOperation,
    Doctor,
    FailureGroup,
    FinishEvent,
    Limit,
    MinuteCount,
    Overview,
    PipelineReport,
    Poller,
    Queue,
    SavedSearch,
    Schedule,
    StreamPosition,
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
    "AbstractTask", "ApiToken", "ArchiveBatch", "Attempt", "AuditEntry", "Batch", "BulkOperation", "Dependency",
    "Doctor", "FailureGroup", "FinishEvent", "Hold", "Limit", "MinuteCount", "Overview", "PipelineReport",
    "PoisonTask", "Poller", "Queue", "SavedSearch", "Schedule", "Step", "StreamPosition", "Task", "TaskChange",
    "TaskColumns", "TaskHistory", "TemporaryTask", "UsedReference",
]  # fmt: skip
