"""django-tasks-db: the database backend of Django's tasks framework. Its worker takes one task at a time."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

os.environ["BENCHMARK_APPS"] = "django_tasks_db"

import django
from django.core.management import call_command
from django.db import transaction

django.setup()
# Django 6 brings the framework; before, it is a package.
task = import_module("django.tasks" if find_spec("django.tasks") else "django_tasks").task
done: list[int] = []


@task()
def nothing(number: int) -> None:
    done.append(number)


def install() -> None:
    call_command("migrate", verbosity=0)


def single() -> Callable[[], object]:
    other = nothing.using(queue_name="other")
    return lambda: other.enqueue(1)


def fill(number: int) -> None:
    """It has no call for many: one transaction round them all."""
    with transaction.atomic():
        for index in range(number):
            nothing.enqueue(index)


def drain(_number: int) -> int:
    call_command("db_worker", batch=True, startup_delay=False, verbosity=0)
    return len(done)
