"""The network drops what is sent, and breaks nothing: a poller says that it waits, and soon works again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from django.db import connection

from django_dbtaskqueue import enqueue_many, models
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Task
from tests.chaos.conftest import Start
from tests.chaos.processes import PollerProcess, audit, clock, until_all
from tests.chaos.proxy import Proxy, proxied
from tests.conftest import ProcessDatabase
from tests.support import eventually, until

SHORT = {"lease": "3s", "max_attempts": 10}
BACK = 5.0  # seconds from the network's return to the next checkout


@pytest.fixture
def proxy(postgres_process_database: ProcessDatabase) -> Iterator[Proxy]:
    with proxied(postgres_process_database.url) as found:
        yield found


@pytest.fixture
def poller(
    postgres_process_database: ProcessDatabase, proxy: Proxy, start: Start, queues: Callable[..., None]
) -> PollerProcess:
    """A poller behind the proxy that has done some tasks, so that all its connections are open."""
    queues(**SHORT)
    enqueue_many("chaos", [{}] * 20)
    found = start(replace(postgres_process_database, url=proxy.url)).ready()
    until_all("COMPLETED")
    return found


@pytest.mark.slow
def test_the_network_is_away(poller: PollerProcess, proxy: Proxy, tmp_path: Path) -> None:
    # Given tasks that run, and a network that drops everything
    watched, gate = audit(), tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 2)
    until(lambda: Task.objects.filter(status="PROCESSING").count() == 2)
    proxy.silent = True
    proxy.swallow()
    enqueue_many("chaos", [{}] * 20)
    gate.touch()

    # Then the poller says that it waits
    poller.until_logged("Polling failed, trying again until it works")
    Event().wait(6)
    assert Task.objects.filter(queue="chaos").exclude(status="COMPLETED").count() == 22

    # When the network is back
    proxy.silent = False
    back = clock()

    # Then it soon takes tasks, stores the outcomes, and reports
    until_all("COMPLETED")
    assert first_start_after(back) - back < BACK
    poller.until_logged("The database is back")
    poller.until_logged("Heartbeat and rescue work again")
    eventually(lambda: reported_after(back))
    assert watched.problems() == []
    assert len(poller.log.splitlines()) <= 40
    poller.end()


def test_present_connections_fall_silent(poller: PollerProcess, proxy: Proxy) -> None:
    # When new connections would work, but no present one does, as behind a firewall that forgot them
    proxy.swallow()
    silent = clock()
    enqueue_many("chaos", [{}] * 20)

    # Then the tasks are done, and the heartbeat goes on
    until_all("COMPLETED")
    eventually(lambda: reported_after(silent + 1))
    poller.end()


def first_start_after(moment: float) -> float:
    starts = Task.objects.filter(queue="chaos").values_list("start_time", flat=True)
    return min(start.timestamp() for start in starts if start and start.timestamp() > moment)


def reported_after(moment: float) -> None:
    assert models.Poller.objects.get().heartbeat_time.timestamp() > moment


def test_the_server_ends_a_statement_whose_poller_has_gone(postgres_process_database: ProcessDatabase) -> None:
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
