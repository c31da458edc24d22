"""Empty databases after tests whose commits are real: only the tables that have rows.

Django's ``flush`` empties all tables and makes all content types and permissions anew. That took most of the time of
such tests. Content types and permissions stay here.
"""

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TransactionTestCase

from django_dbtaskqueue.db.session import Session
from django_dbtaskqueue.flow import usage

# Bytes. To empty few rows takes less than to make new files; the next test would read the many dead rows.
LARGE, STAY = 2**17, {"django_content_type", "auth_permission"}


def teardown(case: TransactionTestCase) -> None:
    """Take the place of ``TransactionTestCase._fixture_teardown``."""
    for alias in case._databases_names(include_mirrors=False):
        empty(connections[alias])


def empty(connection: BaseDatabaseWrapper) -> None:
    """Delete all rows of all tables but those that stay, and what this process counted but did not store yet."""
    usage.counter.discard(lambda _key: True)  # its thread would write it among the rows of a later test
    usage.counter.store(Session(connection))  # waits for what it is writing
    tables = connection.introspection.django_table_names(include_views=False)
    names = [connection.ops.quote_name(table) for table in tables if table not in STAY]
    size = "pg_relation_size('{0}')" if connection.vendor == "postgresql" else "1"
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        look = ", ".join(f"CASE WHEN EXISTS (SELECT 1 FROM {name}) THEN {size.format(name)} END" for name in names)
        cursor.execute(f"SELECT {look}")
        full = {name: size for name, size in zip(names, cursor.fetchone(), strict=True) if size is not None}
        if large := [name for name, size in full.items() if size > LARGE]:
            cursor.execute(f"TRUNCATE {', '.join(large)} CASCADE")
        for name in full.keys() - large:
            cursor.execute(f"DELETE FROM {name}")
