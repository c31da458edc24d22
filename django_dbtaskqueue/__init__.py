"""A reliable task queue in the database a Django project already has.

Names are resolved on first use, so that importing this package imports neither Django nor a model.
"""

from typing import TYPE_CHECKING

from django_dbtaskqueue.core import __version__ as __version__, lazy_names

if TYPE_CHECKING:
    from django_dbtaskqueue.core.exceptions import (
        DuplicateTask,
        LeaseLost,
        PayloadError,
        QueueFull,
        SignalRefused,
        SignalTimeout,
        StepChanged,
        TaskCancelled,
        TaskQueueError,
        UnknownQueue,
    )
    from django_dbtaskqueue.core.masking import Sensitive
    from django_dbtaskqueue.core.outcomes import Complete, CompleteDelete, Fail, Poison, Reenqueue
    from django_dbtaskqueue.core.retry import Arithmetic, Fixed, Geometric, Linear, Sequence, Staged
    from django_dbtaskqueue.core.unique import Debounce, Throttle, Unique
    from django_dbtaskqueue.flow.batches import Workflow, batch, chain
    from django_dbtaskqueue.flow.enqueue import aenqueue, enqueue
    from django_dbtaskqueue.flow.enqueue_many import EnqueueReport, aenqueue_many, enqueue_many
    from django_dbtaskqueue.flow.port import asignal, signal
    from django_dbtaskqueue.pull.handle import queue
    from django_dbtaskqueue.registry import periodic, processor

__all__ = [
    "Arithmetic", "Complete", "CompleteDelete", "Debounce", "DuplicateTask", "EnqueueReport", "Fail", "Fixed",
    "Geometric", "LeaseLost", "Linear", "PayloadError", "Poison", "QueueFull", "Reenqueue", "Sensitive", "Sequence",
    "SignalRefused", "SignalTimeout", "Staged", "StepChanged", "TaskCancelled", "TaskQueueError", "Throttle", "Unique",
    "UnknownQueue", "Workflow", "aenqueue", "aenqueue_many", "asignal", "batch", "chain", "enqueue", "enqueue_many",
    "periodic", "processor", "queue", "signal",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "core.exceptions": (
            "DuplicateTask", "LeaseLost", "PayloadError", "QueueFull", "SignalRefused", "SignalTimeout", "StepChanged",
            "TaskCancelled", "TaskQueueError", "UnknownQueue",
        ),
        "core.masking": ("Sensitive",),
        "core.outcomes": ("Complete", "CompleteDelete", "Fail", "Poison", "Reenqueue"),
        "core.retry": ("Arithmetic", "Fixed", "Geometric", "Linear", "Sequence", "Staged"),
        "core.unique": ("Debounce", "Throttle", "Unique"),
        "flow.batches": ("Workflow", "batch", "chain"),
        "flow.enqueue": ("aenqueue", "enqueue"),
        "flow.enqueue_many": ("EnqueueReport", "aenqueue_many", "enqueue_many"),
        "flow.port": ("asignal", "signal"),
        "pull.handle": ("queue",),
        "registry": ("periodic", "processor"),
    },
)  # fmt: skip
