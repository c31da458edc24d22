"""The backend of Django's tasks: functions with ``@task`` run as tasks of this queue.

::

    TASKS = {"default": {"BACKEND": "django_dbtaskqueue.backend.DatabaseTaskBackend", "QUEUES": ["default", "mail"]}}

Django 6 has ``django.tasks``. For Django 5.2, install the extra ``tasks``: the same API is in ``django_tasks``.

A row names its function by the dotted path, in ``payload_type``. The path is looked up among the functions that this
process has decorated; it is never imported. A poller leaves a function that it does not know to other pollers.
"""

import secrets
from _thread import interrupt_main
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from inspect import iscoroutinefunction
from threading import current_thread, main_thread
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.backend import compat, results
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import InsertOptions, TaskOptions
from django_dbtaskqueue.core.exceptions import LeaseLost, PayloadError, TaskQueueError, near_match
from django_dbtaskqueue.core.failure_signature import describe
from django_dbtaskqueue.core.lease import Lease, current_lease
from django_dbtaskqueue.core.outcomes import Complete, Outcome, Reenqueue, as_outcome
from django_dbtaskqueue.core.retry import AnyPolicy, Fixed
from django_dbtaskqueue.db import liveness

__all__ = ["DatabaseTask", "DatabaseTaskBackend"]

OPTION_NAMES = ("max_attempts", "backoff")
MAX_PATH_CHARS = 200  # of the column payload_type
AFTER_INTERRUPT = timedelta(seconds=10)  # the poller that stops must not take the task again


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseTask(compat.AnyTask):
    """A Django task with a budget of attempts.

    ``max_attempts`` counts the first attempt. ``backoff`` is the time before the next one: seconds, a ``timedelta``, or
    a retry policy of this package or its text, such as ``"geometric:10s,x2"``. None takes the backend's ``OPTIONS``.
    """

    max_attempts: int | None = None
    backoff: AnyPolicy | timedelta | float = field(default=None, hash=False)


class DatabaseTaskBackend(compat.BaseTaskBackend):
    """Runs Django's tasks as tasks of this queue. ``enqueue`` inserts the row in the caller's transaction.

    ``OPTIONS``: ``max_attempts`` (default: that of the queue in ``DBTASKQUEUE["QUEUES"]``, else 1) and ``backoff``.
    Both can be said for one function: ``@task(max_attempts=3, backoff=10)``.
    """

    task_class = DatabaseTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True
    supports_metadata = compat.HAS_METADATA

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        for name in self.options:
            if name not in OPTION_NAMES:
                near = near_match(str(name), OPTION_NAMES)
                raise compat.InvalidTaskBackend(f"TASKS[{alias!r}]['OPTIONS'] has no key {name!r}.{near}")
        try:
            _check_attempts(self.options.get("max_attempts"))
            _policy(self.options.get("backoff"))
        except (ImproperlyConfigured, TypeError, ValueError) as error:
            raise compat.InvalidTaskBackend(f"TASKS[{alias!r}]['OPTIONS']: {error}") from error

    def validate_task(self, task: compat.AnyTask) -> None:
        """Raise ``InvalidTask`` for a task that cannot run here. Make its function known to this process."""
        super().validate_task(task)
        path = task.module_path
        if len(path) > MAX_PATH_CHARS:
            raise compat.InvalidTask(f"The path {path!r} is too long: at most {MAX_PATH_CHARS} characters.")
        known = results.decorated.get(path)
        if known is None or known.func is not task.func:
            results.decorated[path] = task
        try:
            _check_attempts(getattr(task, "max_attempts", None))
            for queue in self.queues or {task.queue_name, *conf.settings().queues}:
                self._register(queue, path, task)
        except (ImproperlyConfigured, TypeError, ValueError) as error:
            raise compat.InvalidTask(f"{path}: {error}") from error

    def _register(self, queue: str, path: str, task: compat.AnyTask) -> None:
        known = registry.find(queue, path)
        if known is not None and getattr(known.function, "func", None) is task.func:
            return
        policy = _policy(self._option(task, "backoff"))
        function = (_AsyncFunction if iscoroutinefunction(task.func) else _Function)(task)
        registry.register(queue, function, row_type=path, retry=policy)
        signals.register(finished_listener)

    def enqueue(self, task: compat.AnyTask, args: Any, kwargs: Any) -> compat.AnyResult:
        """Insert the task on the caller's connection: it exists exactly if the caller's transaction commits.

        Raises ``TypeError`` for an argument that JSON cannot hold, before any write.
        """
        from django_dbtaskqueue.db.session import aliases_of
        from django_dbtaskqueue.flow import enqueue, observe

        self.validate_task(task)
        payload = {"args": compat.normalize_json(args), "kwargs": compat.normalize_json(kwargs)}
        if task.run_after is not None:
            payload["run_after"] = task.run_after.isoformat()
        if self.alias != compat.DEFAULT_TASK_BACKEND_ALIAS:
            payload["backend"] = self.alias
        if metadata := getattr(task, "metadata", None):
            payload["metadata"] = compat.normalize_json(metadata)
        if any(connections[alias].vendor != "postgresql" for alias in aliases_of(task.queue_name)):
            payload[results.NONCE] = secrets.token_hex(8)
        try:
            options = TaskOptions(payload=payload, priority=-task.priority, run_at=task.run_after)
            known = conf.settings().queues.get(task.queue_name, {})
            attempts = int(self._option(task, "max_attempts") or known.get("max_attempts", 1))
            stored = {"payload_type": task.module_path, "max_attempts": attempts}
            row = enqueue.enqueue_task(task.queue_name, options, InsertOptions(), stored)
        except PayloadError as error:
            if (fault := json_payload.find_fault(payload)) is not None:
                raise TypeError(f"{task.module_path}: {fault[0]}: {fault[1]}") from error
            raise
        result_id = results.result_id_of(str(row._state.db), type(row)._meta.label_lower, row.pk, payload)
        result = results.new_result(task, result_id, payload, enqueued_at=row.create_time)
        observe.send(compat.task_enqueued, type(self), task_result=result)
        return result

    def _option(self, task: compat.AnyTask, name: str) -> Any:
        own = getattr(task, name, None)
        return self.options.get(name) if own is None else own

    def get_result(self, result_id: str) -> compat.AnyResult:
        """Return the result with this id, in one query; the history is searched, too.

        Raises ``TaskResultDoesNotExist`` for any id that this backend did not give out, or whose task was deleted, and
        ``SuspiciousOperation`` if the row names a function that this process did not decorate.
        """
        return results.read_result(result_id)

    def save_metadata(self, task_result: compat.AnyResult, metadata: dict[str, Any]) -> None:
        """Write the metadata of a task at once. Raises ``LeaseLost`` in a task whose lease another poller has."""
        session, task_id = results.find_place(task_result.id)
        lease = current_lease.get()
        held = lease is not None and lease.id == task_id and lease.port.alias == session.connection.alias
        token = lease.total_attempt if held and lease is not None else None
        params = {"task_id": task_id, "token": token, "metadata": json_payload.dumps(metadata)}
        if not session.run(session.sql.save_metadata, params):
            if token is not None:
                raise LeaseLost(task_id, token, "save_metadata")
            raise compat.TaskResultDoesNotExist(task_result.id)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        where = f"TASKS[{self.alias!r}]"
        found: list[checks.CheckMessage] = []
        if not apps.is_installed("django_dbtaskqueue"):
            hint = "Add 'django_dbtaskqueue' to INSTALLED_APPS."
            found.append(checks.Error(f"{where} needs the app of its tables.", hint=hint, id="dbtaskqueue.E020"))
        for queue in sorted(self.queues):
            if not conf.is_queue_name(queue):
                found.append(checks.Error(f"{where}: {queue!r} is not the name of a queue.", id="dbtaskqueue.E021"))
            elif conf.default_settings(queue).keep == "delete":
                text = f"{where}: queue {queue!r} deletes tasks that are done (keep='delete'), so they have no result."
                hint = "Set keep to 'keep' or 'history' if the results are read."
                found.append(checks.Info(text, hint=hint, id="dbtaskqueue.I022"))
        return found


def _check_attempts(value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ImproperlyConfigured(f"max_attempts={value!r} must be a whole number of at least 1.")


def _policy(backoff: Any) -> AnyPolicy:
    if isinstance(backoff, int | float) and not isinstance(backoff, bool):
        backoff = timedelta(seconds=backoff)
    if isinstance(backoff, timedelta):
        return Fixed(backoff, jitter=0)
    return None if backoff is None else cast(AnyPolicy, conf.parse("retry", backoff, where="backoff"))


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

        result = results.leased_result(path, lease)
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
        if task.payload_type in results.decorated and (status := STATUSES_BY_VERB.get(outcome.facts.verb)):
            if task.total_attempt > 1:
                _prepare_connection(task)
            _send_finished(results.leased_result(task.payload_type, task, status, getattr(outcome, "result", None)))

    def crashed(self, task: Lease, error: BaseException | str) -> None:
        """Tell of a task that has no attempt left."""
        if task.payload_type not in results.decorated or isinstance(error, LeaseLost):
            return
        if task.total_attempt == task.max_attempts == 1:  # most functions have one attempt, and it is known here
            failure = describe(error, task.queue)
            entry = results.task_error(failure["error_type"], failure["traceback"])
            result = results.leased_result(task.payload_type, task, compat.TaskResultStatus.FAILED, errors=[entry])
        else:
            _prepare_connection(task)
            stored = results.stored_result(results.id_of_lease(task))
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
