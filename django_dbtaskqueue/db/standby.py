"""Reads of pages and of the API from a standby: ``DBTASKQUEUE["READ_ALIAS"]``.

While ``read_standby`` calls a view, ``alias_for`` and ``aliases_of`` name the standby in place of its database.
An action never runs inside: it reads and locks where it writes.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from math import inf
from typing import TypeVar

from django.db import DEFAULT_DB_ALIAS, InterfaceError, InternalError, OperationalError, connections, router
from django.utils.connection import ConnectionDoesNotExist
from django.utils.translation import gettext as _

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.context import set_inside, standbys
from django_dbtaskqueue.core.durations import clock, format_seconds
from django_dbtaskqueue.models import Task

T = TypeVar("T")

STANDBY_RETRY_S = 10.0  # a standby that failed is left alone this long
# While the receiver runs and all that came is replayed, the standby is as new as the network lets it be. Without a
# receiver, and before the first transaction is replayed, nothing says how old it is.
LAG_SQL = """
SELECT CASE WHEN NOT pg_is_in_recovery() THEN NULL
 WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() AND EXISTS (SELECT FROM pg_stat_wal_receiver) THEN 0
 ELSE coalesce(extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8, 'Infinity') END
"""
_sentence: ContextVar[str] = ContextVar("sentence", default="")
_failed_until: dict[str, float] = {}


def read_aliases() -> dict[str, str]:
    """Return the standbys of ``READ_ALIAS`` by the database that they follow. A text stands for the common database."""
    if not (given := conf.settings().read_alias):
        return {}
    if not isinstance(given, str):
        return dict(given)
    common = conf.settings().database
    return {router.db_for_write(Task) if common == DEFAULT_DB_ALIAS else common: given}


def where_read() -> str:
    """Return where the answer that is being made is read, as a sentence; empty without ``READ_ALIAS``."""
    return _sentence.get()


def read_standby(view: Callable[[], T], *, own_writes: bool = False) -> T:
    """Return what ``view`` returns, read from the standbys, or from the primary where these fail.

    ``own_writes``: the reader has just changed something, which the standby may not show yet.
    """
    if not (aliases := read_aliases()):
        return view()
    if own_writes:
        return _read(view, {}, _("Read from the primary, because you have just changed something."))
    lags = {alias: _lag(alias) for alias in aliases.values()}
    used = {primary: alias for primary, alias in aliases.items() if not isinstance(lags[alias], Exception)}
    sentences = [_words(alias, lag) for alias, lag in lags.items()]
    if used:
        try:
            return _read(view, used, " ".join(sentences))
        except (OperationalError, InterfaceError, InternalError) as error:  # a standby may cancel what is in its way
            for alias in used.values():
                _note_failure(alias, error)
            sentences = [_words(alias, error) for alias in lags]
    return _read(view, {}, " ".join(sentences))


def _read(view: Callable[[], T], used: Mapping[str, str], sentence: str) -> T:
    with set_inside(standbys, used), set_inside(_sentence, sentence):
        return view()


def _lag(alias: str) -> float | Exception | None:
    """Return how many seconds a standby is behind; None: it is no standby; an error: it cannot be used."""
    if clock.monotonic() < _failed_until.get(alias, 0.0):
        return OperationalError(alias)
    try:
        connection = connections[alias]
        if connection.vendor != "postgresql":
            connection.ensure_connection()
            return None
        with connection.cursor() as cursor:
            cursor.execute(LAG_SQL)
            (seconds,) = cursor.fetchone()
            return None if seconds is None else float(seconds)
    except (OperationalError, InterfaceError, ConnectionDoesNotExist) as error:
        _note_failure(alias, error)
        return error


def _note_failure(alias: str, error: Exception) -> None:
    logger.warning("Standby %s failed, reading from the primary for %d s: %s", alias, STANDBY_RETRY_S, error)
    _failed_until[alias] = clock.monotonic() + STANDBY_RETRY_S
    if alias in connections.settings:
        connections[alias].close()


def _words(alias: str, lag: float | Exception | None) -> str:
    if isinstance(lag, Exception):
        return _("Standby %(alias)s does not answer: read from the primary.") % {"alias": alias}
    if lag is None:
        return _("Read from database %(alias)s.") % {"alias": alias}
    if lag == inf:
        return _("Read from standby %(alias)s. How far it is behind is not known.") % {"alias": alias}
    return _("Read from standby %(alias)s, %(time)s behind.") % {"alias": alias, "time": format_seconds(lag)}
