"""django-tasks-db: the database backend of Django's tasks framework."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

os.environ["BENCHMARK_APPS"] = "django_tasks_db"

import django
from django.core.management import call_command
from django.db import transaction

django.setup()
tasks = import_module("tests.benchmarks.peers.database_tasks")


class DjangoTasksDb:
    """Its worker takes one task at a time."""

    def install(self) -> None:
        """Make its tables."""
        call_command("migrate", verbosity=0)

    def single(self) -> Callable[[], object]:
        """One enqueue in autocommit."""
        other = tasks.nothing.using(queue_name="other")
        return lambda: other.enqueue(1)

    def fill(self, number: int) -> None:
        """It has no call for many: one transaction round them all."""
        with transaction.atomic():
            for index in range(number):
                tasks.nothing.enqueue(index)

    def drain(self, number: int) -> int:
        """Its worker, until nothing waits."""
        call_command("db_worker", batch=True, startup_delay=False, verbosity=0)
        return len(tasks.done)


PEER = DjangoTasksDb()
