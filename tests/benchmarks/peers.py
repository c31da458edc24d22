"""Others, each through its public interface with settings that suit a drain: a process of its own, for a ``Worker``.

``python -m tests.benchmarks.peers NAME install | single | fill N | drain N`` makes its tables, enqueues one task in a
transaction of its own, again and again, enqueues many in the way it offers for many, or processes until nothing waits.
"""

import asyncio
import os
import sys
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import django
from django.core.management import call_command
from django.db import transaction

from tests.benchmarks.children import at_go, timed
from tests.benchmarks.producer import per_second
from tests.patience import until

URL = os.environ["DATABASE_URL"]
APPS = [app for app in ("django_tasks_db", "django_q") if find_spec(app)]
done: list[object] = []
os.environ["BENCHMARK_APPS"] = ",".join(APPS)
django.setup()


class Pgqueuer:
    """asyncio and asyncpg, batches of 500 as ours at both ends. Finished jobs go to its log table."""

    def __init__(self) -> None:
        import asyncpg
        from pgqueuer import AsyncpgDriver, PgQueuer, Queries

        self.run = asyncio.new_event_loop().run_until_complete
        driver = AsyncpgDriver(self.run(asyncpg.connect(URL)))
        self.queries, self.queuer = Queries(driver), PgQueuer(driver)

    def install(self) -> None:
        self.run(self.queries.install())

    def single(self) -> None:
        self.run(self.queries.enqueue("other", b'{"number": 1}'))

    def fill(self, tasks: int) -> None:
        payloads = [b'{"number": %d}' % number for number in range(tasks)]
        self.run(self.queries.enqueue(["nothing"] * tasks, payloads, [0] * tasks))

    def drain(self, _tasks: int) -> None:
        from pgqueuer.types import QueueExecutionMode

        @self.queuer.entrypoint("nothing")
        async def nothing(job: object) -> None:
            done.append(job)

        wait = timedelta(seconds=1)
        self.run(self.queuer.qm.run(batch_size=500, dequeue_timeout=wait, mode=QueueExecutionMode.drain))


class Procrastinate:
    """asyncio, one statement per job, ten jobs at a time; finished ones are kept."""

    def __init__(self) -> None:
        import procrastinate

        self.app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))
        self.sync = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=URL))  # as a view has it
        self.sync.open()
        self.other = self.sync.configure_task("nothing", queue="other")

        @self.app.task(queue="benchmark", name="nothing")
        async def nothing(number: int) -> None:
            done.append(number)

    def install(self) -> None:
        self.sync.schema_manager.apply_schema()

    def single(self) -> None:
        self.other.defer(number=1)

    def fill(self, tasks: int) -> None:
        many = ({"number": number} for number in range(tasks))
        self.sync.configure_task("nothing", queue="benchmark").batch_defer(*many)

    def drain(self, _tasks: int) -> None:
        async def run() -> None:
            options = {"concurrency": 10, "wait": False, "install_signal_handlers": False}
            async with self.app.open_async():
                await self.app.run_worker_async(queues=["benchmark"], **options)

        asyncio.run(run())


class OnDjango:
    """One that lives in a Django project. It has no call for many: one transaction round them all."""

    def install(self) -> None:
        call_command("migrate", verbosity=0)

    def fill(self, tasks: int) -> None:
        with transaction.atomic():
            for number in range(tasks):
                self.enqueue(number)


class DjangoTasksDb(OnDjango):
    """The database backend of Django's tasks framework. Its worker takes one task at a time."""

    def enqueue(self, number: int) -> None:
        nothing.enqueue(number)

    def single(self) -> None:
        nothing.using(queue_name="other").enqueue(1)

    def drain(self, _tasks: int) -> None:
        call_command("db_worker", batch=True, startup_delay=False, verbosity=0)


if "django_tasks_db" in APPS:
    # Django 6 brings the framework; before, it is a package.
    framework = import_module("django.tasks" if find_spec("django.tasks") else "django_tasks")

    @framework.task()
    def nothing(number: int) -> None:
        done.append(number)


class DjangoQ2(OnDjango):
    """With its ORM broker: a cluster of a pusher, one worker and a monitor, as ``settings.py`` says."""

    def __init__(self) -> None:
        from django_q.cluster import Cluster
        from django_q.models import Task
        from django_q.tasks import async_task

        self.tasks, self.async_task, self.cluster = Task.objects, async_task, Cluster()

    def enqueue(self, number: int) -> None:
        self.async_task("operator.neg", number)

    def single(self) -> None:
        self.async_task("operator.neg", 1, cluster="other")

    def fill(self, tasks: int) -> None:
        self.tasks.all().delete()  # which a drain counts
        super().fill(tasks)

    def drain(self, tasks: int) -> None:
        self.cluster.start()
        until(lambda: self.tasks.count() >= tasks, timeout=300)
        self.cluster.stop()
        done.extend(range(tasks))


PEERS: dict[str, Any] = {"pgqueuer": Pgqueuer, "procrastinate": Procrastinate}
PEERS |= {"django_tasks_db": DjangoTasksDb, "django_q2": DjangoQ2}


def act(peer: Any, way: str, *arguments: str) -> int:
    getattr(peer, way)(*map(int, arguments))
    return len(done)


if __name__ == "__main__":
    name, *way = sys.argv[1:]
    peer = PEERS[name]()
    at_go(lambda: per_second(peer.single) if way == ["single"] else timed(lambda: act(peer, *way)))
    os._exit(0)  # some leave threads or processes behind
