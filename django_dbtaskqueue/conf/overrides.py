"""What a queue is set to with the runtime overrides of its ``Queue`` row laid over, as producers see it.

The row is read at most once a second per queue and process; a change made in this process counts at once.
"""

from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.signals import post_delete, post_save
from django.db.utils import InterfaceError, OperationalError

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import clock
from django_dbtaskqueue.core.exceptions import UnknownQueue
from django_dbtaskqueue.models import Queue

ROW_CACHE_S = 1.0  # how long a row is remembered
MAX_CACHED_ROWS = 4096
Key = tuple[str, str, str]  # alias, name of the database behind it, queue


@dataclass(frozen=True, slots=True)
class Row:
    """A queue's row as last read; ``values`` None: there is none. ``settings`` are ``base`` with the values over it."""

    until: float
    values: dict[str, Any] | None
    base: conf.QueueSettings
    settings: conf.QueueSettings


_rows: dict[Key, Row] = {}
_unreachable_until: dict[str, float] = {}  # by alias: no row is read before that
_quiet_until = 0.0  # after a change that may still be rolled back, nothing read in a transaction is remembered


def overridden_settings(queue: str, alias: str, connection: BaseDatabaseWrapper | None = None) -> conf.QueueSettings:
    """Return what ``queue`` is set to, the runtime overrides of its row laid over it; at most a second old.

    A queue made at runtime stands only in the ``Queue`` table. ``connection``: the alias's. Raises ``UnknownQueue``.
    """
    key = (alias, str((connection or connections[alias]).settings_dict["NAME"]), queue)
    base, row = conf.default_settings(queue), _rows.get(key)
    if row is not None and clock.monotonic() >= row.until:
        row = None
    if row is not None and row.base is base:  # other settings, and other queues known, come with another one
        return row.settings
    known, values = conf.is_known(queue), None if row is None else row.values
    if values is None and conf.is_queue_name(queue):
        values = _read(queue, alias, known=known)
    if values is None and not known:
        raise UnknownQueue(queue, conf.settings_queues())
    old, settings = _rows.get(key), base
    try:
        settings = conf.overlay(base, values) if values else base
    except ImproperlyConfigured as error:
        if old is None or old.values != values:
            logger.error("Overrides of queue %s are not applied: %s", queue, error)
    if clock.monotonic() >= _quiet_until or not connections[alias].in_atomic_block:
        if len(_rows) >= MAX_CACHED_ROWS:
            _rows.clear()
        _rows[key] = Row(clock.monotonic() + ROW_CACHE_S, values, base, settings)
    return settings


def known_overrides(queue: str, alias: str) -> dict[str, Any]:
    """Return the runtime overrides that ``overridden_settings`` has just laid over the settings of a queue."""
    row = _rows.get((alias, str(connections[alias].settings_dict["NAME"]), queue))
    return {} if row is None or row.settings is row.base else dict(row.values or {})


def clear_cache(**_: Any) -> None:
    """Read all rows anew."""
    global _quiet_until
    _quiet_until = clock.monotonic() + ROW_CACHE_S
    _rows.clear()


def _read(queue: str, alias: str, *, known: bool) -> dict[str, Any] | None:
    rows = Queue.objects.using(alias).filter(pk=queue).order_by()
    if known and clock.monotonic() < _unreachable_until.get(alias, 0.0):
        return None
    try:
        found = list(rows.values_list("overrides", flat=True))
    except (OperationalError, InterfaceError):
        if not known or connections[alias].in_atomic_block:
            raise
        connections[alias].close()  # a queue with shards may have another database that is up
        _unreachable_until[alias] = clock.monotonic() + ROW_CACHE_S  # not each of many queues waits for it
        return None
    return (found[0] or {}) if found else None


@conf.on_change
def _reset() -> None:
    global _quiet_until
    _quiet_until = 0.0
    _rows.clear()
    _unreachable_until.clear()


post_save.connect(clear_cache, sender=Queue)
post_delete.connect(clear_cache, sender=Queue)
