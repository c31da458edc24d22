"""The documented roles, logged in with a password: what each may do, and that no producer stops the others."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from django.contrib.auth.models import User
from psycopg import sql

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres
from django_dbtaskqueue.models import MinuteCount, Queue, Task, UsedReference
from django_dbtaskqueue.testing import drain
from tests.conftest import ProcessDatabase
from tests.locations.test_roles import ALLOWED, ROLES, SCRIPT, STATEMENTS
from tests.operations.site import logged_in
from tests.support import backend_pid, sql as execute

PASSWORD = "only of this test"
FORBIDDEN = {
    "truncate": "TRUNCATE dbtaskqueue_task",
    "lock everybody out": "LOCK TABLE dbtaskqueue_queue IN ACCESS EXCLUSIVE MODE",
    "create a function": "CREATE FUNCTION evil() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "create a trigger": "CREATE TRIGGER t BEFORE UPDATE ON dbtaskqueue_task EXECUTE FUNCTION unique_key_recheck()",
    "replace the view": "CREATE OR REPLACE VIEW dbtaskqueue_task_overview AS SELECT 1",
    "run a program": "COPY dbtaskqueue_task (payload) TO PROGRAM 'true'",
    "read a file": "SELECT pg_read_file('postgresql.conf')",
    "become the owner": "SET ROLE postgres",
    "grant": "GRANT dbtaskqueue_poller TO dbtaskqueue_producer",
    "read users": "SELECT password FROM auth_user",
    "read sessions": "SELECT session_data FROM django_session",
    "read passwords": "SELECT rolpassword FROM pg_authid",
    "end a connection": "SELECT pg_terminate_backend(%(owner)s)",
    "read the audit": "SELECT reason FROM dbtaskqueue_auditentry",
}
TIMES_IT_MAY_WRITE = """
SELECT table_name, column_name FROM information_schema.column_privileges NATURAL JOIN information_schema.columns
WHERE grantee = 'dbtaskqueue_producer' AND privilege_type = 'UPDATE' AND data_type = 'timestamp with time zone'
"""


@pytest.fixture
def logins(crash_database: ProcessDatabase, pg_server: EmbeddedPostgres) -> Iterator[dict[str, str]]:
    """Run the script, and return the URL of a login of each role."""
    parts = urlsplit(crash_database.url)
    execute(SCRIPT.read_text())
    for role in ROLES:
        execute(f"CREATE ROLE test_{role} LOGIN PASSWORD '{PASSWORD}' IN ROLE dbtaskqueue_{role}")
    place = f"{PASSWORD}@{parts.netloc.rpartition('@')[2]}".replace(" ", "%20")
    yield {role: urlunsplit(parts._replace(netloc=f"test_{role}:{place}")) for role in ROLES}
    for role in ROLES:
        execute(f"DROP ROLE test_{role}; DROP OWNED BY dbtaskqueue_{role}; DROP ROLE dbtaskqueue_{role}")


def is_permitted(link: psycopg.Connection, statement: Any, params: dict[str, object] | None = None) -> bool:
    try:
        with link.transaction(force_rollback=True):
            link.execute(statement, params)
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


def test_a_login_may_do_exactly_what_its_role_is_for(logins: dict[str, str]) -> None:
    enqueue("work", "r")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(logins["producer"].replace("only", "another"))
    for role, url in logins.items():
        with psycopg.connect(url) as link:
            assert link.execute("SELECT current_user").fetchone() == (f"test_{role}",)
            assert {name for name, text in STATEMENTS.items() if is_permitted(link, text)} == ALLOWED[role], role
            done = {name for name, text in FORBIDDEN.items() if is_permitted(link, text, {"owner": backend_pid()})}
            assert done == set(), role


def test_no_time_that_a_producer_writes_stops_a_page_or_a_poller(logins: dict[str, str]) -> None:
    Queue.objects.create(name="work")
    task = enqueue("work", "first")
    MinuteCount.objects.create(kind="call", queue="work", name="put", minute=task.create_time, count=1)
    UsedReference.objects.create(queue="work", reference="gone", expire_time=task.create_time)
    with psycopg.connect(logins["producer"], autocommit=True) as link:
        writable = link.execute(TIMES_IT_MAY_WRITE).fetchall()
        assert {table for table, _ in writable} >= {"dbtaskqueue_task", "dbtaskqueue_queue", "dbtaskqueue_minutecount"}
        for table, column in writable:
            for value in ["infinity", "-infinity", "10000-06-01", "0044-03-15 BC"]:
                names = map(sql.Identifier, (table, column))
                with pytest.raises(psycopg.errors.CheckViolation):
                    link.execute(sql.SQL("UPDATE {} SET {} = {}").format(*names, sql.Literal(value)))
    client = logged_in(User.objects.create_superuser("ada"), raise_request_exception=False)
    for address in ("", "task/", f"task/{task.pk}/change/", "queue/", "queue/work/change/"):
        assert client.get(f"/admin/dbtaskqueue/{address}").status_code == 200, address
    drain("work")
    assert Task.objects.get().status == "COMPLETED"


def test_a_producer_makes_no_task_that_has_a_past(logins: dict[str, str]) -> None:
    with psycopg.connect(logins["producer"]) as link:
        for column in ("status", "process_result", "total_attempt", "attempt", "finish_time", "last_update_time"):
            statement = f"INSERT INTO dbtaskqueue_task (queue_name, {column}) VALUES ('work', DEFAULT)"
            assert not is_permitted(link, statement), column
