"""The wake-up of pollers: after commit or never, few for many, and nobody's trouble when it fails."""

import os
import selectors
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import connections, transaction
from django.db.backends.signals import connection_created

from django_dbtaskqueue import enqueue, enqueue_many, queue
from django_dbtaskqueue.core.context import wake_listeners
from django_dbtaskqueue.db import notify
from django_dbtaskqueue.db.session import MIN_STATEMENTS_TO_PREPARE
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.operations import bulk, queue_control
from django_dbtaskqueue.operations.permissions import Actor
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.operations.site import work
from tests.support import PATIENCE, alias_beside, sql, taken_back, until

pytestmark = pytest.mark.django_db(databases=["default", "sqlite"], transaction=True)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    queues: list[str] = []
    wake_listeners.add(queues.append)
    yield queues
    wake_listeners.discard(queues.append)
    notify.flush()


class WakeupRecorder:
    """Another process's connection, listening."""

    def __init__(self, alias: str = "default") -> None:
        wanted, given = {"host", "port", "user", "password", "dbname"}, connections[alias].get_connection_params()
        self.connection = psycopg.connect(**{key: given[key] for key in wanted & given.keys()}, autocommit=True)
        self._heard: list[str] = []
        self.connection.add_notify_handler(lambda note: self._heard.append(note.payload))
        self.connection.execute(f"LISTEN {notify.CHANNEL}")

    def hear(self, number: int = 1) -> list[str]:
        """Return what is heard, as soon as there are ``number``."""
        until(lambda: len(self._ask()) >= number)
        heard, self._heard[:] = self._heard[:], []
        return heard

    def rest(self) -> list[str]:
        quiet()
        return self.hear(0)

    def _ask(self) -> list[str]:
        self.connection.execute("SELECT 1")  # with its answer the server delivers all that was sent before
        return self._heard


def quiet() -> None:
    """Wait until all is sent: no thread is at work, however slow the machine."""
    until(lambda: notify.flush() or all(one._thread is None for one in notify._notifiers.values()))


@pytest.fixture
def recorder() -> Iterator[WakeupRecorder]:
    quiet()  # what earlier tests have still to say
    one = WakeupRecorder()
    yield one
    quiet()
    one.connection.close()


def test_a_wake_up_waits_for_the_commit(alias: str, heard: list[str]) -> None:
    with transaction.atomic(using=alias):
        enqueue("parcels", using=alias)
        with taken_back(alias):
            enqueue("other", using=alias)
        with transaction.atomic(using=alias):
            enqueue("letters", using=alias)
        assert heard == []
    assert heard == ["parcels", "letters"]
    # Without a transaction it is sent at once; many tasks are one, and nothing is none
    heard.clear()
    enqueue_many("parcels", [{}] * 50, using=alias)
    enqueue_many("letters", [], using=alias)
    enqueue("letters", using=alias)
    assert heard == ["parcels", "letters"]


def test_verbs_that_make_tasks_ready_wake_and_others_do_not(alias: str, heard: list[str]) -> None:
    for status in ("ERROR", "POISON", "PROCESSING", "CREATED"):
        make_task(status, using=alias)
    tasks = Task.objects.using(alias)
    tasks.filter(status="ERROR").mark_poison()
    tasks.filter(status="CREATED").cancel()
    tasks.filter(queue="letters").reprocess()
    assert heard == []
    tasks.kick(5)
    tasks.release_all()
    assert heard == ["parcels", "lost parcels", "parcels"], "pollers look whether they hold what was released"


def test_tasks_that_are_put_back_wake(alias: str, heard: list[str]) -> None:
    make_task(using=alias)
    cancelled = bulk.start("cancel", "queue:parcels", None, using=alias)
    work(alias)
    assert heard == []
    cancelled.refresh_from_db()
    bulk.put_back(cancelled, Actor())
    work(alias)
    assert heard == ["parcels"]


def test_a_task_that_a_consumer_gives_back_and_a_queue_that_is_resumed_wake(alias: str, heard: list[str]) -> None:
    parcels = queue("parcels", using=alias)
    parcels.put()
    parcels.release(parcels.take())
    assert heard == ["parcels"] * 2
    queue_control.pause("parcels", alias, by="ada")
    assert heard == ["parcels"] * 2
    queue_control.resume("parcels", alias)
    assert heard == ["parcels"] * 3


def test_other_processes_hear_of_it_through_the_database(recorder: WakeupRecorder) -> None:
    with transaction.atomic():
        enqueue("parcels")
        enqueue("parcels")
        enqueue("letters")
        assert recorder.rest() == []
    heard = [*recorder.hear(2), *recorder.rest()]
    assert set(heard) == {"letters", "parcels"} and len(heard) <= 3
    # A storm of commits is a trickle of wake-ups
    for _ in range(300):
        enqueue("parcels")
    heard = [*recorder.hear(1), *recorder.rest()]
    assert set(heard) == {"parcels"} and len(heard) < 150


def test_it_can_be_turned_off(settings: Any, recorder: WakeupRecorder, heard: list[str]) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"parcels": {}}, "NOTIFY": False}
    enqueue("parcels")
    assert heard == ["parcels"]
    assert recorder.rest() == []


def test_flush_leaves_neither_thread_nor_connection_and_it_goes_on_afterwards(recorder: WakeupRecorder) -> None:
    for _ in range(3):
        enqueue("parcels")
        notify.flush()
        assert recorder.hear(1) == ["parcels"]
    assert not [thread for thread in threading.enumerate() if thread.name == f"{notify.CHANNEL}-notifier"]
    own = connections["default"].connection.info.backend_pid
    sent = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%set_config%pg_notify%' AND datname = current_database()"
    until(lambda: {pid for (pid,) in recorder.connection.execute(sent)} <= {own, recorder.connection.info.backend_pid})


def test_a_test_database_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("test_site", "site_for_ci"):
        assert notify.is_for_tests({"NAME": name, "TEST": {"NAME": "site_for_ci"}})
    assert not notify.is_for_tests({"NAME": "site", "TEST": {"NAME": None}})
    settings = connections.settings["default"]
    ours = {**settings, "TEST": {**settings["TEST"], "NAME": settings["NAME"]}}
    monkeypatch.setitem(connections.settings, "ci", ours)
    sender = notify.Notifier("ci")
    sender.notify("parcels")
    until(lambda: sender._thread is None)


def test_a_listener_that_raises_is_not_the_caller_s_trouble(alias: str) -> None:
    def broken(queue: str) -> None:
        raise RuntimeError("broken listener")

    wake_listeners.add(broken)
    try:
        with transaction.atomic(using=alias):
            enqueue("parcels", using=alias)
        enqueue("parcels", using=alias)
    finally:
        wake_listeners.discard(broken)
    assert Task.objects.using(alias).count() == 2


def test_a_database_that_is_away_is_not_the_caller_s_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**connections.settings["default"], "PORT": "1", "HOST": "127.0.0.1"}
    monkeypatch.setitem(connections.settings, "away", wrong)
    sender = notify.Notifier("away")
    sender.notify("parcels")
    sender.flush(PATIENCE)
    assert sender._thread is None


def test_a_listener_rests_until_it_hears_something(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Selector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            waits.append(notify.LISTEN_PROBE_INTERVAL_S if timeout is None else timeout)
            return super().select(timeout)

    monkeypatch.setattr(notify.selectors, "DefaultSelector", Selector)
    woken: list[str] = []
    listener = notify.Wakeup("default", woken.append)
    listener.start()
    try:
        until(lambda: waits)
        sql(f"NOTIFY {notify.CHANNEL}, 'letters'")
        until(lambda: woken == ["", "letters"])
        # When its connection breaks, then it makes a new one, and what it may have missed is looked for
        listens = "query LIKE 'LISTEN %' AND datname = current_database()"
        sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {listens}")
        until(lambda: woken == ["", "letters", ""])
    finally:
        listener.stop()
    assert min(waits) >= 1, "it wakes up by itself only to probe its connection"


def test_it_survives_a_fork(recorder: WakeupRecorder) -> None:
    enqueue("parcels")
    assert recorder.hear(1) == ["parcels"]
    alive = notify._notifiers["default"]
    with alive._changed:
        alive._thread = threading.current_thread()  # as if it were at work: in the child it is not
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of any fork of a process with threads
            child = os.fork()
        if child == 0:
            try:
                notify.notify("default", "postgresql", "letters")
                notify.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    finally:
        with alive._changed:
            alive._thread = None
    assert recorder.hear(1) == ["letters"]


def test_a_transaction_by_hand_can_enqueue_and_settle(alias: str, heard: list[str]) -> None:
    """Without autocommit nobody is told of the commit: the task is there after it, and polling finds it."""
    transaction.set_autocommit(False, using=alias)
    try:
        enqueue("parcels", "by hand", using=alias)
        [task] = Task.objects.db_manager(alias).checkout("parcels", poller_instance="by hand")
        task.complete()
        transaction.commit(using=alias)
    finally:
        transaction.rollback(using=alias)
        transaction.set_autocommit(True, using=alias)
    assert Task.objects.using(alias).get().status == "COMPLETED" and heard == []


@pytest.fixture
def site(settings: Any) -> Iterator[str]:
    """A database that is not one of a test run, so that a notifier keeps its connection."""
    with alias_beside("site", NAME=urlsplit(settings.SERVER_URL).path.removeprefix("/"), CONN_MAX_AGE=None) as alias:
        yield alias


@pytest.fixture
def idle_notifier(site: str) -> Iterator[notify.Notifier]:
    one = notify.Notifier(site)
    for _ in range(MIN_STATEMENTS_TO_PREPARE + 1):
        one.notify("parcels")
        until(lambda: one._idle is not None)
    yield one
    one.flush(PATIENCE)


def test_a_slow_server_is_told_all(site: str, idle_notifier: notify.Notifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "NOTIFY_PAUSE_FACTOR", 10**6)
    recorder = WakeupRecorder(site)
    with closing(recorder.connection):
        for queue in ("letters", "parcels", "letters"):
            idle_notifier.notify(queue)
        assert sorted(recorder.hear(3)) == ["letters", "letters", "parcels"]


def test_only_one_that_another_follows_waits(idle_notifier: notify.Notifier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_SAVED_PAUSE_S": 0, "NOTIFY_PAUSE_FACTOR": 10**6, "MAX_NOTIFY_PAUSE_S": 10**6}.items():
        monkeypatch.setattr(notify, name, value)
    for _ in range(3):
        idle_notifier.notify("letters")
        until(lambda: idle_notifier._idle is not None)


def test_a_connection_that_died_while_it_was_idle_loses_no_wake_up(site: str, idle_notifier: notify.Notifier) -> None:
    recorder = WakeupRecorder(site)
    with closing(recorder.connection):
        pid = idle_notifier._idle.raw.info.backend_pid
        recorder.connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        alive = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        until(lambda: not recorder.connection.execute(alive, [pid]).fetchone())
        idle_notifier.notify("letters")
        assert recorder.hear(1) == ["letters"]


def test_nobody_waits_for_the_notifier_s_connection(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "NOTIFY_INTERVAL_S", 0)
    recorder, sender, may_connect = WakeupRecorder(site), notify.Notifier(site), threading.Event()
    connections[site].connect()

    def connect(**_: Any) -> None:
        if threading.current_thread() is sender._thread:
            may_connect.wait(PATIENCE)

    connection_created.connect(connect)
    with closing(recorder.connection):
        for queue in ("letters", "parcels", "claims"):
            sender.notify(queue)
            assert recorder.hear(1) == [queue]
            assert (sender._thread is None) is (queue == "letters"), "one that is alone needs no notifier"
        may_connect.set()
        until(lambda: sender._idle is not None)
        sender.notify("offers")
        assert recorder.hear(1) == ["offers"]
    connection_created.disconnect(connect)
    sender.flush(PATIENCE)


def test_the_notifier_keeps_its_connection_as_the_site_keeps_its_own(site: str) -> None:
    for age, pool, seconds in ((0, False, 1), (20, False, 20), (3600, False, 60), (None, False, 60), (None, True, 1)):
        connection = connections.create_connection(site)
        connection.settings_dict.update({"CONN_MAX_AGE": age, "OPTIONS": {"pool": pool}})
        assert notify._linger(connection) == seconds


PROGRAM = """
import threading
from django_dbtaskqueue import enqueue
names = lambda: [t.name for t in threading.enumerate() if "notifier" in t.name]
enqueue("claims")
assert names() == []
"""


def test_a_short_command_wakes_pollers(postgres_process_database: ProcessDatabase) -> None:
    recorder = WakeupRecorder()
    with closing(recorder.connection):
        postgres_process_database.run("shell", "--command", PROGRAM)
        assert recorder.hear(0) == ["claims"]
