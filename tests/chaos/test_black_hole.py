"""The network drops what is sent, and breaks nothing: a poller says that it waits, and soon works again."""

from datetime import datetime, timedelta

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Attempt, Poller, Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.processes import PollerProcess, statuses, until_all
from tests.conftest import ProcessDatabase
from tests.proxy import Proxy
from tests.support import until


@pytest.fixture
def poller(proxy: Proxy, start: Start, queues: Configure) -> PollerProcess:
    """A poller behind the proxy that has done some tasks, so that all its connections are open."""
    queues(lease="4.5s", max_attempts=1)  # so that a poller waits 1.5 s for an answer, and no task may fail
    enqueue_many("chaos", [{"payload": {"do": "count", "seconds": 0.2}}] * 20)
    found = start(url=proxy.url).ready()
    until_all("COMPLETED")
    return found


@pytest.mark.slow
def test_the_network_is_away(audited: None, poller: PollerProcess, proxy: Proxy) -> None:
    # Given a network that drops everything, for so long that a poller could fill its log
    proxy.silent = True
    proxy.swallow()
    enqueue_many("chaos", [{"payload": {"do": "count"}}] * 20)
    poller.until_logged("Polling failed, trying again until it works")
    connected = proxy.connections
    until(lambda: proxy.connections >= connected + 4)
    assert statuses() == {"COMPLETED": 20, "CREATED": 20}

    # When it is back, then the poller takes tasks, stores the outcomes, and reports
    proxy.silent = False
    back = last_report()
    until_all("COMPLETED")
    poller.until_logged("The database is back")
    poller.until_logged("Heartbeat and rescue work again")
    until(lambda: last_report() > back)
    assert len(poller.log.splitlines()) <= 40
    poller.end()


@pytest.mark.slow
def test_present_connections_fall_silent(poller: PollerProcess, proxy: Proxy) -> None:
    """New ones would work, as behind a firewall that forgot what was connected: no task waits for one, or fails."""
    proxy.swallow()
    silent = last_report()
    enqueue_many("chaos", [{"payload": {"do": "count"}}] * 20)
    until_all("COMPLETED")
    assert set(Task.objects.values_list("attempt", flat=True)) == {1}
    assert not Attempt.objects.exists()
    until(lambda: last_report() > silent + timedelta(seconds=1))
    poller.end()


def last_report() -> datetime:
    return Poller.objects.get().heartbeat_time


def test_the_server_ends_a_statement_whose_poller_has_gone(database: ProcessDatabase) -> None:
    """It would go on for as long as it takes, and hold its locks."""
    session = Session.open("default")
    ((server_process,),) = session.run("SELECT pg_backend_pid()", {})
    raw = session.connection.connection.pgconn
    raw.send_query(b"SELECT pg_sleep(600)")
    raw.finish()

    def present() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [server_process])
            return bool(cursor.fetchone()[0])

    until(lambda: not present())
