"""A schema for each tenant, which the backend sets when Django opens a cursor."""

from collections.abc import Iterator

import pytest
from django.db import connection, connections

from django_dbtaskqueue import enqueue, enqueue_many, queue, registry
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.testing import run_poller
from tests.conftest import ProcessDatabase
from tests.locations.schema_backend.base import DatabaseWrapper
from tests.support import sql

TENANTS = ("acme", "umbrella")


@pytest.fixture(autouse=True)
def _tenants(postgres_process_database: ProcessDatabase, taskqueue_registry: None) -> Iterator[None]:
    registry.register("mail", lambda task: None)
    tables = sql("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    for tenant in TENANTS:
        sql(f"CREATE SCHEMA {tenant}")
        for (table,) in tables:
            sql(f"CREATE TABLE {tenant}.{table} (LIKE public.{table} INCLUDING ALL)")
    connections.settings["default"]["ENGINE"] = "tests.locations.schema_backend"
    new_connection("public")
    yield
    new_connection("public")
    sql(f"DROP SCHEMA {', '.join(TENANTS)} CASCADE")


def new_connection(schema: str) -> None:
    connection.close()
    del connections["default"]
    DatabaseWrapper.first_schema = schema


def switch(schema: str) -> None:
    connection.schema = schema  # type: ignore[attr-defined]


def tasks_of(schema: str) -> list[tuple[str | None, str]]:
    switch(schema)
    return list(Task.objects.order_by("pk").values_list("reference", "status"))


def test_a_task_goes_to_and_is_taken_from_the_schema_of_its_connection() -> None:
    for tenant in TENANTS:
        switch(tenant)
        enqueue("mail", tenant)
    mail = queue("mail")
    for tenant in reversed(TENANTS):
        switch(tenant)
        taken = mail.take()
        assert taken is not None and taken.reference == tenant
        mail.ack(taken)
        assert tasks_of(tenant) == [(tenant, "COMPLETED")]
        Task.objects.all().delete()
    for number in range(8):  # more often than a statement is run before it is prepared
        switch(TENANTS[number % 2])
        enqueue("mail", f"{TENANTS[number % 2]} {number}")
    for tenant in TENANTS:
        switch(tenant)
        enqueue_many("mail", [{"reference": f"{tenant} {number}"} for number in (8, 9)])
    assert tasks_of("public") == []
    for first, tenant in enumerate(TENANTS):
        assert tasks_of(tenant) == [(f"{tenant} {number}", "CREATED") for number in (*range(first, 8, 2), 8, 9)]


def test_a_poller_works_in_the_schema_of_new_connections() -> None:
    for tenant in TENANTS:
        switch(tenant)
        enqueue("mail", tenant)
    new_connection("umbrella")
    with run_poller("mail"):
        pass
    assert (tasks_of("acme"), tasks_of("umbrella")) == ([("acme", "CREATED")], [("umbrella", "COMPLETED")])
