"""Empty databases after tests whose commits are real: only the tables that have rows.

Django's ``flush`` empties all tables and makes all content types and permissions anew. That took most of the time of
such tests. Content types and permissions stay here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import connections, transaction

from django_dbtaskqueue.flow import usage

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.test import TransactionTestCase

STAY = {"django_content_type", "auth_permission"}


def teardown(case: TransactionTestCase) -> None:
    """Take the place of ``TransactionTestCase._fixture_teardown``."""
    for alias in case._databases_names(include_mirrors=False):
        empty(connections[alias])


def empty(connection: BaseDatabaseWrapper) -> None:
    """Delete all rows of all tables but those that stay, and what this process counted but did not store yet."""
    usage.counter.discard(lambda _key: True)  # its thread would write it among the rows of a later test
    usage.counter.store(connection.alias)  # waits for what it is writing
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    names = [connection.ops.quote_name(table) for table in tables if table not in STAY]
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        cursor.execute("SELECT " + ", ".join(f"EXISTS (SELECT 1 FROM {name})" for name in names))
        full = [name for name, has_rows in zip(names, cursor.fetchone(), strict=True) if has_rows]
        if connection.vendor == "postgresql":
            statements = [f"TRUNCATE {', '.join(full)} CASCADE"] if full else []
        else:
            statements = [f"DELETE FROM {name}" for name in full]
        for statement in statements:
            cursor.execute(statement)
