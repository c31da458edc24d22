"""The backend keeps what every backend of Django's tasks promises: in a test, and with a real poller."""

from django.test import TransactionTestCase, override_settings

from django_dbtaskqueue import registry, signals
from django_dbtaskqueue.backend import compat, finished_listener
from django_dbtaskqueue.testing import TaskBackendConformance, drain, run_poller
from tests.support import taken_back

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

    def test_the_id_of_a_task_that_was_rolled_back_names_no_other(self) -> None:
        """SQLite gives its number to the next task."""
        from tests.testapp import functions

        add = functions.add.using(backend=self.backend, queue_name=self.queue_name)
        with taken_back(self.database):
            gone = add.enqueue(1, 2)
        kept = add.enqueue(3, 4)
        assert (gone.id[:13], add.get_result(kept.id).args) == (kept.id[:13], [3, 4])
        with self.assertRaises(compat.TaskResultDoesNotExist):
            add.get_result(gone.id)
        self.run_tasks()
        assert add.get_result(kept.id).return_value == 7


class TestWithAPoller(BackendCase):
    def run_tasks(self) -> None:
        with run_poller(self.queue_name, threads=1):
            pass


del BackendCase, TaskBackendConformance  # they have tests, and pytest would collect them
