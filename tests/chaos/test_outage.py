"""The database is cut off, crashes, refuses or blocks: pollers stay, nothing is lost, nothing is doubled."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psycopg
import pytest
from django.db import connections, transaction
from django.db.models import Sum

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.models import Attempt, Task
from tests.chaos.conftest import Start
from tests.chaos.load import conserved, producers
from tests.chaos.processes import PollerProcess, audit, clock, statuses, until_all, until_dead
from tests.conftest import ProcessDatabase
from tests.patience import slack
from tests.poller.processes import lines
from tests.support import blocked, eventually, until

PATIENT = {"max_attempts": 100, "lease": "2s"}  # attempts that the storm takes are not the task's fault
ROUNDS = 30  # of cutting all connections
MOST_LINES = 20  # of a poller's log, per outage
RESUME = 3.0  # seconds from the server's return to the next task, and a poll


@contextmanager
def server(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A superuser's connection past the database under test, which may write whatever the default is."""
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        yield connection


def name_of(database: ProcessDatabase) -> str:
    return database.url.rpartition("/")[2]


def terminate(control: psycopg.Connection[tuple[object, ...]], database: ProcessDatabase) -> int:
    """Cut all connections to the database; return how many there were."""
    cut = control.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = %s",
        [name_of(database)],
    )
    return cut.rowcount


@pytest.mark.slow
def until_refused(pg_server: EmbeddedPostgres, database: ProcessDatabase, *, times: int) -> None:
    """Wait until so many transactions more of the database were rolled back."""
    with server(pg_server.url) as control:

        def refused() -> int:
            found = control.execute(
                "SELECT xact_rollback FROM pg_stat_database WHERE datname = %s", [name_of(database)]
            )
            return int(str(found.fetchall()[0][0]))

        before = refused()
        until(lambda: refused() >= before + times)


def test_all_connections_are_cut_again_and_again(
    crash_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    queues(**PATIENT)
    watched = audit()
    pollers = [start(crash_database).ready() for _ in range(2)]

    # When, under load, all connections are cut again and again, each time after some tasks more were done
    with producers(2, tmp_path) as cast, server(pg_server.url) as control:
        cut = 0
        for _ in range(ROUNDS):
            before = sum(len(producer.acknowledged) for producer in cast)
            cut += terminate(control, crash_database)
            until(lambda before=before: sum(len(producer.acknowledged) for producer in cast) > before + 5)

    # Then every task is done, and the pollers have been there all the time
    number = conserved(cast)
    failed = Attempt.objects.count()
    again = Task.objects.aggregate(all=Sum("total_attempt"))["all"] - number
    print(f"{number} tasks; {cut} connections cut; {failed} failed attempts; {again} starts beyond the first")
    assert cut > 4 * ROUNDS
    assert number > 5 * ROUNDS
    assert watched.problems() == []
    for poller in pollers:
        assert poller.code is None
        poller.ready().end()


@pytest.mark.slow
def test_the_server_crashes_under_load(
    crash_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    queues(**PATIENT)
    watched = audit()
    pollers = [start(crash_database).ready() for _ in range(2)]
    with producers(2, tmp_path) as cast:
        until(lambda: len(cast[0].acknowledged) > 20)
        for outage in (1.0, 9.0):
            before = [len(poller.log.splitlines()) for poller in pollers]
            used = [cpu(poller) for poller in pollers]

            # When the server is killed, and comes back
            pg_server.stop("immediate")
            Event().wait(outage)
            share = max(cpu(poller) - seconds for poller, seconds in zip(pollers, used, strict=True)) / outage
            pg_server.restart()
            back = clock_again()

            # Then each poller soon goes on, and has said little about it
            waits = [resumed(poller, back) for poller in pollers]
            said = [len(poller.log.splitlines()) - lines for poller, lines in zip(pollers, before, strict=True)]
            print(f"{outage} s: resumed after {max(waits):.2f} s, {max(said)} log lines, {share:.1%} of a processor")
            assert max(waits) <= RESUME + 0.5 + slack(0.5)
            assert max(said) <= MOST_LINES
    number = conserved(cast)
    print(f"{number} tasks, {sum(len(producer.unknown) for producer in cast)} filings of unknown outcome")
    assert watched.problems() == []
    for poller in pollers:
        poller.ready().end()


def cpu(poller: PollerProcess) -> float:
    times = poller.facts().cpu_times()
    return times.user + times.system


def clock_again() -> float:
    connections["default"].close()
    return clock()


def resumed(poller: PollerProcess, back: float) -> float:
    """Wait for the first task this poller completes after ``back``; return the seconds until then."""
    mine = Task.objects.filter(poller_instance__contains=f":{poller.pid}:", status="COMPLETED")

    def first() -> float:
        done = [when.timestamp() for when in mine.values_list("start_time", flat=True) if when.timestamp() > back]
        assert done, poller.log[-2000:]
        return min(done) - back

    return eventually(first)


def test_a_read_only_spell(
    crash_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Given tasks that run
    queues(lease="60s")
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 4)
    poller = start(crash_database).ready()
    until(lambda: statuses(queue="chaos") == {"PROCESSING": 4})

    # When the server takes no writes any more, and they end
    with read_only(pg_server):
        poller.until_logged("Heartbeat and rescue fail")
        gate.touch()
        poller.until_logged("Polling failed")
        until_refused(pg_server, crash_database, times=10)
        assert statuses(queue="chaos") == {"PROCESSING": 4}

    # Then their outcomes are stored when it does again, at the first attempt, and polling goes on
    until_all("COMPLETED")
    poller.until_logged("The database is back")
    assert set(Task.objects.filter(queue="chaos").values_list("total_attempt", flat=True)) == {1}
    assert "could not be stored" not in poller.log, "it is not the outcomes' fault"
    assert len(poller.log.splitlines()) <= MOST_LINES
    poller.ready().end()


@contextmanager
def read_only(pg_server: EmbeddedPostgres) -> Iterator[None]:
    """The server refuses writes, as one that was demoted does."""
    with server(pg_server.url) as control:
        control.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        control.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            control.execute("ALTER SYSTEM RESET default_transaction_read_only")
            control.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("timeout", ["lock_timeout", "statement_timeout"])
def test_an_outcome_whose_statement_is_cancelled_is_written_later(
    timeout: str,
    crash_database: ProcessDatabase,
    pg_server: EmbeddedPostgres,
    start: Start,
    queues: Callable[..., None],
    tmp_path: Path,
) -> None:
    # Given a task that runs, and statements that are cancelled when they wait for 50 ms
    queues(lease="60s")
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    task = enqueue("chaos", None, {"do": "hold", "until": str(gate), "mark": str(mark)})
    poller = start(crash_database).ready()
    until(lambda: len(lines(mark)) == 1)
    with server(pg_server.url) as control:
        control.execute(f'ALTER DATABASE "{name_of(crash_database)}" SET {timeout} = 50')
        terminate(control, crash_database)
    connections["default"].close()
    poller.until_logged("The database is back")

    # When somebody else holds its row while it ends, for much longer
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=task.pk)
        gate.touch()
        until_refused(pg_server, crash_database, times=3)
        assert statuses() == {"PROCESSING": 1}

    # Then its outcome is stored afterwards, and it did not run again
    until_all("COMPLETED")
    assert len(lines(mark)) == 1
    assert Task.objects.get().total_attempt == 1
    poller.ready().end()


def test_outcomes_that_could_not_be_flushed_die_with_their_poller_and_are_made_again(
    postgres_process_database: ProcessDatabase, start: Start, queues: Callable[..., None], tmp_path: Path
) -> None:
    queues(lease="2s")
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 8)
    poller = start(postgres_process_database)
    until(lambda: statuses().get("PROCESSING") == 4)

    # Given a table that is locked while outcomes wait to be written
    with transaction.atomic(), connections["default"].cursor() as cursor:
        cursor.execute("LOCK TABLE dbtaskqueue_task")
        gate.touch()
        until(blocked)
        # When the poller dies
        poller.signal(signal.SIGKILL)
        until_dead(poller)

    # Then another one does all of it
    other = start(postgres_process_database)
    until_all("COMPLETED")
    assert sorted(Task.objects.values_list("attempt", flat=True)) == [1, 1, 1, 1, 2, 2, 2, 2]
    other.end()
