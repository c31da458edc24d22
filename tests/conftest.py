"""Databases for tests. Most tests want pytest-django's ``db``; those that start real processes want these:

``process_database``           a migrated database of its own, once on PostgreSQL and once on SQLite
``postgres_process_database``  the same, PostgreSQL only
``sqlite_process_database``    the same, SQLite only
``pg_server``                  a PostgreSQL of our own to crash: durable commits, ``stop("immediate")``, ``restart()``
``crash_database``             a migrated database on ``pg_server``; the server runs before and after each test
``spark``                      the Spark session that all tests share
``clock``                      the clock of pollers and of the pull API, which the test advances

While one of the databases is in use it *is* Django's ``default``, in every thread, and commits are real; a process
started with its ``env`` sees the same data. Do not combine it with ``db`` or ``transactional_db``.
"""

import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import psutil
import psycopg
import pytest
from asgiref.sync import SyncToAsync
from django.conf import settings
from django.core.signals import setting_changed
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver
from django.test import TransactionTestCase
from django.test.signals import root_urlconf_changed
from django.urls import set_urlconf
from pytest_django import DjangoDbBlocker

from django_dbtaskqueue.conf import overrides
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.core import durations
from django_dbtaskqueue.flow import dependencies, usage
from django_dbtaskqueue.operations import bulk
from django_dbtaskqueue.pull import handle
from django_dbtaskqueue.testing import run_poller
from example_project.database import database_from_url
from tests import templates
from tests.clock import SteppedClock
from tests.emptying import empty, teardown
from tests.patience import PATIENCE
from tests.templates import REPOSITORY, url_of

numbers = itertools.count(1)

pytest_plugins = ["tests.suites"]

# On a loaded machine an example takes as long as it takes. With CI set, Hypothesis itself knows that.
suppressed = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
for profile, examples in (("any-machine", 100), ("thousands", 5000)):
    hypothesis.settings.register_profile(
        profile, deadline=None, suppress_health_check=suppressed, max_examples=examples
    )
hypothesis.settings.load_profile("any-machine")


@dataclass(frozen=True)
class ProcessDatabase:
    """A migrated database; ``env`` is the environment that leads a child process to it."""

    vendor: str
    url: str
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        ours = {"DATABASE_URL": self.url, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONPATH": str(REPOSITORY)}
        return {**os.environ, **ours, "PYTHONUNBUFFERED": "1", **self.extra}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``manage.py`` with the arguments to its end, and fail with its output if it fails."""
        command = [sys.executable, str(REPOSITORY / "manage.py"), *arguments]
        done = subprocess.run(
            command, env=self.env, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


TransactionTestCase._fixture_teardown = teardown
# A connection that stays knows all tables. To make one for each test took a tenth of the time of those that commit.
TransactionTestCase._should_reload_connections = lambda case: False
setting_changed.disconnect(root_urlconf_changed)
run_poller.__wrapped__.__kwdefaults__["timeout"] = timedelta(seconds=PATIENCE)  # type: ignore[attr-defined]


@receiver(connection_created)
def as_with_debug(connection: BaseDatabaseWrapper, **_: object) -> None:
    """SQLite runs as in a project with DEBUG: Django quotes each parameter for its log, and refuses a list."""
    if connection.vendor == "sqlite":
        connection.force_debug_cursor = True


@receiver(setting_changed)
def keep_addresses(*, setting: str, **_: object) -> None:
    """Django reads all addresses again whenever ROOT_URLCONF changes. Those of our modules stay as they are."""
    if setting == "ROOT_URLCONF":
        set_urlconf(None)


@pytest.fixture(scope="session", autouse=True)
def _leftovers() -> None:
    """PostgreSQL tests run on PostgreSQL, on a server without databases of killed test runs."""
    assert connections["default"].vendor == "postgresql", "The tests need PostgreSQL as default: unset DATABASE_URL."
    if "DATABASE_URL" in os.environ or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        return
    with psycopg.connect(settings.SERVER_URL, autocommit=True) as server:
        for (name,) in server.execute("SELECT datname FROM pg_database WHERE datname ~ '^test_[0-9]+'").fetchall():
            if not psutil.pid_exists(int(re.findall(r"\d+", name)[0])):
                server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(autouse=True)
def _no_row_rests() -> None:
    """Rows of each test have the numbers of those of others, which may rest because they raised."""
    for module in (dependencies, bulk, usage):
        module._pauses._rests.clear()


@pytest.fixture(autouse=True)
def _asynchronous_thread() -> Iterator[None]:
    """Django's asynchronous code has a thread of its own, which would keep its connection to the database of a test."""
    yield
    executor = SyncToAsync.single_thread_executor
    if executor._threads:
        executor.submit(_close_connections).result(PATIENCE)


def _close_connections() -> None:
    connections.close_all()
    for alias in connections:
        with suppress(AttributeError):  # none was made
            del connections[alias]


class ReusedPostgres:
    """One database for one test after the other: it is emptied, or made anew after a test that changed more than rows.

    To make one takes a third of a second, to empty one some milliseconds. Our first rows have the number 1.
    """

    # What a test may change beside rows. TRUNCATE changes only what is not asked here.
    SCHEMA = """
        SELECT md5(string_agg(part, ',' ORDER BY part)) FROM (
            SELECT concat('class', oid, relname, reloptions) FROM pg_class WHERE relnamespace > 16383
                OR relnamespace = 'public'::regnamespace
            UNION ALL SELECT concat('column', attrelid, attname, xmin) FROM pg_attribute WHERE attrelid > 16383
            UNION ALL SELECT concat('trigger', oid, xmin) FROM pg_trigger
            UNION ALL SELECT concat('function', oid, xmin) FROM pg_proc WHERE oid > 16383
            UNION ALL SELECT concat('constraint', oid, xmin) FROM pg_constraint WHERE oid > 16383
            UNION ALL SELECT concat('statistics', starelid) FROM pg_statistic WHERE starelid > 16383
            UNION ALL SELECT concat('type', id) FROM django_content_type
            UNION ALL SELECT concat('migration', id) FROM django_migrations
            UNION ALL SELECT concat('permission', id) FROM auth_permission
            UNION ALL SELECT concat('setting', setconfig) FROM pg_db_role_setting JOIN pg_database
                ON pg_database.oid = setdatabase WHERE datname = current_database()
        ) AS parts (part)
    """
    NUMBERS = (  # those of rows that stay go on
        "SELECT setval(seqrelid, seqstart, false) FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid"
        " WHERE relname ~ '^dbtaskqueue_'"
    )
    LEAVE = (
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )

    def __init__(self, make: Callable[[], ProcessDatabase]) -> None:
        self._make = make
        self._database: ProcessDatabase | None = None
        self._schema = ""

    def get(self) -> ProcessDatabase:
        if self._database is None:
            self._database = self._make()
            with psycopg.connect(self._database.url) as connection:
                self._schema = self._read_schema(connection.cursor())
        return self._database

    def give_back(self) -> None:
        """Empty the database, which is Django's default; all who are still connected must leave."""
        connections["default"].close()
        del connections["default"]
        with connections["default"].cursor() as cursor:
            cursor.execute(self.LEAVE)
            if self._read_schema(cursor) == self._schema:
                empty(connections["default"])
                cursor.execute(self.NUMBERS)
            else:
                self._database = None
        overrides.clear_cache()  # it tells databases apart by their names

    def _read_schema(self, cursor: Any) -> str:
        cursor.execute(self.SCHEMA)
        return str(cursor.fetchone()[0])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedClock]:
    stepped = SteppedClock()
    for name in ("monotonic", "wait", "wait_for", "wait_async"):
        monkeypatch.setattr(durations.clock, name, getattr(stepped, name))
    yield stepped
    stepped.end()
    for kept_until in (overrides._rows, overrides._unreachable_until, handle._next_rescue):  # a time of this clock
        kept_until.clear()
    overrides._quiet_until = 0.0


@pytest.fixture(params=["postgresql", "sqlite"])
def process_database(request: pytest.FixtureRequest) -> ProcessDatabase:
    name = {"postgresql": "postgres_process_database", "sqlite": "sqlite_process_database"}[request.param]
    return request.getfixturevalue(name)


@pytest.fixture
def postgres_process_database(
    _reused_postgres: ReusedPostgres, django_db_blocker: DjangoDbBlocker
) -> Iterator[ProcessDatabase]:
    database = _reused_postgres.get()
    with _as_default(database, django_db_blocker):
        yield database
        _reused_postgres.give_back()


@pytest.fixture
def unmigrated_database(django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """An empty database on PostgreSQL is Django's default."""
    with _created(settings.SERVER_URL) as database, _as_default(database, django_db_blocker):
        yield


@pytest.fixture
def sqlite_process_database(tmp_path: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[ProcessDatabase]:
    database = ProcessDatabase("sqlite", f"sqlite:///{shutil.copy(templates.on_sqlite(), tmp_path / 'tasks.sqlite3')}")
    with _as_default(database, django_db_blocker):
        yield database


@pytest.fixture(scope="session")
def pg_server() -> Iterator[EmbeddedPostgres]:
    with tempfile.TemporaryDirectory() as root, closing(EmbeddedPostgres.start(Path(root))) as server:
        yield server


@pytest.fixture
def crash_database(
    pg_server: EmbeddedPostgres, _crash_template: str, django_db_blocker: DjangoDbBlocker
) -> Iterator[ProcessDatabase]:
    if not pg_server.running:
        pg_server.restart()
    with _postgres_copy(pg_server.url, _crash_template) as database, _as_default(database, django_db_blocker):
        yield database
        if not pg_server.running:
            pg_server.restart()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two cores, a second try for a failed task, an event log (in ``spark.eventLog.dir``) for the search of secrets."""
    from pyspark.logger import PySparkLogger

    from django_dbtaskqueue.pipeline.spark import spark_session

    # A logger of PySpark gives its own formatter to each handler, also to those with which pytest catches logs.
    PySparkLogger.addHandler = logging.Logger.addHandler
    conf = {
        # Tests run no long jobs: to compile code, of Java or of a query, takes longer than it saves.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": tmp_path_factory.mktemp("events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.sql.shuffle.partitions": "1",
    }
    session = spark_session(master="local[2,2]", app_name="tests", memory="1g", conf=conf)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def _postgres_template() -> str:
    return templates.on_postgresql(settings.SERVER_URL)


@pytest.fixture(scope="session")
def _reused_postgres(_postgres_template: str) -> Iterator[ReusedPostgres]:
    with ExitStack() as copies:
        yield ReusedPostgres(lambda: copies.enter_context(_postgres_copy(settings.SERVER_URL, _postgres_template)))


@pytest.fixture(scope="session")
def _crash_template(pg_server: EmbeddedPostgres) -> str:
    return templates.on_postgresql(pg_server.url)


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, _postgres_template: str) -> Iterator[None]:
    """The databases of ``db`` are copies of the templates, too."""
    shutil.copy(templates.on_sqlite(), settings.SQLITE_FILE)
    with _postgres_copy(settings.SERVER_URL, _postgres_template) as database:
        for alias, name in (("default", urlsplit(database.url).path[1:]), ("sqlite", settings.SQLITE_FILE)):
            settings.DATABASES[alias]["NAME"] = connections[alias].settings_dict["NAME"] = name
        yield
        connections.close_all()
    for file in Path(settings.SQLITE_FILE).parent.glob(f"{Path(settings.SQLITE_FILE).name}*"):
        file.unlink()


def _postgres_copy(server_url: str, template: str) -> AbstractContextManager[ProcessDatabase]:
    # The files are copied: to log each block, as is the default, takes twice the time.
    return _created(server_url, f'TEMPLATE "{template}" STRATEGY FILE_COPY')


@contextmanager
def _created(server_url: str, options: str = "") -> Iterator[ProcessDatabase]:
    name = f"test_{os.getpid()}_process_{next(numbers)}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'CREATE DATABASE "{name}" {options}')
    yield ProcessDatabase("postgresql", url_of(server_url, name))
    # A new connection: the test may have restarted the server, or left processes connected.
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def _as_default(database: ProcessDatabase, blocker: DjangoDbBlocker) -> Iterator[None]:
    before, wrapper = connections.settings["default"], connections["default"]
    replaced = connections.configure_settings({"default": database_from_url(database.url)})
    with blocker.unblock():
        connections.settings["default"] = replaced["default"]
        del connections["default"]
        try:
            yield
        finally:
            connections["default"].close()
            connections.settings["default"] = before
            connections["default"] = wrapper
