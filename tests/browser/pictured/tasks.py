"""Processors that leave their tasks in the states that the docs' pictures show."""

import threading
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.management import call_command

from django_dbtaskqueue import Debounce, enqueue, enqueue_many, processor
from django_dbtaskqueue.core.lease import Lease
from django_dbtaskqueue.models import Queue, Task

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task

QUEUES = ("statements", "register", "search", "letters")


@processor("statements", executor="process", timeout=timedelta(hours=1))
def write_statement(task: Lease) -> None:
    threading.Event().wait()


@processor("register")
def ask_register(task: Lease) -> None:
    threading.Event().wait()


@processor("search", unique=Debounce(timedelta(minutes=10), max_wait=timedelta(hours=1), fields=("flight",)))
def index(task: Lease) -> None:
    """Put a flight into the index of the search."""


@task(queue_name="letters", takes_context=True, max_attempts=3, backoff=0.5)
def post(context: TaskContext, passenger: str, *, language: str) -> dict[str, Any]:
    """Post a letter; the first attempt fails."""
    if context.attempt < 2:
        raise ConnectionError("the post office does not answer")
    return {"posted": passenger, "language": language, "attempt": context.attempt}


def play() -> None:
    """Enqueue what is shown, and lower a limit as an operator would."""
    enqueue("statements", "UA-2013", {"airline": "UA", "year": 2013})
    call_command("taskqueue", "set", "register", "max_running=2", "--reason", "the register is slow today")
    enqueue_many("register", [{"payload": {"tail_number": f"N{14200 + number}"}} for number in range(40)])
    for version in (1, 2, 3):
        enqueue("search", payload={"flight": "2013-01-02-UA-1545-EWR-IAH", "version": version})
    post.enqueue("Ada Lovelace", language="en")


def clean() -> None:
    """Delete all of it, so that the demo's other pages do not show it."""
    for model in apps.get_app_config(Task._meta.app_label).get_models():
        column = "name" if model is Queue else "queue"
        if column in {field.name for field in model._meta.concrete_fields}:
            model._base_manager.filter(**{f"{column}__in": QUEUES}).delete()
