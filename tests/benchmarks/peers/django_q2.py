"""django-q2 with its ORM broker: a cluster of a pusher, one worker and a monitor."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["BENCHMARK_APPS"] = "django_q"

import django
from django.core.management import call_command
from django.db import transaction

from tests.benchmarks.children import wait_for

django.setup()


class DjangoQ2:
    """Its settings are in ``tests/benchmarks/settings.py``."""

    def install(self) -> None:
        """Make its tables."""
        call_command("migrate", verbosity=0)

    def single(self) -> Callable[[], object]:
        """One enqueue in autocommit."""
        from django_q.tasks import async_task

        return lambda: async_task("operator.neg", 1, cluster="other")

    def fill(self, tasks: int) -> None:
        """It has no call for many: one transaction round them all."""
        from django_q.models import Task
        from django_q.tasks import async_task

        Task.objects.all().delete()
        with transaction.atomic():
            for number in range(tasks):
                async_task("operator.neg", number)

    def drain(self, tasks: int) -> int:
        """Its cluster, until every task is stored as done."""
        from django_q.cluster import Cluster
        from django_q.models import Task

        cluster = Cluster()
        cluster.start()
        wait_for(lambda: Task.objects.count() >= tasks, "that all is drained", every=0.05)
        cluster.stop()
        return tasks


PEER = DjangoQ2()
