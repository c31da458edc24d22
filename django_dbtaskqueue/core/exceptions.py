"""The errors that this package raises on purpose.

Each error builds its message from facts. The message says what was wrong, where, the value, and the fix.
"""

import copyreg
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from django_dbtaskqueue.core.outcomes import Suspend

__all__ = [
    "CheckFailed", "DuplicateTask", "EnqueueError", "JobOptionError", "LakeError", "LeaseLost", "MiddlewareError",
    "OperationRefused", "PayloadError", "PipelineError", "ProcessDied", "QueueFull", "ReenqueueDelayMissing",
    "SearchError", "SearchTooSlow", "SignalRefused", "SignalTimeout", "StepChanged", "TaskCancelled", "TaskFailed",
    "TaskGone", "TaskQueueError", "TaskSuspended", "TooManyGroups", "UnknownQueue",
]  # fmt: skip


class TaskQueueError(Exception):
    """Root of the package's errors; catch it to catch them all."""

    def __reduce__(self) -> tuple[object, ...]:
        """Let another process make it again: ``args`` holds the message, not what a subclass was made of."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class EnqueueError(TaskQueueError):
    """A task was refused before anything was written."""


MAX_NAMED_QUEUES = 20  # in an error


class UnknownQueue(EnqueueError):
    """The queue is neither in ``DBTASKQUEUE["QUEUES"]``, nor a processor's, nor a row of ``Queue``."""

    def __init__(self, queue: object, known: Iterable[str] = ()) -> None:
        self.queue = queue
        names = sorted(known)
        more = f" and {len(names) - MAX_NAMED_QUEUES} more" if len(names) > MAX_NAMED_QUEUES else ""
        there = f"{', '.join(names[:MAX_NAMED_QUEUES]) or 'none'}{more}"
        super().__init__(
            f"Unknown queue {queue!r}.{near_match(str(queue), names)} Known queues: {there}. "
            f'Add it to DBTASKQUEUE["QUEUES"] or register a processor with @processor({str(queue)!r}).'
        )


class DuplicateTask(EnqueueError):
    """The reference is already used in the queue. Nothing was written, and the transaction is still usable."""

    def __init__(
        self,
        queue: str,
        reference: str,
        *,
        task_id: int | None = None,
        status: str | None = None,
        in_other_group: bool = False,
        rule: str = "",
    ) -> None:
        """``rule``: what the rule of uniqueness allows that derived the reference, in words."""
        self.queue, self.reference, self.task_id, self.status = queue, reference, task_id, status
        held, gone = f" by task {task_id} ({status})" if task_id is not None else "", status and task_id is None
        remedy = (
            'Pass on_duplicate="ignore" to get the existing task, on_duplicate="replace" to replace one that is still '
            'CREATED, or on_duplicate="replace_running" to replace one that runs, too.'
        )
        if in_other_group:
            remedy = (
                "That task is in another group, and a replaced task stays in its group. Enqueue with its group, or "
                "cancel or delete that task first."
            )
        elif rule:
            held = held if task_id is not None else " by a task that has left the table"
            remedy = (
                f'The rule allows {rule}. With on_duplicate="ignore" in the rule, a call returns the existing task.'
            )
        elif gone:
            held, remedy = f" by a task that has {status}", "operations.lookup.delete(queue, reference) frees it."
        super().__init__(f"Reference {reference!r} is already taken in queue {queue!r}{held}. {remedy}")


class PayloadError(EnqueueError):
    """The database cannot store a payload, a result or the data of a signal as JSON, or a payload has another class.

    ``path`` names the place, e.g. ``items[3].when``.
    """

    def __init__(self, reason: str, *, path: str = "", cannot: str = "be stored", of: str = "Payload") -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{of} cannot {cannot}: {path or 'the value itself'}: {reason}")


class QueueFull(EnqueueError):
    """The queue is at its capacity, and stayed there until the timeout, or a verb would put too many tasks into it."""

    def __init__(self, queue: str, capacity: int) -> None:
        self.queue, self.capacity = queue, capacity
        super().__init__(
            f"Queue {queue!r} holds its capacity of {capacity} live tasks. Wait for room, as enqueue(timeout=…) "
            "does, start more pollers, or raise the queue's capacity."
        )


class TooManyGroups(TaskQueueError):
    """A transaction enqueues into more groups than the database server has locks for."""

    def __init__(self, queue: str, groups: int) -> None:
        self.queue, self.groups = queue, groups
        super().__init__(
            f"The database server has no room for the locks of {groups:,} more groups of queue {queue!r}. Each group "
            "stays locked to the end of the transaction. Enqueue into at most 5,000 groups in one transaction, or "
            "raise max_locks_per_transaction in postgresql.conf."
        )


class LeaseLost(TaskQueueError):
    """The lease is lost: another poller took the task, or max_running forgot it; it was released or settled.

    Inside ``transaction.atomic()`` the error rolls back the caller's writes.
    """

    def __init__(self, task_id: int, total_attempt: int, verb: str) -> None:
        self.task_id, self.total_attempt, self.verb = task_id, total_attempt, verb
        super().__init__(
            f"Lease {total_attempt} of task {task_id} is gone, so {verb} changed nothing: the lease expired, and "
            "another poller took the task or max_running no longer counts it; an operator released it; or it was "
            "settled before. Give the queue a longer lease, or call task.touch() in long work."
        )


class TaskCancelled(TaskQueueError):
    """The task has to stop: an operator cancelled it, its timeout is over, or its lease is lost.

    ``task.check()`` raises it. Let it pass: no outcome of this run is stored any more.
    """

    def __init__(self, task_id: int) -> None:
        self.task_id = task_id
        super().__init__(
            f"Task {task_id} has to stop: it was cancelled, its timeout is over, its lease is lost, or its poller does "
            "not wait for it. No outcome of this run is stored."
        )


class MiddlewareError(TaskQueueError):
    """The middleware around a processor failed, and the processor did not. The attempt fails.

    ``middleware`` is its dotted path; ``__cause__`` is what it raised, if it raised.
    """

    def __init__(self, middleware: str, reason: str) -> None:
        self.middleware, self.reason = middleware, reason
        super().__init__(f"Middleware {middleware} failed: {reason}")


class TaskFailed(TaskQueueError):
    """A task that is waited for has ended in ``ERROR`` or ``POISON``. ``text`` says why."""

    def __init__(self, task_id: int, queue: str, status: str, text: str) -> None:
        self.task_id, self.queue, self.status, self.text = task_id, queue, status, text
        super().__init__(f"Task {task_id} of queue {queue!r} ended in {status}: {text or 'no reason is stored'}")


class TaskGone(TaskQueueError):
    """A task that is waited for has left the table and the history, so its result cannot be read."""

    def __init__(self, task_id: int | None, queue: str) -> None:
        self.task_id, self.queue = task_id, queue
        super().__init__(
            f"Task {task_id} of queue {queue!r} is neither in its table nor in the history: it has completed and its "
            'queue has keep="delete", or it was deleted. A queue whose results are waited for needs keep="keep" or '
            '"history".'
        )


class ReenqueueDelayMissing(TaskQueueError):
    """A reenqueue has no delay, and no policy gives one. The attempt fails."""

    def __init__(self, queue: str, reenqueue_attempt: int, *, ended: bool) -> None:
        self.queue, self.reenqueue_attempt, self.ended = queue, reenqueue_attempt, ended
        reason = (
            f"its reenqueue policy gives up at reenqueue {reenqueue_attempt}"
            if ended
            else "it has no reenqueue policy (the default is manual)"
        )
        super().__init__(
            f"A task of queue {queue!r} is reenqueued without a delay, and {reason}. Give the delay, as in "
            "Reenqueue(timedelta(minutes=5)), or the queue a policy, as in "
            f"@processor({queue!r}, reenqueue=Fixed(timedelta(minutes=5)))."
        )


class StepChanged(TaskQueueError):
    """A processor took another step than in an earlier attempt of the task. The attempt fails without a retry."""

    def __init__(self, task_id: int, position: int, before: str, now: str) -> None:
        self.task_id, self.position = task_id, position
        super().__init__(
            f"Step {position} of task {task_id} was {before} in an earlier attempt and is {now} now. A processor must "
            "take the same steps in the same order in each attempt: a step may not be renamed, moved or put between "
            "others while tasks are under way. Undo the change and reprocess the task, or enqueue the work anew."
        )


class SignalTimeout(TaskQueueError):
    """The time of ``task.wait_for()`` was over before the signal came. Uncaught, the task fails without a retry."""

    def __init__(self, task_id: int, name: str) -> None:
        self.task_id, self.name = task_id, name
        super().__init__(
            f"Task {task_id} waited for the signal {name!r}, and it did not come in time. Catch SignalTimeout around "
            "task.wait_for() to go on without it; each later attempt gets the same answer."
        )


class SignalRefused(TaskQueueError):
    """A signal was sent to a task that cannot receive it any more. Nothing was stored."""

    def __init__(self, task_id: object, name: str, status: str | None) -> None:
        """``status`` of the task; None: there is no such task."""
        self.task_id, self.name, self.status = task_id, name, status
        reason = (
            f"there is no task {task_id} here: it never was, or it was deleted or moved to the history. Give "
            "queue= if its queue has a table or database of its own"
            if status is None
            else f"task {task_id} is on its way to another shard. Send it to the task there"
            if status == "CREATED"
            else f"task {task_id} is {status}. A task that has ended receives no signal; reprocess an ERROR task first"
        )
        super().__init__(f"The signal {name!r} was not sent: {reason}.")


class TaskSuspended(BaseException):
    """Ends a call of a processor that sleeps or waits: ``task.sleep()`` and ``task.wait_for()`` raise it.

    Not an ``Exception``, so that ``except Exception`` lets it pass. Do not catch it.
    """

    def __init__(self, outcome: "Suspend") -> None:
        self.outcome = outcome
        super().__init__("The task sleeps or waits; a later attempt goes on from here. Do not catch this.")


class ProcessDied(TaskQueueError):
    """The error of a task whose poller died or did not answer during the last attempt, before an outcome was stored."""

    def __init__(self, poller_instance: str | None, attempt: int, max_attempts: int, how: str = "") -> None:
        """``how`` the process ended in which the task ran apart from the others; "": it was the poller's."""
        super().__init__(
            f"The task ended its process ({how}) during attempt {attempt} of {max_attempts}."
            if how
            else f"Poller {poller_instance} died or never answered during attempt {attempt} of {max_attempts}: the "
            "lease ran out without an outcome, and no attempt is left. Its log and exit code may say why; reprocess "
            "the task once the cause is gone."
        )


class PipelineError(TaskQueueError):
    """A job of the data pipeline, or one of its sources, failed. No partial result is left."""


class JobOptionError(PipelineError):
    """An option of a pipeline job is not valid. Nothing was read or written."""

    def __init__(self, option: str, reason: str) -> None:
        self.option = option
        super().__init__(f"{option}: {reason}.")


class LakeError(PipelineError):
    """A folder or file of the lake cannot be used. ``path`` is its name."""

    def __init__(self, path: object, reason: str, remedy: str) -> None:
        self.path = str(path)
        super().__init__(f"{path} {reason}. {remedy}.")


class CheckFailed(PipelineError):
    """A checking job found faults. ``result`` is what it returns otherwise."""

    def __init__(self, message: str, result: Mapping[str, object]) -> None:
        self.result = result
        super().__init__(message)


class SearchError(TaskQueueError):
    """A search is not valid; ``part`` is the wrong term."""

    def __init__(self, part: str, reason: str) -> None:
        self.part, self.reason = part, reason
        super().__init__(f"Search {part!r}: {reason}")


class SearchTooSlow(TaskQueueError):
    """A query of the task table took longer than ``DBTASKQUEUE["OPERATIONS_TIMEOUT"]`` and was cancelled."""

    def __init__(self, timeout: str) -> None:
        super().__init__(
            f"The database did not answer within {timeout}, and the question was given up. "
            "Narrow the search: name a queue (queue:claims), a status (status:ERROR), a whole reference (ref:UA-15) or "
            "an age (age:<1h)."
        )


class OperationRefused(TaskQueueError):
    """An operator's action was refused, because something that it needs is missing. Nothing was changed."""


def near_match(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def dotted(thing: object) -> str:
    """Return the dotted path of a class or a function; of another object that of its class, in its own module."""
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
