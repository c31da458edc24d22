"""A standby that really follows: pages read from it say how old they are, and pollers follow when it takes over."""

import re
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, OperationalError, connection
from pytest_django import DjangoDbBlocker

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.models import Task
from tests.chaos.processes import Start, on, statuses
from tests.conftest import ProcessDatabase, _as_default
from tests.factories import make_task
from tests.faults.standby import Standby
from tests.operations.test_read_alias import ADMIN, alias_of, logged_in
from tests.poller.processes import lines
from tests.support import PATIENCE, actors, eventually, until
from tests.testapp.models import Booking

QUEUES = ("work", "atomic", "aio")


@pytest.fixture(scope="module")
def standbys(pg_server: EmbeddedPostgres) -> Iterator[list[Standby]]:
    """The standby that tests share until one of them promotes it."""
    found: list[Standby] = []
    yield found
    wait_for_no_standby(pg_server)
    for one in found:
        discard(one)


@pytest.fixture
def standby(standbys: list[Standby], pg_server: EmbeddedPostgres) -> Standby:
    """A synchronous standby. Ask for it before ``crash_database``: its first start restarts the primary."""
    if not standbys:
        root = Path(tempfile.mkdtemp(prefix="dbtaskqueue-standby-"))
        root.chmod(0o755)  # the account of PostgreSQL reads it
        standbys.append(Standby(pg_server, root, None))
    return standbys[0]


def discard(standby: Standby) -> None:
    standby.close()
    shutil.rmtree(standby.server.root)


def wait_for_no_standby(primary: EmbeddedPostgres) -> None:
    """Let the primary commit alone again."""
    control(primary, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def control(server: EmbeddedPostgres, *statements: str) -> None:
    with psycopg.connect(server.url, autocommit=True) as connected:
        for statement in statements:
            connected.execute(statement)


@contextmanager
def crashed(primary: EmbeddedPostgres) -> Iterator[None]:
    """The primary is gone; on the way out it runs again, alone."""
    primary.stop("immediate")
    try:
        yield
    finally:
        primary.restart()
        wait_for_no_standby(primary)


def until_replayed(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Wait until a standby shows what the primary has committed. A page leaves one alone that fails, for 10 s."""
    with psycopg.connect(primary.url) as connected:
        ((written,),) = connected.execute("SELECT pg_current_wal_lsn()").fetchall()
    with psycopg.connect(standby.url, autocommit=True) as connected:
        query = "SELECT 1 WHERE pg_last_wal_replay_lsn() >= %s::pg_lsn"
        until(lambda: connected.execute(query, [written]).fetchall())


@on("crash_database")
def test_pages_say_how_far_a_standby_is_behind(
    standby: Standby, pg_server: EmbeddedPostgres, database: ProcessDatabase, settings: Any
) -> None:
    make_task("ERROR", reference="before")
    client = logged_in()
    until_replayed(pg_server, standby.server)

    def page() -> tuple[str, str]:
        text = client.get(f"{ADMIN}task/").content.decode()
        (said,) = re.findall(r'id="dbtq-where-read">([^<]*)', text)
        return said, "".join(name for name in ("before", "after") if f">{name}<" in text)

    def reads(said: str, rows: str) -> None:
        assert page() == (said, rows)

    with alias_of("replica", settings, PORT=str(standby.server.port)):
        eventually(lambda: reads("Read from standby replica, 0s behind.", "before"))
        control(standby.server, "SELECT pg_wal_replay_pause()")
        try:
            make_task("ERROR", reference="after")  # the standby has it, and does not replay it

            def lags() -> None:
                said, rows = page()
                assert re.fullmatch(r"Read from standby replica, (?!0s)\S+ behind\.", said), said
                assert rows == "before"

            eventually(lags)
        finally:
            control(standby.server, "SELECT pg_wal_replay_resume()")
        eventually(lambda: reads("Read from standby replica, 0s behind.", "beforeafter"))


@on("crash_database")
@pytest.mark.parametrize(("tasks", "kills"), [(60, 0), pytest.param(6000, 24, marks=pytest.mark.soak)])
def test_pollers_and_producers_follow_a_promoted_standby(
    standbys: list[Standby], standby: Standby, pg_server: EmbeddedPostgres, database: ProcessDatabase,
    django_db_blocker: DjangoDbBlocker, start: Start, tmp_path: Path, tasks: int, kills: int,
) -> None:  # fmt: skip
    """The address has both hosts. Replication is synchronous, so nothing that was answered may be lost."""
    ours, theirs = (f"127.0.0.1:{server.port}" for server in (pg_server, standby.server))
    url = database.url.replace(ours, f"{ours},{theirs}")
    both = ProcessDatabase("postgresql", f"{url}?target_session_attrs=read-write&connect_timeout=3")
    marks, made, following = tmp_path / "marks", list[str](), threading.Event()

    def starts() -> int:
        return len(lines(marks))

    def produce() -> None:
        for number in range(tasks):
            if number == tasks - 10:  # the last ones certainly come after the crash
                following.wait(PATIENCE)
            queue, reference = QUEUES[number % 3], f"task {number}"
            payload = {"do": "book" if queue == "atomic" else "ok", "mark": str(marks)}

            def enqueued(queue: str = queue, reference: str = reference, payload: object = payload) -> None:
                try:
                    enqueue(queue, reference, payload, on_duplicate="ignore")
                except (OperationalError, InterfaceError) as error:
                    connection.close()
                    raise AssertionError from error

            eventually(enqueued)
            made.append(reference)

    with ExitStack() as stack:
        stack.enter_context(_as_default(both, django_db_blocker))
        pollers = [start(url=both.url, queue=",".join(QUEUES)) for _ in range(2)]
        [producer] = stack.enter_context(actors(1))
        producing = producer.do(produce)

        def kill_pollers(number: int) -> None:
            for _ in range(number):
                before = starts()
                until(lambda before=before: starts() > before or len(lines(marks)) >= tasks)
                pollers.pop(0).signal(signal.SIGKILL)
                pollers.append(start(url=both.url, queue=",".join(QUEUES)))

        until(lambda: starts() > 0)
        kill_pollers(kills // 2)
        until(lambda: len(made) >= tasks // 2)
        stack.enter_context(crashed(pg_server))
        standbys.remove(standby)
        stack.callback(discard, standby)
        control(standby.server, "SELECT pg_promote()")
        before = starts()
        following.set()
        until(lambda: starts() > before)
        kill_pollers(kills - kills // 2)
        producing.result(PATIENCE)
        until(lambda: statuses().get("COMPLETED", 0) >= tasks, timeout=240)
        for poller in pollers:
            assert poller.code is None, poller.log
        rows = dict(Task.objects.values_list("reference", "status"))
        assert rows == dict.fromkeys(made, "COMPLETED")
        booked = [reference for reference in made if int(reference.split()[1]) % 3 == QUEUES.index("atomic")]
        assert sorted(Booking.objects.values_list("reference", flat=True)) == sorted(booked)
        ran = Counter((reference, token) for _, *words, token, _ in lines(marks) for reference in [" ".join(words)])
        assert {reference for reference, _ in ran} == set(made)
        assert max(ran.values()) == 1, "a checkout ran twice"
        for poller in pollers:
            poller.kill()  # before its server goes
        connection.close()
