"""What tests of a queue need beyond pytest: wait for facts, act on several connections, watch each change of status."""

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import QuerySet

from django_dbtaskqueue.core.states import EDGES, TERMINAL
from django_dbtaskqueue.models import MinuteCount, Task, TaskHistory
from tests.patience import PATIENCE, eventually, until as until  # every file of tests takes it from here


class Unprintable:
    """It has no text, as a model whose related row is gone."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Actor:
    """A thread with database connections of its own, which does one thing after the other."""

    def __init__(self, name: str = "actor") -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def do(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Begin; the future's ``result()`` is what the function returns or raises."""
        return self._pool.submit(function, *arguments, **options)

    def close(self) -> None:
        self._pool.submit(connections.close_all).result(PATIENCE)
        self._pool.shutdown()


@contextmanager
def actors(number: int) -> Iterator[list[Actor]]:
    cast = [Actor(f"actor-{index}") for index in range(number)]
    try:
        yield cast
    finally:
        for actor in cast:
            actor.close()


def at_once(number: int, function: Callable[[int], Any]) -> list[Any]:
    """Call ``function(0) … function(number - 1)`` in threads of their own, let go together; return the answers."""
    barrier = threading.Barrier(number)

    def run(index: int) -> Any:
        barrier.wait(PATIENCE)
        return function(index)

    with actors(number) as cast:
        return [future.result(PATIENCE) for future in [actor.do(run, index) for index, actor in enumerate(cast)]]


@contextmanager
def held(lock: Callable[[], object]) -> Iterator[None]:
    """Another transaction does this, and is open for the time of the block."""
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic():
            lock()
            locked.set()
            assert go_on.wait(PATIENCE)

    with actors(1) as (other,):
        holding = other.do(hold)
        try:
            assert locked.wait(PATIENCE)
            yield
        finally:
            go_on.set()
        holding.result(PATIENCE)


def sql(statement: str, parameters: Sequence[Any] | None = None, alias: str = "default") -> list[Any]:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, parameters)
        return list(cursor.fetchall()) if cursor.description else []


def with_settings(*after: str, **values: Any) -> Any:
    """Make a fixture for all tests of a module: it lays values over ``DBTASKQUEUE``, after other fixtures."""

    @pytest.fixture(autouse=True)
    def lay(request: pytest.FixtureRequest, settings: Any) -> None:
        for name in after:
            request.getfixturevalue(name)
        settings.DBTASKQUEUE = {**settings.DBTASKQUEUE, **deepcopy(values)}  # a test may edit them

    return lay


def output_of(*words: object, **options: Any) -> str:
    """Run a command of ``manage.py`` in this process; return what it prints."""
    out = io.StringIO()
    call_command(*map(str, words), stdout=out, **options)
    return out.getvalue()


def backend_pid(using: str = "default") -> int:
    """Return the process id of the server process behind the calling thread's connection."""
    return int(sql("SELECT pg_backend_pid()", alias=using)[0][0])


def in_time(act: Callable[[], object]) -> None:
    """Act again while Spark says that Python did not start in its ten seconds: no fault of what is tested."""
    for tries_left in reversed(range(5)):
        try:
            act()
        except Exception as error:
            if not tries_left or "failed to connect back" not in str(error):
                raise
        else:
            return


def until_blocked(pid: int) -> None:
    """Wait until that server process waits for a lock: ``pg_locks`` says so, no stopwatch does."""

    def waits() -> None:
        found = sql("SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", [pid])
        assert found, f"server process {pid} waits for no lock"

    eventually(waits)


def blocked() -> int:
    """Return how many server processes of the default database wait for a lock.

    A transaction keeps what it once read of ``pg_stat_activity``, and would never see a process that came later.
    """
    sql("SELECT pg_stat_clear_snapshot()")
    here = "NOT granted AND datname = current_database()"
    return len(sql(f"SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE {here}"))


@contextmanager
def alias_beside(name: str, **changed: object) -> Iterator[str]:
    """Another alias, of the database ``default``, or of one with other settings."""
    connections.settings[name] = {**connections.settings["default"], **changed}
    try:
        yield name
    finally:
        connections[name].close()
        del connections[name], connections.settings[name]


@contextmanager
def taken_back(using: str = "default") -> Iterator[None]:
    """What is written in the ``with`` block is rolled back at its end."""
    with transaction.atomic(using=using):
        yield
        transaction.set_rollback(True, using=using)


@contextmanager
def refused(condition: str, using: str = "default", *, code: str = "XX000") -> Iterator[None]:
    """The database raises an error for each update of a task for which a condition on NEW and OLD holds."""
    create = f"CREATE TRIGGER test_refuse BEFORE UPDATE ON dbtaskqueue_task FOR EACH ROW WHEN ({condition})"
    begin, end = [f"{create} BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"], "DROP TRIGGER test_refuse"
    if connections[using].vendor == "postgresql":
        body = f"BEGIN RAISE EXCEPTION 'refused by the test' USING ERRCODE = '{code}'; END"
        function = f"CREATE FUNCTION test_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$"
        begin, end = [function, f"{create} EXECUTE FUNCTION test_refuse()"], "DROP FUNCTION test_refuse CASCADE"
    for statement in begin:
        sql(statement, alias=using)
    try:
        yield
    finally:
        sql(end, alias=using)


COLUMNS = "task_id, old_status, new_status, old_total, new_total, old_attempt, new_attempt, budget, due, clock"
CREATE = (
    "CREATE TABLE test_audit (seq {serial}, task_id bigint, old_status text, new_status text, old_total bigint,"
    " new_total bigint, old_attempt bigint, new_attempt bigint, budget bigint, due {time}, clock {time})"
)
CHANGED = "OLD.status <> NEW.status OR OLD.total_attempt <> NEW.total_attempt OR OLD.attempt <> NEW.attempt"
UPDATED = (
    f"INSERT INTO test_audit ({COLUMNS}) VALUES (OLD.id, OLD.status, NEW.status, OLD.total_attempt, NEW.total_attempt,"
    " OLD.attempt, NEW.attempt, OLD.max_attempts, {greatest}(OLD.ready_time, OLD.next_process_time), {now});"
)
DELETED = (
    f"INSERT INTO test_audit ({COLUMNS}) VALUES (OLD.id, OLD.status, NULL, OLD.total_attempt, OLD.total_attempt,"
    " OLD.attempt, OLD.attempt, OLD.max_attempts, OLD.next_process_time, {now});"
)
POSTGRESQL = (
    CREATE.format(serial="bigserial", time="timestamptz"),
    "CREATE FUNCTION test_audit_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TG_OP = 'DELETE' THEN "
    + DELETED.format(now="statement_timestamp()")
    + " ELSE "
    + UPDATED.format(greatest="greatest", now="statement_timestamp()")
    + " END IF; RETURN NULL; END $$",
    "CREATE TRIGGER test_audit_update AFTER UPDATE ON dbtaskqueue_task FOR EACH ROW"
    f" WHEN ({CHANGED}) EXECUTE FUNCTION test_audit_row()",
    "CREATE TRIGGER test_audit_delete AFTER DELETE ON dbtaskqueue_task FOR EACH ROW EXECUTE FUNCTION test_audit_row()",
)
SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
SQLITE = (
    CREATE.format(serial="integer PRIMARY KEY AUTOINCREMENT", time="text"),
    f"CREATE TRIGGER test_audit_update AFTER UPDATE ON dbtaskqueue_task WHEN {CHANGED} BEGIN "
    + UPDATED.format(greatest="max", now=SQLITE_NOW)
    + " END",
    "CREATE TRIGGER test_audit_delete AFTER DELETE ON dbtaskqueue_task BEGIN "
    + DELETED.format(now=SQLITE_NOW)
    + " END",
)
LEGAL = {(str(source), edge.target and str(edge.target)) for edge in EDGES for source in edge.sources}
BROKEN_RULES = {
    "the fencing token changed by other than one checkout": "new_total NOT IN (old_total, old_total + 1)",
    "a checkout did not lead to PROCESSING": "new_total > old_total AND new_status <> 'PROCESSING'",
    "a checkout charged other than one attempt": "new_total > old_total AND new_attempt <> old_attempt + 1",
    "a checkout came before the task was due or its lease over": "new_total > old_total AND due > clock",
    "a checkout had no attempt left": "new_total > old_total AND old_attempt >= budget",
    "an attempt was charged without a checkout": "new_total = old_total AND new_attempt > old_attempt"
    # An operator who undoes reprocess or kick gives the attempts back.
    " AND NOT (old_status = 'CREATED' AND new_status IN ('ERROR', 'POISON'))",
    "an attempt was given back to a task that is not in line": "new_attempt < old_attempt AND new_status <> 'CREATED'",
}


class Audit:
    """Rows that triggers write in the same transaction as each change of status, token or attempt.

    Insertions are not watched: factories insert tasks of any status, and enqueue's statement names no status.
    """

    def __init__(self, using: str = "default") -> None:
        self.run, self.connection = partial(sql, alias=using), connections[using]

    def install(self) -> None:
        if "test_audit" not in self.connection.introspection.table_names():
            for statement in POSTGRESQL if self.connection.vendor == "postgresql" else SQLITE:
                self.run(statement)

    def clear(self) -> None:
        self.run("DELETE FROM test_audit")

    def edges(self) -> set[tuple[str, str | None]]:
        """Return the (old, new) statuses seen; a new status of None means that the row left."""
        return set(self.run("SELECT DISTINCT old_status, new_status FROM test_audit"))

    def problems(self) -> list[str]:
        found = [f"illegal edge {source} -> {target}" for source, target in sorted(self.edges() - LEGAL, key=str)]
        for problem, rule in BROKEN_RULES.items():
            ids = [row[0] for row in self.run(f"SELECT task_id FROM test_audit WHERE {rule} LIMIT 5")]
            found += [f"{problem}: tasks {ids}"] if ids else []
        return found

    def checkouts(self) -> dict[int, int]:
        return dict(self.run("SELECT task_id, count(*) FROM test_audit WHERE new_total > old_total GROUP BY task_id"))


def minute_counts(kind: str, using: str = "default") -> QuerySet[MinuteCount]:
    return MinuteCount.objects.using(using).filter(kind=kind)


def counted(using: str = "default") -> int:
    """Return hot + history + deleted: what was enqueued, if nothing was lost."""
    deleted = sum(minute_counts("deletion", using).values_list("count", flat=True))
    return Task.objects.using(using).count() + TaskHistory.objects.using(using).count() + deleted


def ended() -> list[str]:
    """Return the terminal statuses, as parameters for tests."""
    return [str(status) for status in TERMINAL]
