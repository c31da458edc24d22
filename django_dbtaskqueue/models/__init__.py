"""The tables. ``tasks``: TASKS and what it leaves; ``control``: queues, pollers and their counters."""

from django_dbtaskqueue.models.control import CallCount, DeletedTasks, Poller, Queue
from django_dbtaskqueue.models.tasks import (
    ENDED,
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
    "STATUSES",
    "STATUS_CHOICES",
    "AbstractTask",
    "Attempt",
    "CallCount",
    "DeletedTasks",
    "Poller",
    "Queue",
    "Task",
    "TaskColumns",
    "TaskHistory",
    "TemporaryTask",
]
