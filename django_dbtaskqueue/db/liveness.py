"""Whether a connection still works: how long the poller waits for an answer, and what it does without one.

A network that drops packets breaks no connection. A statement on it would wait for ever, and with it a thread of the
poller. So each connection of the poller has a deadline: a thread shuts down the socket of a statement that is not
answered in time. The statement then fails like one of a server that is away.
"""

import inspect
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any
from weakref import WeakSet

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DataError, Error, IntegrityError, InterfaceError, OperationalError

from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.durations import format_seconds

ANSWER_TIMEOUT_S = 10.0  # for one statement of a poller; its statements take milliseconds
MIN_ANSWER_TIMEOUT_S = 1.0  # however short a lease is
MAX_ANSWER_TIMEOUT_S = 300.0  # after the timeout has been doubled: a statement may be slow, not unanswered
CHECK_TIMEOUT_S = 3.0  # for an answer that only shows whether a connection works
CALM_S = 60.0  # without an unanswered statement, before a doubled timeout falls back
DEADLINE_CHECK_INTERVAL_S = 0.2
TOO_LARGE = "54"  # PostgreSQL's class of values beyond a limit, such as that of an index
ORDINARY = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "SAVEPOINT ", "RELEASE ")  # as Django writes them
# Statements whose effect may outlive their transaction: settings, roles, temporary tables, cursors, locks of a session.
CHANGES_SESSION = re.compile(
    r"""(?:^|;|\*/|['"])\s*(?:set\s+(?!local\s|transaction\s|constraints\s)|create\s+temp|(?:declare|prepare|do|call|listen|pragma|attach)\s)
    |set_config\s*\((?![^()]*\btrue\s*\))|advisory_lock""",
    re.IGNORECASE | re.VERBOSE,
)
# libpq's parameters. The project's OPTIONS win.
NETWORK_OPTIONS: dict[str, object] = {
    "connect_timeout": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
}


class Deadline:
    """Limits the time of what runs inside ``with``: each statement of one connection, or one periodic job.

    A statement that is really slow must end some time. So an unanswered one doubles the limit, for a minute.
    """

    def __init__(self, connection: BaseDatabaseWrapper, seconds: float = ANSWER_TIMEOUT_S) -> None:
        self.seconds = seconds
        self._connection = connection
        self._limit = seconds
        self._calm_at = 0.0  # when a doubled limit falls back
        self._depth = 0
        self._since = 0.0  # when the statement was sent; 0 while there is none
        self._lock = threading.Lock()  # so that the socket is not closed while it is shut down
        if connection.vendor == "postgresql":
            _deadlines.add(self)

    def __enter__(self) -> None:
        self._depth += 1
        self._since = monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            since, self._since = self._since, monotonic() if self._depth else 0.0
        if self._limit > self.seconds:
            now = monotonic()
            if now - since > self.seconds:
                self._calm_at = now + CALM_S
            elif now > self._calm_at:
                self._limit = self.seconds

    def enforce(self) -> None:
        """Shut the connection down if its statement has waited too long for an answer."""
        with self._lock:
            waited = monotonic() - self._since
            if not self._since or waited < self._limit:
                return
            self._since = 0.0
            self._limit, self._calm_at = min(2 * self._limit, MAX_ANSWER_TIMEOUT_S), monotonic() + CALM_S
            with suppress(Exception):  # it has just been closed, or is still being made: that has a timeout of its own
                with socket.fromfd(_fileno(self._connection), socket.AF_INET, socket.SOCK_STREAM) as twin:
                    twin.shutdown(socket.SHUT_RDWR)
                alias, seconds = self._connection.alias, format_seconds(waited)
                logger.warning("Database %s gave no answer for %s: connecting again", alias, seconds)


def bound_waits(connection: BaseDatabaseWrapper, *, pool: bool = True) -> None:
    """Let the system end what it knows to be dead on this connection, from the next time that it connects.

    Without ``pool`` the connection is not taken from the project's pool. One from the pool is left as it is.
    It commits each statement by itself, whatever the project's AUTOCOMMIT says: nobody here commits for it.
    """
    connection.settings_dict = {**connection.settings_dict, "AUTOCOMMIT": True}
    options: Mapping[str, object] = connection.settings_dict["OPTIONS"]
    if connection.vendor != "postgresql" or (pool and options.get("pool")):
        return
    changed = {**NETWORK_OPTIONS, **options} | ({"pool": False} if options.get("pool") else {})
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": changed}


@contextmanager
def bounded_answers(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Limit how long the block may wait for a connection, and for answers."""
    bound_waits(connection)
    ensure_thread()
    with Deadline(connection):
        yield


def is_about_data(error: Exception) -> bool:
    """Whether an error is about what was to be written, and not about the database: each repetition would fail."""
    about_data = isinstance(error, DataError | IntegrityError) or sqlstate(error).startswith(TOO_LARGE)
    return about_data or not isinstance(error, Error)


def sqlstate(error: Exception) -> str:
    """Return PostgreSQL's code of the error that Django raised again; empty if it has none, as on SQLite."""
    return getattr(error.__cause__, "sqlstate", None) or ""


class Outages:
    """Counts the outages that this process has noticed: afterwards connections are checked before they are used."""

    seen = 0


outages = Outages()


class DatabaseUse:
    """What is known of how one call of a processor uses its connections. Executors begin it, and read it at the end."""

    dead: bool | None = None  # its connection was dead before its first statement; None: it has made none
    begun: tuple[BaseDatabaseWrapper, ...] = ()  # the connections that have had their first statement
    doubtful = False  # it may have left a connection on which the next call fails


OUTSIDE = DatabaseUse()  # of a call
# Of the thread's call, or the coroutine's: others use the same connections meanwhile, on Django's thread for their
# statements, which sees the use of the one it works for.
database_use: ContextVar[DatabaseUse] = ContextVar("dbtaskqueue_database_use", default=OUTSIDE)
# Where a database error is about the connection: no statement has been sent.
_CONNECTS = {inspect.unwrap(getattr(BaseDatabaseWrapper, name)).__code__ for name in ("connect", "_cursor")}


def note_statements(connection: BaseDatabaseWrapper) -> None:
    """From now on, note at each call's first statement whether the connection is dead, and what changes its session."""
    if _note_statement not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _note_statement)


def begin_first_statement(connection: BaseDatabaseWrapper) -> None:
    """A statement is about to be sent. It matters if it is the first one of this use."""
    use = database_use.get()
    if use is not OUTSIDE and connection not in use.begun:  # of which nobody asks, and which would keep them all
        use.begun = (*use.begun, connection)
        use.dead = use.dead or has_input(connection)


def connected() -> None:
    """The present call has made a connection, so what it does has begun on a live one."""
    use = database_use.get()
    use.dead = use.dead or False


def note_failure(error: BaseException, alias: str) -> None:
    """Note it if the task ended because its first use of the database ``alias`` found no connection, and made none.

    Another database is not waited for: the poller goes on without it, and would take the task again at once.
    After each other error of a database its connection is doubtful: a setting may be the reason.
    """
    use = database_use.get()
    use.doubtful = use.doubtful or (isinstance(error, Exception) and not is_about_data(error))
    trace = error.__traceback__ if use.dead is None and isinstance(error, OperationalError | InterfaceError) else None
    while trace is not None:
        if trace.tb_frame.f_code in _CONNECTS and trace.tb_frame.f_locals["self"].alias == alias:
            use.dead = True
        trace = trace.tb_next


def _note_statement(
    execute: Callable[..., object], sql: object, params: object, many: object, context: dict[str, BaseDatabaseWrapper]
) -> object:
    begin_first_statement(context["connection"])
    text = sql if isinstance(sql, str) else str(sql)
    ordinary = text.startswith(ORDINARY) and ";" not in text and "set_config" not in text and "advisory" not in text
    if not ordinary and CHANGES_SESSION.search(text):
        database_use.get().doubtful = True
    return execute(sql, params, many, context)


FIRST_STATEMENT = [_note_statement]  # the wrappers of a connection that has no others


def _fileno(connection: BaseDatabaseWrapper) -> int:
    raw: Any = connection.connection
    return int(raw.fileno())


def has_input(connection: BaseDatabaseWrapper) -> bool:
    """Whether the server has sent something without being asked: as a rule, that it closed the connection."""
    if not hasattr(connection.connection, "fileno"):
        return False
    try:
        poll = select.poll()
        poll.register(_fileno(connection), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # the driver knows that it is closed
        return True


def close_if_dead(connection: BaseDatabaseWrapper) -> None:
    """Ask the server for an answer, and close the connection without one. The next statement connects again."""
    ensure_thread()
    with Deadline(connection, CHECK_TIMEOUT_S):
        usable = connection.is_usable()
    if not usable:
        with suppress(Exception):  # even close() may fail on a broken connection
            connection.close()


def ensure_thread() -> None:
    """See that the thread runs that enforces the deadlines of this process."""
    global _thread
    with _starting:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_enforce_all, name="dbtaskqueue-deadlines", daemon=True)
            _thread.start()


def _enforce_all() -> None:
    pause = threading.Event()
    while _deadlines:
        for deadline in tuple(_deadlines):
            deadline.enforce()
        pause.wait(DEADLINE_CHECK_INTERVAL_S)


_deadlines: WeakSet[Deadline] = WeakSet()
_thread: threading.Thread | None = None
_starting = threading.Lock()
