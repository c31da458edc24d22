"""django-q2 with its ORM broker: a cluster of a pusher, one worker and a monitor, as ``settings.py`` says."""

import os
from collections.abc import Callable

os.environ["BENCHMARK_APPS"] = "django_q"

import django
from django.core.management import call_command
from django.db import transaction

from tests.patience import until

django.setup()
from django_q.cluster import Cluster  # noqa: E402 -- Django must be set up first
from django_q.models import Task  # noqa: E402 -- Django must be set up first
from django_q.tasks import async_task  # noqa: E402 -- Django must be set up first


def install() -> None:
    call_command("migrate", verbosity=0)


def single() -> Callable[[], object]:
    return lambda: async_task("operator.neg", 1, cluster="other")


def fill(tasks: int) -> None:
    """It has no call for many: one transaction round them all."""
    Task.objects.all().delete()
    with transaction.atomic():
        for number in range(tasks):
            async_task("operator.neg", number)


def drain(tasks: int) -> int:
    cluster = Cluster()
    cluster.start()
    until(lambda: Task.objects.count() >= tasks, timeout=300)
    cluster.stop()
    return tasks
