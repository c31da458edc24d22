"""The backend keeps what every backend of Django's tasks promises: in a test, and with a real poller."""

from django.test import TransactionTestCase, override_settings

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.backend import finished_listener
from django_dbtaskqueue.testing import TaskBackendConformance, drain, run_poller

BACKEND = "django_dbtaskqueue.backend.DatabaseTaskBackend"


class BackendCase(TaskBackendConformance, TransactionTestCase):
    """The settings of a site with a queue in each database."""

    databases = {"default", "sqlite"}  # noqa: RUF012 -- as Django declares it

    def setUp(self) -> None:
        self.addCleanup(registry.restore, registry.snapshot())
        self.addCleanup(signals.unregister, finished_listener)
        queues = {"default": ["default", "two"], "lite": ["lite"]}
        tasks = {name: {"BACKEND": BACKEND, "QUEUES": names} for name, names in queues.items()}
        lite = {"database": "sqlite", "keep": "history"}
        self.enterContext(override_settings(TASKS=tasks, DBTASKQUEUE={"QUEUES": {"lite": lite}}))
        super().setUp()


class TestInTests(BackendCase):
    def run_tasks(self) -> None:
        drain(self.queue_name)


class TestOnSqlite(TestInTests):
    """On the other database. Completed tasks leave the table at once; their results are found in the history."""

    backend, database, queue_name = "lite", "sqlite", "lite"


class TestWithAPoller(BackendCase):
    def run_tasks(self) -> None:
        with run_poller(self.queue_name, threads=1):
            pass


del BackendCase, TaskBackendConformance  # they have tests, and pytest would collect them
