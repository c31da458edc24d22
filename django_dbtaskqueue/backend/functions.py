"""A function with ``@task`` as a processor, and the signals of its life."""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from inspect import iscoroutinefunction
from threading import current_thread, main_thread
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.db import connections

from django_dbtaskqueue import signals
from django_dbtaskqueue.backend import compat
from django_dbtaskqueue.backend.results import decorated, id_of_lease, leased_result, stored_result, task_error
from django_dbtaskqueue.core.exceptions import LeaseLost, TaskQueueError
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.core.outcomes import Complete, Outcome, Reenqueue, as_outcome
from django_dbtaskqueue.db import liveness

AFTER_INTERRUPT = timedelta(seconds=10)  # the poller that stops must not take the task again


def processor_of(task: compat.AnyTask) -> Callable[[Lease], Any]:
    """Return what the registry takes as the processor of a decorated function."""
    return (_AsyncFunction if iscoroutinefunction(task.func) else _Function)(task)


class _Function:
    """Calls the function of a Django task with a lease."""

    def __init__(self, task: compat.AnyTask) -> None:
        self.func, self.path = task.func, task.module_path
        self.__module__, self.__qualname__ = task.func.__module__, task.func.__qualname__

    def __call__(self, lease: Lease) -> Any:
        run = _Run(self.path, lease)
        try:
            value = self.func(*run.args, **run.kwargs)
        except KeyboardInterrupt:
            return _interrupted()
        except BaseException:
            if run.has_new_metadata:
                with suppress(Exception):  # the function's own error is the one to be told
                    run.context.save_metadata()
            raise
        if run.has_new_metadata:
            run.context.save_metadata()
        return _outcome(value)


class _AsyncFunction(_Function):
    """The same for a coroutine function; awaited on the poller's event loop."""

    async def __call__(self, lease: Lease) -> Any:
        run = await sync_to_async(_Run)(self.path, lease)  # it may read the earlier attempts, and sends a signal
        try:
            value = await self.func(*run.args, **run.kwargs)
        except KeyboardInterrupt:
            return _interrupted()
        except Exception:
            if run.has_new_metadata:
                with suppress(Exception):  # as above
                    await run.context.asave_metadata()
            raise
        if run.has_new_metadata:
            await run.context.asave_metadata()
        return _outcome(value)


class _Run:
    """One attempt of a function: its arguments, and its context if it takes one."""

    def __init__(self, path: str, lease: Lease) -> None:
        from django_dbtaskqueue.flow import observe

        result = leased_result(path, lease)
        observe.send(compat.task_started, type(result.task.get_backend()), task_result=result)
        self.args, self.kwargs, self.context = result.args, result.kwargs, cast(Any, None)
        if result.task.takes_context:
            self.context = cast(Any, compat.TaskContext)(task_result=result)
            self.args = [self.context, *self.args]

    @property
    def has_new_metadata(self) -> bool:
        return compat.HAS_METADATA and self.context is not None and self.context.metadata_modified


def _outcome(value: object) -> Outcome:
    """Return what a function's return value means. Raise ``TypeError`` for what JSON cannot hold."""
    outcome = as_outcome(value)
    return outcome if outcome is value else Complete(compat.normalize_json(value))


def _interrupted() -> Reenqueue:
    """End the poller as Ctrl-C does; the task is for another one. On the main thread of a test, raise it again."""
    if current_thread() is main_thread():
        raise KeyboardInterrupt
    interrupt_main()
    return Reenqueue(AFTER_INTERRUPT)


STATUSES_BY_VERB = {"complete": compat.TaskResultStatus.SUCCESSFUL, "poison": compat.TaskResultStatus.FAILED}


class _FinishedListener(signals.Listener):
    """Sends ``task_finished`` when the end of a task is stored, with its exception still being handled."""

    def executed(self, task: Lease, outcome: Outcome) -> None:
        """Tell of a task that succeeded, or is POISON."""
        if task.payload_type in decorated and (status := STATUSES_BY_VERB.get(outcome.facts.verb)):
            if task.total_attempt > 1:
                _prepare_connection(task)
            _send_finished(leased_result(task.payload_type, task, status, getattr(outcome, "result", None)))

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        """Tell of a task that has no attempt left."""
        if task.payload_type not in decorated or isinstance(error, LeaseLost):
            return
        if task.total_attempt == task.max_attempts == 1:  # most functions have one attempt, and it is known here
            failure = describe(error, task.queue)
            entry = task_error(failure["error_type"], failure["traceback"])
            result = leased_result(task.payload_type, task, compat.TaskResultStatus.FAILED, errors=[entry])
        else:
            _prepare_connection(task)
            stored = stored_result(id_of_lease(task))
            if stored is None or stored.status != compat.TaskResultStatus.FAILED:
                return
            result = stored
        shown = TaskQueueError(error) if isinstance(error, str) else error
        frames = shown.__traceback__
        try:
            raise shown
        except BaseException:
            _send_finished(result)
        finally:
            shown.__traceback__ = frames


finished_listener = _FinishedListener()


def _prepare_connection(task: Lease) -> None:
    """Let no read wait for ever on the thread that settles: its Django connection may be broken, or its wire silent."""
    connection = connections[task.port.alias]
    if connection.errors_occurred and not connection.in_atomic_block:
        connection.close()
    if connection.connection is None:
        liveness.bound_waits(connection)


def _send_finished(result: compat.AnyResult) -> None:
    from django_dbtaskqueue.flow import observe

    observe.send(compat.task_finished, type(result.task.get_backend()), task_result=result)
