"""The database is cut off, crashes, refuses or blocks: pollers stay, nothing is lost, nothing is doubled."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from django.db import connections, transaction

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.models import Task
from tests.chaos.conftest import Configure, Start
from tests.chaos.load import conserved, producers
from tests.chaos.processes import audit, statuses, until_all, until_dead
from tests.conftest import ProcessDatabase
from tests.poller.processes import lines
from tests.support import blocked, until

ROUNDS = 6  # of cutting all connections
MAX_LOG_LINES = 20  # of a poller, per outage


@contextmanager
def server(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A superuser's connection past the database under test, which may write whatever the default is."""
    with psycopg.connect(url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        yield connection


def name_of(database: ProcessDatabase) -> str:
    return database.url.rpartition("/")[2]


def terminate(control: psycopg.Connection[tuple[object, ...]], database: ProcessDatabase) -> int:
    """Cut all other connections to the database; return how many there were."""
    cut = control.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND datname = %s AND pid <> pg_backend_pid()",
        [name_of(database)],
    )
    return cut.rowcount


def until_refused(control: psycopg.Connection[tuple[object, ...]], database: ProcessDatabase, times: int) -> None:
    """Wait until so many transactions more of the database were rolled back."""

    def refused() -> int:
        found = control.execute("SELECT xact_rollback FROM pg_stat_database WHERE datname = %s", [name_of(database)])
        return int(str(found.fetchall()[0][0]))

    before = refused()
    until(lambda: refused() >= before + times)


def test_the_server_is_cut_off_again_and_again_and_crashes(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, queues: Configure, tmp_path: Path
) -> None:
    queues(max_attempts=100)  # attempts that the storm takes are not the task's fault
    watched = audit()
    pollers = [start(crash_database).ready() for _ in range(2)]
    with producers(2, tmp_path) as cast:

        def filed() -> int:
            return sum(len(producer.acknowledged) for producer in cast)

        # When, under load, all connections are cut again and again, each time after some tasks more were filed
        with server(pg_server.url) as control:
            cut = 0
            for _ in range(ROUNDS):
                before = filed()
                cut += terminate(control, crash_database)
                until(lambda before=before: filed() > before + 5)

        # ... and the server crashes, stays away until the pollers have noticed it, and comes back
        said = [len(poller.log.splitlines()) for poller in pollers]
        pg_server.stop("immediate")
        for poller in pollers:
            until(lambda poller=poller: is_without_database(poller.log))
        pg_server.restart()
        connections["default"].close()
        before = filed()
        until(lambda: filed() > before + 5)

        # Then each poller takes tasks again, and has said little about it
        mine = Task.objects.filter(status="COMPLETED")
        newest = max(Task.objects.values_list("pk", flat=True))
        for poller, lines_before in zip(pollers, said, strict=True):
            until(mine.filter(poller_instance__contains=f":{poller.pid}:", pk__gt=newest).exists)
            assert len(poller.log.splitlines()) - lines_before <= MAX_LOG_LINES

    # ... and every task is done, and the pollers have been there all the time
    number = conserved(cast)
    assert cut > 4 * ROUNDS
    assert number > 5 * ROUNDS
    assert watched.problems() == []
    for poller in pollers:
        assert poller.code is None
        poller.ready().end()


def is_without_database(log: str) -> bool:
    """Whether a poller has said so, and not yet that the database is back: it says each once for an outage."""
    polls = log.count("Polling failed") > log.count("The database is back")
    return polls and log.count("Heartbeat and rescue fail") > log.count("Heartbeat and rescue work again")


def test_a_read_only_spell(
    crash_database: ProcessDatabase, pg_server: EmbeddedPostgres, start: Start, queues: Configure, tmp_path: Path
) -> None:
    # Given tasks that run
    gate = tmp_path / "gate"
    enqueue_many("chaos", [{"payload": {"do": "hold", "until": str(gate)}}] * 4)
    poller = start(crash_database).ready()
    until(lambda: statuses(queue="chaos") == {"PROCESSING": 4})

    # When the server takes no writes any more, and they end
    with read_only(pg_server) as control:
        poller.until_logged("Heartbeat and rescue fail")
        gate.touch()
        poller.until_logged("Polling failed")
        until_refused(control, crash_database, times=4)
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


def test_an_outcome_whose_statement_is_cancelled_is_written_later(
    postgres_process_database: ProcessDatabase, start: Start, queues: Configure, tmp_path: Path
) -> None:
    database = postgres_process_database
    poller = start(database).ready()
    with server(database.url) as control:
        for number, timeout in enumerate(("lock_timeout", "statement_timeout"), 1):
            # Given a task that runs, and statements that are cancelled when they wait for 50 ms
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

            # Then its outcome is stored afterwards, and it did not run again
            until_all("COMPLETED")
            assert len(lines(mark)) == 1
            task.refresh_from_db()
            assert task.total_attempt == 1
            control.execute(f'ALTER DATABASE "{name_of(database)}" RESET {timeout}')
    poller.ready().end()


def test_outcomes_that_could_not_be_flushed_die_with_their_poller_and_are_made_again(
    postgres_process_database: ProcessDatabase, start: Start, queues: Configure, tmp_path: Path
) -> None:
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
