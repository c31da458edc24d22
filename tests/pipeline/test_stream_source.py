"""The stream of finished tasks: every one, however late it commits, and none a second time after a restart."""

from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db.models.functions import Now

from django_dbtaskqueue import enqueue_many
from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql import pipeline
from django_dbtaskqueue.models import FinishEvent, StreamPosition, Task
from django_dbtaskqueue.operations.doctor import examine
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.lake.archive_jobs import Stream
from django_dbtaskqueue.pipeline.source import Selection, register_stream, schema_of, unregister_stream
from django_dbtaskqueue.pipeline.source.stream_reader import TaskStreamReader
from tests.patience import Deadline, eventually
from tests.support import sql, until
from tests.testapp.models import Parcel

ENDED = "ready_time = NULL, finish_time = statement_timestamp(), last_update_time = statement_timestamp()"
SETTLE = f"UPDATE dbtaskqueue_task SET status = 'ERROR', final_status = 'ERROR', {ENDED}"


class Follower:
    """A reader that Spark would drive, driven by hand."""

    def __init__(self, database: Database, name: str | None = None) -> None:
        self.reader = TaskStreamReader(Selection(database, "task", schema_of("task", ["reference_number"])), name)
        self.offset = self.begin = self.reader.initialOffset()

    def read_until(self, *references: str) -> None:
        """Read on until these have come, and see that no others have."""
        found: list[str] = []
        deadline = Deadline()  # the server's own transactions (an ANALYZE) delay the stream as well
        while len(found) < len(references) and not deadline.passed:
            found += self.read()
        assert sorted(found) == sorted(references)

    def read_until_events_are_complete(self) -> None:
        """Pass the registration: a micro-batch before it compares all rows. Open transactions of others delay it."""
        complete_from: Any = self.reader._complete_from()
        until(lambda: (self.read(), self.offset["transaction"] >= complete_from) == ([], True))

    def read(self) -> list[str]:
        """The references of the next micro-batch."""
        self.reader.commit(self.offset)
        self.begin = self.offset
        self.offset = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        return self.read_again()

    def read_again(self) -> list[str]:
        """The references of the last micro-batch, as Spark reads it after a kill."""
        parts = self.reader.partitions(self.begin, self.offset)
        batches = [batch for part in parts for batch in self.reader.read(part)]
        return sorted(name for batch in batches for name in batch.column(0).to_pylist())


def finish(database: Database, *references: str, more: str = "") -> Any:
    """Settle tasks on a connection of its own, in a transaction that stays open; return the connection."""
    other = database.connect()
    other.autocommit = False
    other.execute(f"{SETTLE} WHERE reference_number = ANY(%s){more}", [list(references)])
    return other


def commit(*open_connections: Any) -> None:
    for other in open_connections:
        other.commit()
        other.close()


@pytest.fixture
def pg(quiet_pg: Database) -> Database:
    return quiet_pg


@pytest.fixture(params=["events", "scan"])
def follower(pg: Database, request: pytest.FixtureRequest) -> Follower:
    enqueue_many("other", [(name, None) for name in "abcdefgh"])
    return registered(pg) if request.param == "events" else Follower(pg)


@pytest.fixture
def events(pg: Database) -> Follower:
    enqueue_many("other", [(name, None) for name in "abcdefgh"])
    return registered(pg)


def registered(database: Database, name: str = "a stream") -> Follower:
    register_stream(database, name)
    return Follower(database, name)


def blocks_read() -> int:
    """How many blocks of the task table have been read. A session counts before it leaves the list of sessions."""
    until(lambda: not sql("SELECT 1 FROM pg_stat_activity WHERE application_name = 'dbtaskqueue-pipeline'"))
    sql("SELECT pg_stat_force_next_flush()")
    blocks = "heap_blks_read + heap_blks_hit"
    return int(sql(f"SELECT {blocks} FROM pg_statio_user_tables WHERE relname = 'dbtaskqueue_task'")[0][0])


def test_a_micro_batch_reads_what_finished_and_not_the_table(pg: Database) -> None:
    enqueue_many("other", [(f"old {number}", None) for number in range(5_000)])
    commit(finish(pg, "old 0", more=" OR true"))
    enqueue_many("other", [(name, None) for name in "abc"])
    follower = registered(pg)
    follower.read_until(*(f"old {number}" for number in range(5_000)))
    follower.read_until_events_are_complete()
    commit(finish(pg, *"abc"))

    def read() -> int:
        before = blocks_read()
        assert follower.read() == ["a", "b", "c"]
        return blocks_read() - before

    assert eventually(read) < 20


def test_a_micro_batch_that_is_read_again_after_a_kill(pg: Database, events: Follower) -> None:
    commit(finish(pg, "a", "b"))
    events.read_until("a", "b")
    while not (found := events.read()):
        commit(finish(pg, "c", "d"))
    assert (found, events.read_again()) == (["c", "d"], ["c", "d"])
    commit(finish(pg, "d"))
    assert events.read_again() == ["c"]
    events.read_until("d")


def test_telling_of_an_end_brings_no_task_twice(pg: Database, events: Follower) -> None:
    Task.objects.filter(reference="a").update(watched=True)
    commit(finish(pg, "a", "b"))
    events.read_until("a", "b")
    for value in (False, True, None):  # a batch asks again for the ends of its failed tasks
        Task.objects.filter(reference="a").update(watched=value)
        assert events.read() == []
    Task.objects.filter(reference="b").mark_poison()
    events.read_until("b")


def test_a_stream_registered_later_goes_on(pg: Database, follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one whose events were deleted. Neither skips a task, or reads one twice."""
    commit(finish(pg, "a"))
    follower.read_until("a")
    if follower.reader.name:
        unregister_stream(pg, follower.reader.name)
    commit(finish(pg, "b"))
    late = finish(pg, "c")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "TRIGGER_LOCK_TIMEOUT", "1ms")
        with pytest.raises(PipelineError, match="could not be registered: canceling statement due to lock timeout"):
            register_stream(pg, "a stream")
    commit(late)
    register_stream(pg, "a stream")
    follower.reader.name = "a stream"
    commit(finish(pg, "d"))
    follower.read_until("b", "c", "d")
    commit(finish(pg, "e"))
    follower.read_until("e")
    assert FinishEvent.objects.count() <= 1


def test_what_finished_without_events_is_read_though_an_older_transaction_runs(pg: Database, events: Follower) -> None:
    """A transaction of anybody, as a backup's, was open while the stream was registered again: "b" was skipped."""
    with closing(pg.connect()) as other, other.transaction():
        other.execute("SELECT pg_current_xact_id()")
        commit(finish(pg, "a"))
        events.read()
        unregister_stream(pg, "a stream")
        commit(finish(pg, "b"))
        register_stream(pg, "a stream")
        commit(finish(pg, "c"))
    events.read_until("a", "b", "c")


def test_events_wait_for_the_slowest_stream(pg: Database, events: Follower) -> None:
    slow = registered(pg, "a slow one")
    commit(finish(pg, "a"))
    events.read_until("a")
    assert (events.read(), FinishEvent.objects.count()) == ([], 1)
    slow.read_until("a")
    until(lambda: (slow.read(), events.read(), FinishEvent.objects.exists()) == ([], [], False))
    unregister_stream(pg, "a stream")
    commit(finish(pg, "b"))
    slow.read_until("b")
    Stream().run(Stream.context(database=pg, unregister="a slow one"))
    assert not FinishEvent.objects.exists()
    commit(finish(pg, "c"))
    assert not FinishEvent.objects.exists(), "without a stream nothing is written"
    with pytest.raises(PipelineError, match=r"No stream 'a stream' is registered .*Registered: none"):
        unregister_stream(pg, "a stream")


def test_a_stream_that_never_comes_back_keeps_no_events(pg: Database, events: Follower) -> None:
    commit(finish(pg, "a"))
    events.read_until("a")
    commit(finish(pg, "b"))
    assert "stream.absent" not in {finding.id for finding in examine()}
    StreamPosition.objects.update(read_time=Now() - timedelta(days=8))
    (absent,) = (finding for finding in examine() if finding.id == "stream.absent")
    assert "Stream a stream of dbtaskqueue.task has not read for 8d" in absent.words
    assert "runtaskpipeline stream --unregister a stream --database default" in absent.remedy

    until(lambda: (call_command("housekeeptasks", verbosity=0), FinishEvent.objects.count()) == (None, 0))
    register_stream(pg, "a stream")  # it does come back
    commit(finish(pg, "c"))
    events.read_until("b", "c")


def test_an_end_that_others_wait_for_comes_once(pg: Database) -> None:
    enqueue_many("other", [(name, None) for name in "ab"])
    follower = Follower(pg)
    Task.objects.filter(reference="a").update(watched=True)
    commit(finish(pg, "a", "b"))
    follower.read_until("b")
    Task.objects.filter(reference="a").update(watched=None)
    follower.read_until("a")
    assert follower.read() == []


def test_a_late_commit_is_never_skipped(pg: Database, follower: Follower) -> None:
    """The early one writes first, under the lowest transaction id, and commits last."""
    commit(finish(pg, "a"))
    follower.read_until("a")
    early = finish(pg, "b")
    commit(finish(pg, "c"))
    assert follower.read() == []  # it waits rather than passing b over
    commit(finish(pg, "d"))
    commit(early)
    follower.read_until("b", "c", "d")
    assert follower.read() == []


def test_a_savepoint_and_a_rollback_make_no_difference(pg: Database, follower: Follower) -> None:
    """What is written inside a savepoint has a transaction id of its own, above that of its transaction."""
    other = finish(pg, "a")
    with other.transaction():
        other.execute(f"{SETTLE} WHERE reference_number = 'b'")
    undone = finish(pg, "c")
    commit(finish(pg, "d"))
    assert follower.read() == []
    undone.rollback()
    undone.close()
    commit(other)
    follower.read_until("a", "b", "d")


def test_a_task_that_finishes_again_comes_again(pg: Database, follower: Follower) -> None:
    commit(finish(pg, "a", "b"))
    follower.read_until("a", "b")
    Task.objects.filter(reference="a").reprocess()
    assert follower.read() == []
    commit(finish(pg, "a"))
    follower.read_until("a")


def test_a_table_of_one_s_own_is_streamed(pg: Database, own: Database) -> None:
    follower = registered(own)
    for name in "ab":
        Parcel.objects.checkout("parcels", poller_instance="p", limit=1)[0].complete()
        follower.read_until(name)
    commit(finish(pg, "x"))
    assert follower.read() == []


def test_sqlite_has_no_stream(sqlite: Database) -> None:
    with pytest.raises(PipelineError, match="With SQLite, use `archive`"):
        Stream().run(Stream.context(database=sqlite, lake="nowhere"))
    with pytest.raises(PipelineError, match="from PostgreSQL only"):
        TaskStreamReader(Selection(sqlite, "task", schema_of("task")))


@pytest.mark.parametrize("once", [False, True])
def test_a_position_of_another_server_or_of_one_set_back_is_refused(pg: Database, events: Follower, once: bool) -> None:
    """Another one counts its transactions anew. A restored one may have passed them, and has an older position."""
    reader, limit, backup = events.reader, None, StreamPosition.objects.get().position  # it takes all rows
    for name in "ab":
        commit(finish(pg, name))
        events.read_until(name)
    if once:
        reader.prepareForTriggerAvailableNow()
    here = {**events.offset, "since": 0}
    assert reader.latestOffset({"transaction": here["transaction"] - 1}, limit)["server"] == here["server"]
    StreamPosition.objects.update(position=backup)
    for wrong in (events.offset, {**here, "server": 1}, {**here, "transaction": here["transaction"] + 10**6}):
        for ask in (partial(reader.latestOffset, limit=limit), partial(reader.partitions, reader.initialOffset())):
            with pytest.raises(PipelineError, match=r"moved or set back.* stream --unregister NAME"):
                ask(wrong)


def test_every_user_may_ask_for_the_server(pg: Database) -> None:
    with pg.open() as link:
        assert link.run("SELECT has_function_privilege('public', 'pg_control_system()', 'execute')") == [(True,)]
