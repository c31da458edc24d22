"""The caller's connection: what is prepared and kept on it, where that pays, and where it cannot break."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_dbtaskqueue import DuplicateTask, enqueue, queue
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import MIN_STATEMENTS_TO_PREPARE, Session
from django_dbtaskqueue.models import Task
from tests.support import sql

pytestmark = pytest.mark.django_db(transaction=True)
RENAME = "UPDATE dbtaskqueue_task SET reference_number = %(new)s WHERE reference_number = %(old)s"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    connection.close()
    yield
    connection.close()


def prepared(verb: str = "INSERT INTO") -> int:
    return len(sql("SELECT 1 FROM pg_prepared_statements WHERE statement LIKE %s", [f"{verb} %dbtaskqueue_task%"]))


def test_a_few_go_first_and_then_it_is_prepared_once() -> None:
    for number in range(MIN_STATEMENTS_TO_PREPARE):
        enqueue("parcels", f"r-{number}")
    assert prepared() == 0
    for number in range(5):
        enqueue("parcels", f"s-{number}")
    assert prepared() == 1
    assert connection.connection.prepare_threshold is None  # the site's own statements are prepared as it wishes
    assert Task.objects.count() == MIN_STATEMENTS_TO_PREPARE + 5


def test_take_and_ack_are_prepared_too() -> None:
    parcels = queue("parcels")
    for number in range(2 * MIN_STATEMENTS_TO_PREPARE):
        enqueue("parcels", f"r-{number}")
    while task := parcels.take():
        parcels.ack(task)
    assert prepared("WITH RECURSIVE") == 1, "the priorities"
    assert prepared("UPDATE") == 2, "checkout and settle"


def test_not_where_the_settings_say_no(settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "PREPARE": False}
    for _ in range(2 * MIN_STATEMENTS_TO_PREPARE):
        enqueue("parcels")
    assert prepared() == 0


def test_a_prepared_statement_survives_a_refusal_and_a_rollback() -> None:
    for number in range(2 * MIN_STATEMENTS_TO_PREPARE):
        enqueue("parcels", f"r-{number}")
    with pytest.raises(DuplicateTask):
        enqueue("parcels", "r-0")
    sql("BEGIN")
    enqueue("parcels", "gone")
    sql("ROLLBACK")
    enqueue("parcels", "after")
    assert sorted(Task.objects.exclude(reference__startswith="r-").values_list("reference", flat=True)) == ["after"]


@pytest.mark.parametrize("wrote_before", [False, True])
def test_the_last_statement_ends_a_transaction_that_has_no_other(*, wrote_before: bool) -> None:
    for number in range(2 * MIN_STATEMENTS_TO_PREPARE):
        enqueue("parcels", f"r-{number}")
    session = Session.on("default")
    session.ends = True
    with transaction.atomic():
        if wrote_before:
            enqueue("parcels", "mine")
        session.repeat(RENAME, {"new": "renamed", "old": "r-0"})
        assert seen_by_others("renamed") is not wrote_before and not connection.connection.autocommit
        transaction.set_rollback(True)
    assert connection.connection.autocommit and seen_by_others("renamed") is not wrote_before


def seen_by_others(reference: str) -> bool:
    sql = "SELECT 1 FROM dbtaskqueue_task WHERE reference_number = %(reference)s"
    with closing(Session.open("default")) as other:
        return bool(other.run(sql, {"reference": reference}))


def test_a_connection_of_django_s_test_case_is_prepared_and_that_of_a_tool_not(monkeypatch: pytest.MonkeyPatch) -> None:
    own = connection.cursor
    monkeypatch.setattr(connections["default"], "cursor", own)  # SimpleTestCase leaves it so
    assert not Session.on("default").hooked
    monkeypatch.setattr(connections["default"], "cursor", lambda: own())
    assert Session.on("default").hooked


def test_connections_that_come_and_go_are_not_kept() -> None:
    gone: list[Any] = []
    for _ in range(3):
        enqueue("parcels")
        gone.append(weakref.ref(connection.connection))
        connection.close()
    enqueue("parcels")
    gc.collect()
    assert [one() for one in gone] == [None, None, None] and Task.objects.count() == 4


def test_an_owned_connection_is_none_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for the poller's life and set up in its own way, so no request may ever get it out of a pool."""
    notify.flush()  # one of an earlier test would close its connection under these options
    options = {**connections.settings["default"]["OPTIONS"], "pool": True}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    with closing(Session.open("default")) as session:
        assert session.run("SELECT current_setting('lock_timeout')", {}) == [("250ms",)]
        assert session.connection.pool is None  # type: ignore[attr-defined]
    assert connections.settings["default"]["OPTIONS"]["pool"] is True
