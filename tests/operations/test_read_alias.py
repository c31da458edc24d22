"""``READ_ALIAS``: pages and answers are read from a standby, say how old they are, and never fail because of it."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client

from django_dbtaskqueue.backend.results import result_id_of
from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.standby import STANDBY_RETRY_S
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.operations.site import ADMIN, logged_in, post, text
from tests.support import alias_beside

NAMES = "task overview queue poller failuregroup auditentry batch schedule bulkoperation taskhistory doctor"
PAGES = [f"{ADMIN}{name}/" for name in NAMES.split()]
OURS = re.compile(r"\b(?:FROM|INTO|UPDATE) \W*dbtaskqueue_\w+", re.IGNORECASE)


@contextmanager
def replica(settings: Any, **changed: object) -> Iterator[None]:
    """The alias ``replica`` of the database ``default``, or of one like it, is read from."""
    settings.DBTASKQUEUE = {"READ_ALIAS": "replica", "API": True, "QUEUES": {"parcels": {}}}
    standby._failed_until.clear()
    with alias_beside("replica", **changed):
        yield
    standby._failed_until.clear()


@pytest.fixture
def client(postgres_process_database: ProcessDatabase) -> Client:
    return logged_in(User.objects.create_superuser("ada"))


@contextmanager
def asked() -> Iterator[Counter[str]]:
    """Count the statements about tables of the queue, by alias."""
    found: Counter[str] = Counter()

    def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        found[context["connection"].alias] += bool(OURS.search(sql))
        return execute(sql, params, many, context)

    with connections["default"].execute_wrapper(count), connections["replica"].execute_wrapper(count):
        yield found


def test_pages_and_answers_read_from_the_other_alias_and_actions_do_not(client: Client, settings: Any) -> None:
    task = make_task("ERROR")
    with replica(settings):
        for address in [*PAGES, f"{ADMIN}task/{task.pk}/change/", f"{ADMIN}queue/parcels/change/"]:
            with asked() as statements:
                assert "Read from database replica." in text(client.get(address)), address
            assert statements["default"] == 0 < statements["replica"], address
        result_id = result_id_of("default", "dbtaskqueue.task", task.pk, None)  # as Django's tasks name it
        assert len(client.get("/api/tasks", {"q": f"id:{result_id}"}).json()["tasks"]) == 1
        for path in ("tasks", "tasks/count", "queues", f"tasks/{task.pk}"):
            with asked() as statements:
                answer = client.get(f"/api/{path}")
            assert (answer.status_code, answer["X-Read-From"]) == (200, "Read from database replica.")
            assert statements["default"] == 0 < statements["replica"], path
        with asked() as statements:
            client.post(f"{ADMIN}task/", {"action": "reprocess", "_selected_action": [task.pk]})
            assert "because you have just changed something" in text(client.get(f"{ADMIN}task/"))
            assert post(client, "tasks/reprocess/ids", ids=[task.pk]).json()["changed"] == 1
        assert statements["replica"] == 0 and Task.objects.get().status == "CREATED"


@pytest.mark.parametrize("changed", [{"PORT": "1", "HOST": "127.0.0.1"}, {"NAME": "there_is_none"}])
def test_without_the_standby_pages_are_read_from_the_primary_and_say_so(
    client: Client, settings: Any, changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    make_task("ERROR")
    with replica(settings, **changed):
        for _ in range(2):
            assert "Standby replica does not answer: read from the primary." in text(client.get(f"{ADMIN}task/"))
        assert client.get("/api/tasks").json()["tasks"]
    assert caplog.text.count(f"reading from the primary for {STANDBY_RETRY_S:.0f} s") == 1
