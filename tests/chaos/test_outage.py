"""The database is cut off, crashes or is away: pollers stay, nothing is lost, nothing is doubled."""

from datetime import timedelta

import pytest
from django.db import connections

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Attempt, Poller, Task
from tests.chaos.processes import Configure, Start, on, statuses, until_all
from tests.conftest import ProcessDatabase
from tests.proxy import Proxy
from tests.support import sql, until
from tests.testapp.models import Booking


@on("crash_database")
def test_pollers_wait_for_a_server_and_say_so_once(audited: None, pg_server: EmbeddedPostgres, start: Start) -> None:
    pollers = [start(queue=queue).ready() for queue in ("chaos", "ledger")]
    said = [len(poller.log.splitlines()) for poller in pollers]
    pg_server.stop("immediate")
    for poller in pollers:
        for told in ("Polling failed", "Heartbeat and rescue fail"):
            poller.until_logged(told)
    pg_server.restart()
    connections["default"].close()
    for queue in ("chaos", "ledger"):
        Booking.objects.create(reference=queue)
        enqueue(queue, queue, {"do": "bump"})
    until_all("COMPLETED")
    assert set(Booking.objects.values_list("amount", flat=True)) == {1}
    for poller, before in zip(pollers, said, strict=True):
        for told in ("The database is back", "Heartbeat and rescue work again"):
            poller.until_logged(told)
        assert len(poller.log.splitlines()) - before <= 20
        poller.ready().stop()


@on("crash_database")
@pytest.mark.parametrize("option", ["--once", "--drain"])
def test_a_run_that_ends_by_itself_waits_for_a_server(pg_server: EmbeddedPostgres, start: Start, option: str) -> None:
    enqueue("chaos", "one", {"do": "count"})
    pg_server.stop("immediate")
    poller = start(option)
    poller.until_logged("Polling failed")
    pg_server.restart()
    poller.ended()
    connections["default"].close()
    assert statuses() == {"COMPLETED": 1}


@pytest.mark.slow
def test_present_connections_fall_silent(proxy: Proxy, start: Start, queues: Configure) -> None:
    """New ones would work, as behind a firewall that forgot what was connected: no task waits for one, or fails."""
    queues(lease="4.5s", max_attempts=1)  # so that a poller waits 1.5 s for an answer, and no task may fail
    enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * 20)  # which open all its connections
    poller, reports = start(url=proxy.url).ready(), Poller.objects.values_list("heartbeat_time", flat=True)
    until_all("COMPLETED")
    proxy.swallow()
    silent = reports.get()
    enqueue_many("chaos", [{"payload": {"do": "count"}}] * 20)
    until_all("COMPLETED")
    assert set(Task.objects.values_list("attempt", flat=True)) == {1} and not Attempt.objects.exists()
    until(lambda: reports.get() > silent + timedelta(seconds=1))
    poller.stop()


def test_the_server_ends_a_statement_whose_poller_has_gone(database: ProcessDatabase) -> None:
    """It would go on for as long as it takes, and hold its locks."""
    session = Session.open("default")
    ((server_process,),) = session.run("SELECT pg_backend_pid()", {})
    raw = session.connection.connection.pgconn
    raw.send_query(b"SELECT pg_sleep(600)")
    raw.finish()
    until(lambda: not sql("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [server_process]))
