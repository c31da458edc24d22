"""The documented GRANT script: what each role may do, and that this is enough for the API; see test_role_logins."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import QueueFull, enqueue, enqueue_many
from django_dbtaskqueue.core.sql.dialects import DIALECTS, Tables
from django_dbtaskqueue.core.sql.pipeline import FinishEventStatements
from django_dbtaskqueue.models import FinishEvent, Task
from tests.support import sql

SCRIPT = Path(__file__).parents[2] / "docs" / "reference" / "roles.sql"
ROLES = ("producer", "poller", "archiver", "reader")

STATEMENTS = {
    "enqueue": "INSERT INTO dbtaskqueue_task (queue_name) VALUES ('parcels') RETURNING id",
    "read payload": "SELECT payload FROM dbtaskqueue_task",
    "change status": "UPDATE dbtaskqueue_task SET status = status",
    "replace payload": "UPDATE dbtaskqueue_task SET payload = '1'",
    "delete": "DELETE FROM dbtaskqueue_task",
    "add attempt": "INSERT INTO dbtaskqueue_attempt (task_id, queue_name, attempt, total_attempt) VALUES (1, '', 1, 1)",
    "delete history": "DELETE FROM dbtaskqueue_taskhistory",
    "count deletion": "INSERT INTO dbtaskqueue_minutecount (kind, queue_name, count) VALUES ('deletion', 'q', 1)",
    "count call": "INSERT INTO dbtaskqueue_minutecount (kind, queue_name, count) VALUES ('call', 'q', 1)",
    "heartbeat": "INSERT INTO dbtaskqueue_poller (instance) VALUES ('p')",
    "see overview": "SELECT status FROM dbtaskqueue_task_overview",
    "see queues": "SELECT name FROM dbtaskqueue_queue",
    "lock a queue": "SELECT name FROM dbtaskqueue_queue FOR UPDATE",
    "make a queue": "INSERT INTO dbtaskqueue_queue (name) VALUES ('q')",
    # What a poller or another producer obeys.
    "set overrides": """UPDATE dbtaskqueue_queue SET overrides = '{"batch_size": 1}'""",
    "make a queue with overrides": """INSERT INTO dbtaskqueue_queue (name, overrides) VALUES ('q', '{}')""",
    "pause": "UPDATE dbtaskqueue_queue SET paused_time = now()",
    "rename a queue": "UPDATE dbtaskqueue_queue SET name = 'other'",
    "delete a queue": "DELETE FROM dbtaskqueue_queue",
    "command a poller": "UPDATE dbtaskqueue_poller SET requested_command = 'stop'",
    "take a tick": "UPDATE dbtaskqueue_schedule SET next_time = now()",
    "see schedules": "SELECT name, cron, next_time FROM dbtaskqueue_schedule",
    "delete a schedule": "DELETE FROM dbtaskqueue_schedule",
    "read a schedule's payload": "SELECT payload FROM dbtaskqueue_schedule",
    "order a bulk operation": "INSERT INTO dbtaskqueue_bulkoperation (verb, query) VALUES ('delete', 'id:>0')",
    "forge the audit": "INSERT INTO dbtaskqueue_auditentry (actor, verb) VALUES ('ceo', 'delete')",
    "make a token": "INSERT INTO dbtaskqueue_apitoken (\"user\", digest) VALUES ('ceo', 'x')",
    "read tokens": "SELECT digest FROM dbtaskqueue_apitoken",
    "read error texts": "SELECT message FROM dbtaskqueue_failuregroup",
    "read tracebacks": "SELECT traceback FROM dbtaskqueue_attempt",
    "see failure groups": "SELECT error_type, frame FROM dbtaskqueue_failuregroup",
    "create table": "CREATE TABLE mischief (id int)",
    "drop table": "DROP TABLE dbtaskqueue_task CASCADE",
}
ALLOWED = {
    "producer": {"enqueue", "read payload", "replace payload", "see queues", "lock a queue", "make a queue",
                 "count call"},
    "poller": {
        "read payload", "change status", "replace payload", "delete", "add attempt", "count deletion", "count call",
        "heartbeat", "see queues", "make a queue", "command a poller", "read error texts", "read tracebacks",
        "see failure groups", "take a tick", "see schedules", "read a schedule's payload",
    },
    "archiver": {
        "read payload", "change status", "replace payload", "delete", "add attempt", "delete history",
        "count deletion", "count call", "read tracebacks",
    },
    "reader": {"see overview", "see queues", "see failure groups", "see schedules"},
}  # fmt: skip


@pytest.fixture
def roles(db: None) -> Iterator[None]:
    """Run the script in the test's transaction, which takes the roles back, too."""
    for _again in range(2):
        sql(SCRIPT.read_text())
    sql("ALTER TABLE dbtaskqueue_task DISABLE TRIGGER USER")  # the audit of other tests
    sql("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    sql(f"GRANT USAGE ON SCHEMA public TO {', '.join(f'dbtaskqueue_{role}' for role in ROLES)}")
    yield
    sql("RESET ROLE")


def become(role: str) -> None:
    sql(f"SET LOCAL ROLE dbtaskqueue_{role}")


def test_a_producer_enqueues_replaces_and_counts_the_capacity_through_the_api(roles: None, settings: Any) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"narrow": {"capacity": 1}}}
    become("producer")
    enqueue("work", "r", {"n": 1})
    enqueue("work", "r", {"n": 2}, on_duplicate="replace")
    enqueue("work", "g1", group="g")
    enqueue("work", "g2", group="g")
    enqueue_many("work", [("m1", 1), ("m2", 2)])
    enqueue("narrow", "first")
    with pytest.raises(QueueFull):
        enqueue("narrow", "second")


def test_a_poller_takes_and_settles_through_the_api(roles: None) -> None:
    enqueue_many("work", [("a", 1), ("b", 2)])
    become("poller")
    first, second = Task.objects.checkout("work", poller_instance="p", limit=2)
    first.complete("done")
    second.fail("no")


def test_a_poller_writes_the_events_of_a_stream(roles: None) -> None:
    """Without any right to write them: the trigger has those of the owner."""
    task = enqueue("work", "a")
    events = FinishEventStatements(Tables('"dbtaskqueue_task"'), DIALECTS["postgresql"])
    sql("; ".join(events.create_trigger("public", "dbtaskqueue.task")))
    become("poller")
    Task.objects.checkout("work", poller_instance="p")[0].complete("done")
    assert list(FinishEvent.objects.values_list("location", "task_id")) == [("dbtaskqueue.task", task.pk)]
