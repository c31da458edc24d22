"""The first and the last words of a poller: what it serves and how, and what it did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import OperationalError

from django_dbtaskqueue.conf.settings import QueueSettings
from django_dbtaskqueue.core import __version__
from django_dbtaskqueue.core.durations import format_duration, format_seconds
from django_dbtaskqueue.core.exceptions import near_match
from django_dbtaskqueue.db.session import alias_for
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.queue_state import QueueState

USUAL = QueueSettings()


def opening(poller: Poller) -> Iterator[str]:
    """Yield two lines; raise ``ImproperlyConfigured`` for a database that has no task table."""
    found = {queue.port.alias: queue.port.model._meta.db_table for queue in poller.queues.values()}
    databases = ", ".join(f"{database(alias, table)} ({alias})" for alias, table in found.items())
    options = poller.options
    yield f"django-dbtaskqueue {__version__} on {databases}, instance {poller.instance}"
    queues = ", ".join(map(_queue, poller.queues.values()))
    yield f"Queues: {queues}. Slots: {options.threads} threads, {options.coroutines} coroutines"


def closing(poller: Poller, seconds: float) -> str:
    """Return one line."""
    counts = poller.counts
    rate = counts.finished / seconds if seconds else 0.0
    return (
        f"Stopped: {counts.finished} finished, {counts.failed} failed, {counts.lost} lost in {format_seconds(seconds)}"
        f" ({rate:.1f}/s)"
    )


def database(alias: str, table: str) -> str:
    """Return the vendor and version of a database that holds ``table``; it may be away for now."""
    connection = connections.create_connection(alias)
    try:
        version = ".".join(map(str, connection.get_database_version()))
        missing = table not in connection.introspection.table_names()
    except OperationalError:
        return f"{connection.display_name}, not reachable yet"
    finally:
        connection.close()
    if missing:
        raise ImproperlyConfigured(
            f"Database {alias!r} has no table {table}. Run: manage.py migrate --database {alias}"
        )
    return f"{connection.display_name} {version}"


def check_databases(queues: Iterable[str], using: str | None) -> None:
    """Raise ``ImproperlyConfigured`` for a database that ``DATABASES`` does not have."""
    for queue in queues:
        alias = alias_for(queue, using)
        if alias not in connections:
            raise ImproperlyConfigured(
                f"There is no database {alias!r} in DATABASES for queue {queue!r}.{near_match(alias, connections)}"
            )


def _queue(queue: QueueState) -> str:
    words = [f"weight {queue.weight}"] if queue.weight != 1 else []
    for field in fields(QueueSettings):
        value = getattr(queue.settings, field.name)
        if value != getattr(USUAL, field.name):
            words.append(f"{field.name} {_text(value)}")
    return f"{queue.name} ({', '.join(words)})" if words else queue.name


def _text(value: object) -> str:
    if isinstance(value, timedelta):
        return format_duration(value)
    if is_dataclass(value):  # a retry policy
        return type(value).__name__
    return str(value)
