"""The database is cut off, crashes, refuses or blocks: pollers stay, nothing is lost, nothing is doubled."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from threading import Event

import psycopg
import pytest
from django.db import connection, connections, transaction
from django.db.utils import Error

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.models import Attempt, Poller, Task
from tests.chaos.processes import Configure, PollerProcess, Start, on, statuses, until_all, until_dead
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines
from tests.proxy import Proxy
from tests.support import PATIENCE, actors, blocked, until
from tests.testapp.models import Booking

ROUNDS = 6  # of cutting all connections
MAX_LOG_LINES = 20  # of a poller, per outage
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND datname = %s AND pid <> pg_backend_pid()
"""


def file_orders(acknowledged: set[str], over: Event) -> None:
    """File a booking and its task in one transaction, again and again, to each queue in turn, whatever happens."""
    for number in count():
        try:
            with transaction.atomic():
                Booking.objects.create(reference=f"order-{number}")
                enqueue(("chaos", "ledger")[number % 2], f"order-{number}", {"do": "bump"})
            acknowledged.add(f"order-{number}")
        except Error:
            connections["default"].close()
        if over.wait(1 / 50):
            return


@contextmanager
def server(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A superuser's connection past the database under test, which may write whatever the default is."""
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        yield connection


def name_of(database: ProcessDatabase) -> str:
    return database.url.rpartition("/")[2]


def terminate(control: psycopg.Connection[tuple[object, ...]], database: ProcessDatabase) -> int:
    return control.execute(CUT, [name_of(database)]).rowcount


def until_refused(control: psycopg.Connection[tuple[object, ...]], database: ProcessDatabase, times: int) -> None:
    """Wait until so many transactions more of the database were rolled back."""

    def refused() -> int:
        found = control.execute("SELECT xact_rollback FROM pg_stat_database WHERE datname = %s", [name_of(database)])
        return int(str(found.fetchall()[0][0]))

    before = refused()
    until(lambda: refused() >= before + times)


@on("crash_database")
def test_the_server_is_cut_off_again_and_again_and_crashes(
    audited: None, database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, queues: Configure
) -> None:
    queues(max_attempts=100)  # attempts that the storm takes are not the task's fault
    pollers, acknowledged, over = [start().ready() for _ in range(2)], set[str](), Event()
    with actors(1) as (producer,):
        filing = producer.do(file_orders, acknowledged, over)

        def until_filed() -> None:
            before = len(acknowledged)
            until(lambda: len(acknowledged) > before + 5)

        # When, under load, all connections are cut again and again, each time after some tasks more were filed
        with server(pg_server.url) as control:
            for _ in range(ROUNDS):
                assert terminate(control, database)
                until_filed()

        # ... and the server crashes, stays away until the pollers have noticed it, and comes back
        said = [len(poller.log.splitlines()) for poller in pollers]
        pg_server.stop("immediate")
        for poller in pollers:
            until(lambda poller=poller: is_without_database(poller.log))
        pg_server.restart()
        connections["default"].close()
        until_filed()

        # Then each poller takes tasks again, and has said little about it
        mine = Task.objects.filter(status="COMPLETED")
        newest = max(Task.objects.values_list("pk", flat=True))
        for poller, lines_before in zip(pollers, said, strict=True):
            until(mine.filter(poller_instance__contains=f":{poller.pid}:", pk__gt=newest).exists)
            assert len(poller.log.splitlines()) - lines_before <= MAX_LOG_LINES
        over.set()
        filing.result(PATIENCE)

    until_all("COMPLETED")
    present = set(Task.objects.values_list("reference", flat=True))
    assert acknowledged <= present == set(Booking.objects.values_list("reference", flat=True))
    in_ledger = Task.objects.filter(queue="ledger").values("reference")
    assert set(Booking.objects.filter(reference__in=in_ledger).values_list("amount", flat=True)) == {1}
    for poller in pollers:
        assert poller.code is None
        poller.ready().end()


def is_without_database(log: str) -> bool:
    """Whether a poller has said so, and not yet that the database is back: it says each once for an outage."""
    polls = log.count("Polling failed") > log.count("The database is back")
    return polls and log.count("Heartbeat and rescue fail") > log.count("Heartbeat and rescue work again")


@on("crash_database")
@pytest.mark.parametrize("option", ["--once", "--drain"])
def test_a_run_that_ends_by_itself_waits_for_a_server_that_is_away(
    database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, option: str
) -> None:
    enqueue("chaos", "one", {"do": "count"})
    pg_server.stop("immediate")
    poller = start(option)
    poller.until_logged("Polling failed")
    pg_server.restart()
    poller.ended()
    connections["default"].close()
    assert statuses() == {"COMPLETED": 1}


@on("crash_database")
def test_a_read_only_time(database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 4)
    poller = start().ready()
    until(lambda: statuses(queue="chaos") == {"PROCESSING": 4})

    with read_only(pg_server) as control:
        poller.until_logged("Heartbeat and rescue fail")
        gate.touch()
        poller.until_logged("Polling failed")
        until_refused(control, database, times=4)
        assert statuses(queue="chaos") == {"PROCESSING": 4}

    # Then their outcomes are stored when it does again, at the first attempt, and polling goes on
    until_all("COMPLETED")
    poller.until_logged("The database is back")
    assert set(Task.objects.filter(queue="chaos").values_list("total_attempt", flat=True)) == {1}
    assert "could not be stored" not in poller.log, "it is not the outcomes' fault"
    assert len(poller.log.splitlines()) <= MAX_LOG_LINES
    poller.ready().end()


@contextmanager
def read_only(pg_server: EmbeddedPostgres) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """The server refuses writes, as one that was demoted does."""
    with server(pg_server.url) as control:
        control.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        control.execute("SELECT pg_reload_conf()")
        try:
            yield control
        finally:
            control.execute("ALTER SYSTEM RESET default_transaction_read_only")
            control.execute("SELECT pg_reload_conf()")


def test_a_cancelled_statement_is_tried_again(database: ProcessDatabase, start: Start, tmp_path: Path) -> None:
    poller = start().ready()
    with server(database.url) as control:
        for number, timeout in enumerate(("lock_timeout", "statement_timeout"), 1):
            mark, gate = tmp_path / f"{timeout} mark", tmp_path / f"{timeout} gate"
            task = enqueue("chaos", timeout, {"do": "hold", "until": str(gate), "mark": str(mark)})
            until(lambda mark=mark: len(lines(mark)) == 1)
            control.execute(f'ALTER DATABASE "{name_of(database)}" SET {timeout} = 50')
            terminate(control, database)
            connections["default"].close()
            poller.until_logged("The database is back", times=number)

            # When somebody else holds its row while it ends, for much longer
            with transaction.atomic():
                Task.objects.select_for_update().get(pk=task.pk)
                gate.touch()
                until_refused(control, database, times=3)
                assert statuses(pk=task.pk) == {"PROCESSING": 1}
            until_all("COMPLETED")
            assert len(lines(mark)) == 1
            task.refresh_from_db()
            assert task.total_attempt == 1
            control.execute(f'ALTER DATABASE "{name_of(database)}" RESET {timeout}')
    poller.ready().end()


def test_outcomes_that_were_not_flushed_die_with_their_poller_and_are_made_again(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 8)
    poller = start()
    until(lambda: statuses().get("PROCESSING") == 4)
    with transaction.atomic(), connections["default"].cursor() as cursor:
        cursor.execute("LOCK TABLE dbtaskqueue_task")
        gate.touch()
        until(blocked)
        poller.signal(signal.SIGKILL)
        until_dead(poller)
    other = start()
    until_all("COMPLETED")
    assert sorted(Task.objects.values_list("attempt", flat=True)) == [1, 1, 1, 1, 2, 2, 2, 2]
    other.end()


# -- the network drops what is sent, and breaks nothing: a poller says that it waits, and soon works again -------------


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
