"""Django's tasks, wherever they are: ``django.tasks`` from Django 6.0 on, the package ``django_tasks`` before."""

# mypy: implicit-reexport
# ruff: noqa: F401 -- other modules import these names from here

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING or find_spec("django.tasks"):
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, Task, TaskContext, TaskError, TaskResult
    from django.tasks.exceptions import InvalidTask, InvalidTaskBackend, TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
elif find_spec("django_tasks"):
    from django_tasks import DEFAULT_TASK_BACKEND_ALIAS, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, Task, TaskContext, TaskError, TaskResult
    from django_tasks.exceptions import (
        InvalidTaskBackendError as InvalidTaskBackend,
        InvalidTaskError as InvalidTask,
        TaskResultDoesNotExist,
        TaskResultMismatch,
    )
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json
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
