"""``READ_ALIAS``: pages and answers are read from a standby, say how old they are, and never fail because of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.db import connections
from django.test import Client

from django_dbtaskqueue.db import standby
from django_dbtaskqueue.db.standby import STANDBY_RETRY_S
from django_dbtaskqueue.models import Task
from tests.conftest import ProcessDatabase
from tests.factories import make_task

ADMIN, API = "/admin/dbtaskqueue/", "/api/"
PAGES = [f"{ADMIN}{name}/" for name in ("task", "overview", "queue", "poller", "failuregroup", "auditentry", "batch",
                                        "schedule", "bulkoperation", "taskhistory", "doctor")]  # fmt: skip
pytestmark = pytest.mark.urls("tests.operations.test_api")  # which opens the API
OURS = re.compile(r"\b(?:FROM|INTO|UPDATE) \W*dbtaskqueue_\w+", re.IGNORECASE)


@contextmanager
def alias_of(name: str, settings: Any, **changed: object) -> Iterator[None]:
    """Another alias of the database ``default``, or of one like it."""
    connections.settings[name] = {**connections["default"].settings_dict, **changed}
    settings.DBTASKQUEUE = {"READ_ALIAS": name, "API": True, "QUEUES": {"parcels": {}}}
    standby._failed_until.clear()
    try:
        yield
    finally:
        connections[name].close()
        del connections[name], connections.settings[name]
        standby._failed_until.clear()


@pytest.fixture
def client(postgres_process_database: ProcessDatabase) -> Client:
    return logged_in()


def logged_in() -> Client:
    User.objects.create_superuser("ada", password="secret")
    found = Client()
    assert found.login(username="ada", password="secret")
    return found


@contextmanager
def counted(*aliases: str) -> Iterator[Counter[str]]:
    """Count the statements about tables of the queue, by alias."""
    found: Counter[str] = Counter()

    def counting(alias: str) -> Any:
        def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            found[alias] += bool(OURS.search(sql))
            return execute(sql, params, many, context)

        return connections[alias].execute_wrapper(count)

    with ExitStack() as stack:
        for alias in aliases:
            stack.enter_context(counting(alias))
        yield found


def test_pages_and_answers_read_from_the_other_alias_and_actions_do_not(client: Client, settings: Any) -> None:
    task = make_task("ERROR")
    with alias_of("replica", settings):
        for address in [*PAGES, f"{ADMIN}task/{task.pk}/change/", f"{ADMIN}queue/parcels/change/"]:
            with counted("default", "replica") as statements:
                page = client.get(address)
            assert page.status_code == 200
            assert b"Read from database replica." in page.content, address
            assert statements["default"] == 0 < statements["replica"], address
        for path in ("tasks", "tasks/count", "queues", f"tasks/{task.pk}"):
            with counted("default", "replica") as statements:
                answer = client.get(f"{API}{path}")
            assert answer.status_code == 200
            assert answer["X-Read-From"] == "Read from database replica."
            assert statements["default"] == 0 < statements["replica"], path
        with counted("default", "replica") as statements:
            answer = client.post(f"{API}tasks/reprocess/ids", {"ids": [task.pk]}, content_type="application/json")
        assert answer.json()["changed"] == 1
        assert statements["replica"] == 0
        assert Task.objects.get().status == "CREATED"


def test_after_a_change_its_author_reads_from_the_primary(client: Client, settings: Any) -> None:
    task = make_task("ERROR")
    with alias_of("replica", settings):
        change = {"action": "reprocess", "_selected_action": [task.pk], "confirmed": "1"}
        client.post(f"{ADMIN}task/", change)
        with counted("default", "replica") as statements:
            page = client.get(f"{ADMIN}task/")
        assert b"because you have just changed something" in page.content
        assert statements["replica"] == 0


@pytest.mark.parametrize("changed", [{"PORT": "1", "HOST": "127.0.0.1"}, {"NAME": "there_is_none"}])
def test_without_the_standby_pages_are_read_from_the_primary_and_say_so(
    client: Client, settings: Any, changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    make_task("ERROR")
    with alias_of("replica", settings, **changed):
        for _ in range(2):
            page = client.get(f"{ADMIN}task/")
            assert page.status_code == 200
            assert b"Standby replica does not answer: read from the primary." in page.content
        assert client.get(f"{API}tasks").json()["tasks"]
    assert caplog.text.count(f"reading from the primary for {STANDBY_RETRY_S:.0f} s") == 1


def test_an_alias_that_does_not_exist_is_found_by_the_checks(settings: Any) -> None:
    settings.DBTASKQUEUE = {"READ_ALIAS": {"default": "moon"}}
    (error,) = run_checks(tags=["dbtaskqueue"])
    assert error.id == "dbtaskqueue.E013" and "moon" in error.msg
