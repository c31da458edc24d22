"""The wake-up of pollers by NOTIFY and LISTEN. A lost wake-up costs only time, because pollers poll as well.

NOTIFY inside the caller's transaction would make all commits of the server take turns. So the notifier, a daemon thread
with its own connection, sends at most one NOTIFY per 5 ms, fewer on a busy machine. After the commit the caller only
marks the queue. If the notifier's connection is idle, the caller sends the NOTIFY on it, and the notifier waits for the
answer: so a wake-up does not wait until the notifier has the interpreter.

To connect takes longer than all that a wake-up may take. So the caller sends the first one after a silence, and those
while the notifier connects, on the connection that has just committed. So a rare enqueue needs no second connection.
"""

import atexit
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.creation import TEST_DATABASE_PREFIX

from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.core import logger
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.core.durations import clock, jittered, next_pause
from django_dbtaskqueue.core.threads import WatchedThread, after_fork
from django_dbtaskqueue.db import liveness
from django_dbtaskqueue.db.session import LIBPQ_IDLE, Session, should_prepare

CHANNEL = "dbtaskqueue"
LEASES_LOST = "lost "  # before the queue's name: leases of it were ended. No name has a blank, so old pollers ignore it
TASK_ENDED = "ended "  # before the id of a task that ended and that something waits for. No queue has such a name
NOTIFY_INTERVAL_S = 0.005  # between two NOTIFYs
NOTIFY_PAUSE_FACTOR = 40  # while more come, pause 40 times as long as a NOTIFY takes: a busy machine sends fewer
MAX_SAVED_PAUSE_S = 0.2  # quiet times count as pauses up to this much
MAX_NOTIFY_PAUSE_S = 0.1  # however slow a NOTIFY is
NOTIFIER_LINGER_S = 1.0, 60.0  # the notifier keeps its idle connection for CONN_MAX_AGE, within these limits
FLUSH_TIMEOUT_S = 2.0  # a process waits at its end at most this long for its last wake-up
LISTEN_PROBE_INTERVAL_S = 10.0  # without a notification, until a statement that only sees whether the connection works
LISTEN_END_TIMEOUT_S = 2.0
RECONNECT_PAUSES_S = 0.1, 5.0  # between two attempts to connect: the first pause and the longest
# A notification does not survive a crash of the server, so the sender need not wait until its commit is on disk.
_QUIETLY = f"SELECT set_config('synchronous_commit', 'off', true), pg_notify('{CHANNEL}', "
NOTIFY_SQL = f"{_QUIETLY}q) FROM unnest(%(queues)s::text[]) AS q"
# A new connection needs a third of the time for it: it looks up no function and no type.
NOTIFY_ONCE_SQL = f"SET LOCAL synchronous_commit = off; NOTIFY {CHANNEL}, %s"
NOTIFY_ONE_NAME, NOTIFY_ONE_SQL = b"dbtaskqueue_notify", f"{_QUIETLY}$1)".encode()  # a prepared statement


class _IdleConnection:
    """An idle connection: one thread may send a NOTIFY, and another waits for the answer."""

    def __init__(self, session: Session) -> None:
        connection = session.connection
        self.raw = connection.connection
        lasts = conf.settings().prepare and not connection.settings_dict["OPTIONS"].get("pool")
        self.prepared = bool(lasts and should_prepare(self.raw))
        if self.prepared:
            self.raw.pgconn.prepare(NOTIFY_ONE_NAME, NOTIFY_ONE_SQL)

    def send(self, queue: str) -> bool:
        """Send without waiting for the answer; return whether that worked."""
        pgconn, parameters = self.raw.pgconn, [queue.encode()]
        try:
            if self.prepared:
                pgconn.send_query_prepared(NOTIFY_ONE_NAME, parameters)
            else:
                pgconn.send_query_params(NOTIFY_ONE_SQL, parameters)
            pgconn.flush()
        except Exception:  # it died while it was idle, which is not the trouble of the one who enqueues
            return False
        return True

    def receive(self) -> None:
        pgconn = self.raw.pgconn
        with selectors.DefaultSelector() as sockets:
            sockets.register(self.raw.fileno(), selectors.EVENT_READ)
            while True:
                while pgconn.is_busy():  # psycopg's ``get_result`` would keep the interpreter, also for the last part
                    sockets.select()
                    pgconn.consume_input()
                if (result := pgconn.get_result()) is None:
                    return
                if result.error_message:
                    raise OperationalError(result.error_message.decode(errors="replace"))


class Notifier:
    """Sends one alias's wake-ups in one process. Its thread starts when they come often, and ends when it is idle."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._pending: set[str] = set()
        self._idle: _IdleConnection | None = None  # while the thread waits
        self._sent: str | None = None  # the queue whose NOTIFY is on its way on it
        self._sent_at = -NOTIFIER_LINGER_S[1]
        self._linger = self._silence = _linger(connections[alias])
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._connects = True  # its thread, as soon as it has one

    def notify(self, queue: str) -> None:
        """Wake the pollers of ``queue`` soon, after at most one round trip to the database. Never raises."""
        # The NOTIFY of one that is pending is sent after this, and no lock is needed to see that.
        if queue in self._pending or (self._connects and self._sent_by_caller(queue)):
            return
        with self._changed:
            if self._idle is not None and self._idle.send(queue):
                self._idle, self._sent, self._sent_at = None, queue, clock.monotonic()
            else:
                self._pending.add(queue)
            self._start()

    def _sent_by_caller(self, queue: str) -> bool:
        """Send on the caller's connection, unless that was done just now. A second time starts the thread as well."""
        now = clock.monotonic()
        with self._changed:
            since = now - self._sent_at
            if since < NOTIFY_INTERVAL_S:
                return False
            self._sent_at = now
        if not _sent_on(connections[self.alias], queue):  # without the lock: it waits for an answer
            return False
        if since < self._silence:
            with self._changed:
                self._start()
        return True

    def _start(self) -> None:
        if self._thread is None:
            self._connects = True
            self._thread = threading.Thread(target=self._send, name=f"{CHANNEL}-notifier", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> None:
        """Wait until all is sent and the connection is closed."""
        with self._changed:
            self._linger = 0.0
            self._changed.notify_all()
            clock.wait_for(self._changed, lambda: self._thread is None, timeout)

    def _send(self) -> None:
        session = Session(connections.create_connection(self.alias))  # nothing of a session is set: it may be pooled
        self._linger = self._silence
        liveness.bound_waits(session.connection)
        deadline = liveness.Deadline(session.connection)
        idle = self._connected(session, deadline)
        owed, begun = 0.0, clock.monotonic()
        while queues := self._take(session, idle):
            now = clock.monotonic() if self._sent is None else self._sent_at
            owed, begun = max(owed - (now - begun), -MAX_SAVED_PAUSE_S), now
            try:
                liveness.ensure_thread()
                with deadline:
                    self._notify_all(session, idle, queues)
                    idle = _idle_after(session, idle)
            except Exception as error:  # if the thread died, this process would send no more wake-ups
                logger.debug("Wake-up of %s not sent, polling will find the tasks: %s", queues, error)
                _close(session)
                idle = None
            owed += NOTIFY_PAUSE_FACTOR * (clock.monotonic() - begun)
            clock.wait(threading.Event(), NOTIFY_INTERVAL_S)
            if not self._pending:  # they come seldom: a slow NOTIFY, or an answer that was read late, delays no other
                owed = min(owed, 0.0)
            clock.wait(threading.Event(), min(owed, MAX_NOTIFY_PAUSE_S) - NOTIFY_INTERVAL_S)

    def _connected(self, session: Session, deadline: liveness.Deadline) -> _IdleConnection | None:
        """Connect before there is a NOTIFY to pay for; return how others may use the connection."""
        try:
            liveness.ensure_thread()
            with deadline:
                session.connection.connect()
                return _idle_after(session, None)
        except Exception as error:
            logger.debug("No connection for wake-ups: %s", error)
            _close(session)
            return None
        finally:
            self._connects = False

    def _notify_all(self, session: Session, idle: _IdleConnection | None, queues: set[str]) -> None:
        """Send one NOTIFY, or wait for the answer to the one that was sent; again if the connection has died."""
        kept = session.connection.connection is not None
        try:
            if self._sent is not None and idle is not None:
                idle.receive()
            else:
                session.repeat(NOTIFY_SQL, {"queues": sorted(queues)})
        except Exception:
            if not kept:
                raise
            _close(session)
            session.repeat(NOTIFY_SQL, {"queues": sorted(queues)})
        finally:
            self._sent = None

    def _take(self, session: Session, idle: _IdleConnection | None) -> set[str]:
        """Return the queues to wake, or that of the NOTIFY sent on ``idle``. Empty: the thread has ended."""
        with self._changed:
            self._idle = idle
            clock.wait_for(self._changed, lambda: self._pending or self._sent or not self._linger, self._linger)
            self._idle = None
            if self._sent is not None:
                return {self._sent}
            queues, self._pending = self._pending, set()
            if not queues:
                _close(session)
                self._thread, self._connects = None, True
                self._changed.notify_all()
            return queues


def _sent_on(connection: Any, queue: str) -> bool:
    """Send a NOTIFY on a Django connection that has no transaction open; return whether that worked."""
    raw = connection.connection
    try:
        if raw is None or connection.in_atomic_block or raw.info.transaction_status != LIBPQ_IDLE or not raw.autocommit:
            return False
        raw.execute(connection.ops.compose_sql(NOTIFY_ONCE_SQL, [queue]), prepare=False)  # none that the site counts
    except Exception:
        connection.errors_occurred = True  # Django looks whether it still works
        return False
    return True


def _idle_after(session: Session, idle: _IdleConnection | None) -> _IdleConnection | None:
    """Return how others may use a connection that is idle now; ``idle``: how they could before."""
    if session.logged():
        return None
    if idle is not None and idle.prepared and idle.raw is session.connection.connection:
        return idle
    return _IdleConnection(session)


def _linger(connection: BaseDatabaseWrapper) -> float:
    """Return how long an idle notifier keeps its connection: one of a pool may be missed elsewhere."""
    settings = connection.settings_dict
    if is_for_tests(settings):
        return 0.0
    shortest, longest = NOTIFIER_LINGER_S
    age = settings["CONN_MAX_AGE"]
    return shortest if settings["OPTIONS"].get("pool") else max(shortest, longest if age is None else min(age, longest))


def _close(session: Session) -> None:
    with suppress(Exception):  # a connection this broken may not even close, and must not end the thread
        session.connection.close()


def is_for_tests(settings: Mapping[str, Any]) -> bool:
    """Whether this is a test database, which cannot be dropped while a connection to it is open."""
    name = str(settings["NAME"])
    return name.startswith(TEST_DATABASE_PREFIX) or name == settings["TEST"].get("NAME")


_notifiers: dict[str, Notifier] = {}


def wake_after_commit(connection: BaseDatabaseWrapper, queue: str, *, lost: bool = False) -> None:
    """Wake the pollers of ``queue`` after the commit, or now; ``lost``: to look whether they still hold their tasks."""
    if lost:
        wake_after_commit(connection, LEASES_LOST + queue)
    on_commit(connection, partial(notify, connection.alias, connection.vendor, queue))


def on_commit(connection: BaseDatabaseWrapper, call: Callable[[], object]) -> None:
    """Call ``call`` when the current transaction commits, or now if there is none; what it raises is logged.

    Without autocommit (``set_autocommit(False)``) Django does not say when a transaction ends: ``call`` is not called.
    """
    if connection.in_atomic_block or connection.get_autocommit():
        # Django logs the __qualname__ of a hook that raised, and a partial has none.
        connection.on_commit(call if hasattr(call, "__qualname__") else lambda: call(), robust=True)


def notify(alias: str, vendor: str, queue: str) -> None:
    """Wake the pollers of ``queue``: those of this process at once, others through the database."""
    for listener in tuple(wake_listeners):
        listener(queue)
    if vendor == "postgresql" and conf.settings().notify:
        if (notifier := _notifiers.get(alias)) is None:
            notifier = _notifiers.setdefault(alias, Notifier(alias))
        notifier.notify(queue)


def flush() -> None:
    """Wait until every wake-up of this process is sent and no connection of a notifier is open."""
    for notifier in tuple(_notifiers.values()):
        notifier.flush()


class Wakeup:
    """Calls ``wake(queue)`` for each NOTIFY, on PostgreSQL; those of this process go to ``wake_listeners``."""

    def __init__(self, alias: str, wake: Callable[[str], None]) -> None:
        self._session = Session.open(conf.settings().listen.get(alias, alias))
        self._wake = wake
        self._ended = threading.Event()
        self.thread: WatchedThread | None = None

    def start(self) -> None:
        if self._session.postgresql and conf.settings().notify:
            self._ending, self._end = socket.socketpair()
            self.thread = WatchedThread(target=self._loop, name="dbtaskqueue-listen", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self.thread is not None:
            self._end.close()
            self.thread.join(timeout=LISTEN_END_TIMEOUT_S)
            self._ending.close()

    def _loop(self) -> None:
        pause = 0.0
        while not self._ended.is_set():
            try:
                self._listen()
                pause = 0.0
            except Exception as error:
                logger.debug("Listening broke off, polling goes on: %s", error)
                self._session.close()
                pause = next_pause(pause, *RECONNECT_PAUSES_S)
                clock.wait(self._ended, jittered(pause))
        self._session.close()

    def _listen(self) -> None:
        self._session.run(f"LISTEN {CHANNEL}", {})
        raw: Any = self._session.connection.connection
        self._wake("")  # a wake-up may have been sent before we listened
        with selectors.DefaultSelector() as sockets:  # psycopg's own wait wakes up ten times a second
            for one in (raw, self._ending):
                sockets.register(one.fileno(), selectors.EVENT_READ)
            while not self._ended.is_set():
                # A connection that only listens does not notice that it is dead, so it is probed. Not while a
                # notification waits: psycopg 3.2 forgets those that come before a probe's answer.
                if not sockets.select(LISTEN_PROBE_INTERVAL_S):
                    self._session.run(f"LISTEN {CHANNEL}", {})  # the doctor knows a listener by its last statement
                for notification in raw.notifies(timeout=0):  # also those that came with the probe's answer
                    self._wake(notification.payload)


@after_fork
def _after_fork() -> None:
    # The thread and its connection stayed with the parent.
    _notifiers.clear()
    wake_listeners.clear()


atexit.register(flush)
