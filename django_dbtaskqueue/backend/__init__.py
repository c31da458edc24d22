"""The backend of Django's tasks: functions with ``@task`` run as tasks of this queue.

::

    TASKS = {"default": {"BACKEND": "django_dbtaskqueue.backend.DatabaseTaskBackend", "QUEUES": ["default", "mail"]}}

Django 6 has ``django.tasks``. For Django 5.2, install the extra ``tasks``: the same API is in ``django_tasks``.

A row names its function by the dotted path, in ``payload_type``. The path is looked up among the functions that this
process has decorated; it is never imported. A poller leaves a function that it does not know to other pollers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.backend import compat
from django_dbtaskqueue.backend.functions import finished_listener, processor_of
from django_dbtaskqueue.backend.results import NONCE, decorated, find_place, new_result, read_result, result_id_of
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import json as json_payload
from django_dbtaskqueue.core.columns import InsertOptions, TaskOptions
from django_dbtaskqueue.core.exceptions import LeaseLost, PayloadError, near_match
from django_dbtaskqueue.core.lease import current_lease
from django_dbtaskqueue.core.retry import AnyPolicy, Fixed

__all__ = ["DatabaseTask", "DatabaseTaskBackend"]

OPTION_NAMES = ("max_attempts", "backoff")
MAX_PATH_CHARS = 200  # of the column payload_type


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
                raise compat.InvalidTaskBackend(
                    f"TASKS[{alias!r}]['OPTIONS'] has no key {name!r}.{near_match(str(name), OPTION_NAMES)}"
                )
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
        known = decorated.get(path)
        if known is None or known.func is not task.func:
            decorated[path] = task
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
        registry.register(queue, processor_of(task), row_type=path, retry=policy)
        signals.register(finished_listener)

    def enqueue(self, task: compat.AnyTask, args: Any, kwargs: Any) -> compat.AnyResult:
        """Insert the task on the caller's connection: it exists exactly if the caller's transaction commits.

        Raises ``TypeError`` for an argument that JSON cannot hold, before any write.
        """
        from django_dbtaskqueue.db.session import alias_for
        from django_dbtaskqueue.flow import enqueue, observe

        self.validate_task(task)
        payload = {"args": compat.normalize_json(args), "kwargs": compat.normalize_json(kwargs)}
        if task.run_after is not None:
            payload["run_after"] = task.run_after.isoformat()
        if self.alias != compat.DEFAULT_TASK_BACKEND_ALIAS:
            payload["backend"] = self.alias
        if metadata := getattr(task, "metadata", None):
            payload["metadata"] = compat.normalize_json(metadata)
        if connections[alias_for(task.queue_name, None)].vendor != "postgresql":
            payload[NONCE] = secrets.token_hex(8)
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
        result = new_result(
            task,
            result_id_of(str(row._state.db), type(row)._meta.label_lower, row.pk, payload),
            payload,
            enqueued_at=row.create_time,
        )
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
        return read_result(result_id)

    def save_metadata(self, task_result: compat.AnyResult, metadata: dict[str, Any]) -> None:
        """Write the metadata of a task at once. Raises ``LeaseLost`` in a task whose lease another poller has."""
        session, task_id = find_place(task_result.id)
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
            if not conf.is_name(queue):
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
