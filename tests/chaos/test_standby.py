"""A standby that really follows: pages read from it say how old they are, and pollers follow when it takes over."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import User
from django.db import InterfaceError, OperationalError, connection
from pytest_django import DjangoDbBlocker

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.models import Task
from tests.chaos.processes import Start, on, statuses
from tests.conftest import ProcessDatabase, _as_default
from tests.factories import make_task
from tests.faults.standby import Standby
from tests.operations.site import ADMIN, logged_in
from tests.operations.test_read_alias import replica
from tests.support import eventually, until

# So that the primary commits without its standby again.
ALONE = ("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


@pytest.fixture
def standby(pg_server: EmbeddedPostgres) -> Iterator[Standby]:
    """A synchronous standby. Ask for it before ``crash_database``: its start restarts the primary."""
    root = Path(tempfile.mkdtemp(prefix="dbtaskqueue-standby-"))
    root.chmod(0o755)  # the account of PostgreSQL reads it
    made = Standby(pg_server, root, None)
    yield made
    control(pg_server, *ALONE)
    made.close()
    shutil.rmtree(root)


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
        control(primary, *ALONE)


def until_replayed(primary: EmbeddedPostgres, standby: EmbeddedPostgres) -> None:
    """Wait until a standby shows what the primary has committed. A page leaves one alone that fails, for 10 s."""
    with psycopg.connect(primary.url) as connected:
        ((written,),) = connected.execute("SELECT pg_current_wal_lsn()").fetchall()
    with psycopg.connect(standby.url, autocommit=True) as connected:
        until(lambda: connected.execute("SELECT 1 WHERE pg_last_wal_replay_lsn() >= %s::pg_lsn", [written]).fetchall())


@on("crash_database")
def test_pages_say_how_far_a_standby_is_behind(
    standby: Standby, pg_server: EmbeddedPostgres, database: ProcessDatabase, settings: Any
) -> None:
    make_task("ERROR", reference="before")
    client = logged_in(User.objects.create_superuser("ada"))
    until_replayed(pg_server, standby.server)

    def page() -> tuple[str, str]:
        text = client.get(f"{ADMIN}task/").content.decode()
        (said,) = re.findall(r'id="dbtq-where-read">([^<]*)', text)
        return said, "".join(name for name in ("before", "after") if f">{name}<" in text)

    def reads(said: str, rows: str) -> None:
        assert page() == (said, rows)

    with replica(settings, PORT=str(standby.server.port)):
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
def test_pollers_and_producers_follow_a_promoted_standby(
    standby: Standby, pg_server: EmbeddedPostgres, database: ProcessDatabase,
    django_db_blocker: DjangoDbBlocker, start: Start,
) -> None:  # fmt: skip
    """The address has both hosts. Replication is synchronous, so nothing that was answered may be lost."""
    ours, theirs = (f"127.0.0.1:{server.port}" for server in (pg_server, standby.server))
    url = database.url.replace(ours, f"{ours},{theirs}")
    both = ProcessDatabase("postgresql", f"{url}?target_session_attrs=read-write&connect_timeout=3")
    made: list[str] = []

    def produce() -> None:
        reference = f"task {len(made)}"
        try:
            enqueue("work", reference, on_duplicate="ignore")
        except (OperationalError, InterfaceError) as error:
            connection.close()
            raise AssertionError from error
        made.append(reference)

    with ExitStack() as stack:
        stack.enter_context(_as_default(both, django_db_blocker))
        pollers = [start(url=both.url, queue="work").ready() for _ in range(2)]
        for _ in range(20):
            produce()
        stack.enter_context(crashed(pg_server))
        control(standby.server, "SELECT pg_promote()")
        for _ in range(20):
            eventually(produce)
        until(lambda: statuses().get("COMPLETED", 0) == 40)
        assert sorted(Task.objects.values_list("reference", flat=True)) == sorted(made)
        for poller in pollers:
            assert poller.code is None, poller.log
            poller.kill()  # before its server goes
        connection.close()
