"""Addresses of databases: read, shown without what is secret, and used."""

import os
import pickle
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import sql

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline.database import Database

URLS = [
    ("postgresql://me:p%40ss@db.example:5433/tasks?sslmode=require", {"password": "p@ss"}),
    ("postgres://me@localhost/tasks", {}),
    ("postgresql:///tasks?host=/run/postgresql", {}),
    ("postgresql://me:secret@[::1]:5432/tasks", {"password": "secret"}),
    ("postgresql://me:key1@one,two:1,2/tasks?sslpassword=key2", {"password": "key1", "sslpassword": "key2"}),
    ("sqlite:////var/lib/tasks%20of%20mine.sqlite3", {}),
]


def test_an_address_without_its_secrets_is_still_the_address() -> None:
    for url, secrets in URLS:
        database = Database.from_url(url)
        assert database.secrets == secrets
        shown = Database.from_url(database.url_without_password)
        assert shown.secrets == {}
        assert {**shown.conninfo, **secrets} == database.conninfo
        assert pickle.loads(pickle.dumps(database)) == database  # noqa: S301 -- just pickled here
        for secret in secrets.values():
            assert secret not in f"{database!r} {database} {database.url_without_password}"


def test_an_address_of_another_form_is_refused_without_showing_it() -> None:
    for url in (
        "mysql://me:canary@host/tasks", "postgresql://me:canary@host/", "postgresql://me:canary@host:port/x",
        "sqlite://",
    ):  # fmt: skip
        with pytest.raises(PipelineError, match="not understood") as error:
            Database.from_url(url)
        assert "canary" not in str(error.value)


def test_a_database_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    nowhere = Database.from_url("postgresql://me:canary@127.0.0.1:1/tasks")
    for connect in (nowhere.connect, nowhere.connect_arrow):
        with pytest.raises(PipelineError, match=r"postgresql://me@127\.0\.0\.1:1/tasks cannot be used") as error:
            connect()
        assert "canary" not in str(error.value)
    with pytest.raises(PipelineError, match="cannot be used"):
        Database.from_url(f"sqlite:///{tmp_path}/none.sqlite3").connect()
    assert list(tmp_path.iterdir()) == []


def test_a_password_may_hold_any_character(pg: Database) -> None:
    """Spaces, quotes and backslashes are escaped on the way to libpq."""
    user, password = f"odd_{os.getpid()}", "a' b\\c=\""
    with pg.open() as link:
        link.run(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(user), password).as_string(None))
        try:
            odd = replace(pg, conninfo={**pg.conninfo, "user": user, "password": password})
            for connect in (odd.connect, odd.connect_arrow):
                with closing(connect()) as connection, closing(connection.cursor()) as cursor:
                    assert cursor.execute("SELECT 1") is not False
        finally:
            link.run(sql.SQL("DROP ROLE {}").format(sql.Identifier(user)).as_string(None))


def test_a_process_that_plans_a_read_imports_little() -> None:
    """Spark starts two of them in each session. psycopg and the writer took a third of their time."""
    program = "import sys, django_dbtaskqueue.pipeline.source; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"psycopg", "asyncio", "pyarrow.compute", "django"} & {*done.stdout.split()}


def test_what_fails_inside_a_transaction_leaves_nothing(database: Database) -> None:
    with database.open() as link:
        with pytest.raises(ZeroDivisionError), link.transaction():
            link.run("INSERT INTO dbtaskqueue_queue (name) VALUES ('q')")
            1 / 0  # noqa: B018 -- it is to fail
        assert link.run("SELECT name FROM dbtaskqueue_queue") == []
