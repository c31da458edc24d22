"""Django's tasks, wherever they are: ``django.tasks`` from Django 6.0 on, the package ``django_tasks`` before."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING or find_spec("django.tasks"):
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS as DEFAULT_TASK_BACKEND_ALIAS
    from django.tasks import TaskResultStatus as TaskResultStatus
    from django.tasks import task_backends as task_backends
    from django.tasks.backends.base import BaseTaskBackend as BaseTaskBackend
    from django.tasks.base import TASK_MAX_PRIORITY as TASK_MAX_PRIORITY
    from django.tasks.base import TASK_MIN_PRIORITY as TASK_MIN_PRIORITY
    from django.tasks.base import Task as Task
    from django.tasks.base import TaskContext as TaskContext
    from django.tasks.base import TaskError as TaskError
    from django.tasks.base import TaskResult as TaskResult
    from django.tasks.exceptions import InvalidTask as InvalidTask
    from django.tasks.exceptions import InvalidTaskBackend as InvalidTaskBackend
    from django.tasks.exceptions import TaskResultDoesNotExist as TaskResultDoesNotExist
    from django.tasks.exceptions import TaskResultMismatch as TaskResultMismatch
    from django.tasks.signals import task_enqueued as task_enqueued
    from django.tasks.signals import task_finished as task_finished
    from django.tasks.signals import task_started as task_started
    from django.utils.json import normalize_json as normalize_json
elif find_spec("django_tasks"):
    from django_tasks import DEFAULT_TASK_BACKEND_ALIAS as DEFAULT_TASK_BACKEND_ALIAS
    from django_tasks import TaskResultStatus as TaskResultStatus
    from django_tasks import task_backends as task_backends
    from django_tasks.backends.base import BaseTaskBackend as BaseTaskBackend
    from django_tasks.base import TASK_MAX_PRIORITY as TASK_MAX_PRIORITY
    from django_tasks.base import TASK_MIN_PRIORITY as TASK_MIN_PRIORITY
    from django_tasks.base import Task as Task
    from django_tasks.base import TaskContext as TaskContext
    from django_tasks.base import TaskError as TaskError
    from django_tasks.base import TaskResult as TaskResult
    from django_tasks.exceptions import InvalidTaskBackendError, InvalidTaskError
    from django_tasks.exceptions import TaskResultDoesNotExist as TaskResultDoesNotExist
    from django_tasks.exceptions import TaskResultMismatch as TaskResultMismatch
    from django_tasks.signals import task_enqueued as task_enqueued
    from django_tasks.signals import task_finished as task_finished
    from django_tasks.signals import task_started as task_started
    from django_tasks.utils import normalize_json as normalize_json

    InvalidTask, InvalidTaskBackend = InvalidTaskError, InvalidTaskBackendError  # as Django 6 names them
else:
    raise ImproperlyConfigured(
        "DatabaseTaskBackend needs django.tasks, which Django has from version 6.0 on. For Django 5.2 install the "
        'package django-tasks: pip install "django-dbtaskqueue[tasks]".'
    )


if TYPE_CHECKING:
    AnyTask: TypeAlias = Task[Any, Any]
    AnyResult: TypeAlias = TaskResult[Any, Any]
else:
    AnyTask, AnyResult = Task, TaskResult
HAS_METADATA = hasattr(BaseTaskBackend, "supports_metadata")  # Django after 6.1
