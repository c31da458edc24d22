"""The reader behind ``spark.readStream``, and the registration of streams that read the events of finished tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import datasource
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.core.sql import pipeline
from django_dbtaskqueue.core.sql.pipeline import EVENT_SCHEMA_SQL, HORIZON_SQL, FinishEventStatements
from django_dbtaskqueue.pipeline.database import Database, Link, statement_errors
from django_dbtaskqueue.pipeline.source import PARTITION_IDS, Selection, Slice

STREAM_START = 0  # before every transaction
SERVER_HORIZON_SQL = f"{HORIZON_SQL}, (SELECT system_identifier FROM pg_control_system())"
OTHER_SERVER = (
    "The stream has read up to transaction {transaction} of the server {server}, and {0} is the server {here}, at "
    "transaction {now}. It was moved or set back, and counts its transactions anew, so "
)
START_ANEW = (
    "nothing was read. Remove the stream with `runtaskpipeline stream --unregister NAME`, and start it with a new "
    "checkpoint. It reads all finished tasks again: rows of equal location, id and total_attempt are the same finish."
)
Offset = dict[str, int]  # transaction; server and the transaction before (since), which the first position lacks


@dataclass
class Window(Slice):
    """Rows last written by transactions from ``since`` to below ``until``; by events if ``complete_from`` allows it."""

    since: int = STREAM_START
    until: int = STREAM_START
    complete_from: int | None = None

    @property
    def events_from(self) -> int | None:
        """The transaction from which on the events must be complete; None if none are read."""
        edges = (self.since, self.until)
        return next((edge for edge in edges if self.complete_from is not None and self.complete_from <= edge), None)


class TaskStreamReader(datasource.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finished tasks, rows of the history, or failed attempts, in the order their transactions ended.

    A reader that remembers the greatest id or time skips a row that commits later. So an offset here is a transaction
    id, and the next one is the oldest transaction that still runs: one that stays open delays the stream. Another
    server counts transactions anew, so an offset names its server, and the offset before, which the database has as the
    position of the stream: one that was set back has an older one. Without a ``name``, or while events may be missing,
    a micro-batch compares all rows, and there is no position.
    """

    def __init__(self, selection: Selection, name: str | None = None) -> None:
        if not selection.database.postgresql:
            raise PipelineError("Finished tasks can be streamed from PostgreSQL only: read SQLite in batches.")
        self.database = selection.database
        self.selection = selection
        self.finished = selection.table == "task"
        self.name = name if self.finished else None
        self.last: Offset | None = None

    def initialOffset(self) -> Offset:
        return {"transaction": STREAM_START}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the oldest transaction that still runs. Raises PipelineError if ``start`` is of another server."""
        now = self._horizon(start)
        self.commit(start)  # all before it is done
        end = self.last or now
        return {**end, "since": start["transaction"]} if end["transaction"] != start["transaction"] else start

    def getDefaultReadLimit(self) -> ReadLimit:
        """Take all rows: a transaction cannot be split."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """End with the transactions that have ended now."""
        self.last = self._horizon()

    def _horizon(self, *positions: Offset) -> Offset:
        """Return the present offset. Raises PipelineError if this server cannot have been at these positions."""
        with self.database.open() as link:
            horizon, server = link.run(SERVER_HORIZON_SQL)[0]
        reached = horizon if (position := self._complete_from()) is None else position
        for one in positions:
            if one.get("server", server) != server or one["transaction"] > horizon or one.get("since", 0) > reached:
                place = self.database.url_without_password
                reason = OTHER_SERVER.format(place, **{"server": "?", **one}, now=horizon, here=server)
                raise PipelineError(reason + START_ANEW)
        return {"transaction": horizon, "server": server}

    def partitions(self, start: Offset, end: Offset) -> Sequence[datasource.InputPartition]:
        """Return one slice; the first micro-batch, which reads all rows, is cut by ids."""
        self._horizon(start, end)  # Spark repeats a micro-batch after a kill without a new offset
        since, until = start["transaction"], end["transaction"]
        if since == until:
            return []
        complete_from = self._complete_from()
        if since != STREAM_START:
            return [Window(None, None, since, until, complete_from)]
        return [Window(*ids, since, until, complete_from) for ids in self.selection.slices(PARTITION_IDS)]

    def _complete_from(self) -> int | None:
        if self.name is None:
            return None
        statements, key = _events(self.database, self.name)
        with self.database.open() as link:
            found = link.run(statements.read_position, key)
        return found[0][0] if found else None

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Window)  # noqa: S101 -- what partitions() returns
        part, place = partition, self.database.location
        if self.finished:
            statements, _key = _events(self.database, self.name)
            test = statements.finished_in(part.since, part.until, place, part.complete_from)
        else:
            test = pipeline.window(part.since, part.until, finished=False)
        yield from self.selection.read(part, also=test)
        # Events are deleted after their stream's position is changed: if it has not changed, all were there.
        if part.events_from is not None:
            now = self._complete_from()
            if now is None or now > part.events_from:
                reason = f"The events of the stream {self.name!r} were deleted while it read"
                raise PipelineError(f"{reason}: start it again.")

    def commit(self, end: Offset) -> None:
        """Delete the events that this stream and all others have passed."""
        if self.name is None:
            return
        statements, key = _events(self.database, self.name)
        with self.database.open() as link, link.transaction():
            link.run(statements.lock_positions, key)
            link.run(statements.advance, {**key, "position": end["transaction"]})
            link.run(statements.trim, {**key, "limit": None})


# -- registered streams ------------------------------------------------------------------------------------------------


def register_stream(database: Database, name: str) -> None:
    """Register a stream of finished tasks under a name, so that a micro-batch reads only what finished.

    The first stream makes a trigger, which writes an event for each task that finishes. That needs the owner of the
    task table, and waits at most 2 seconds for open transactions that wrote to it. Raises PipelineError.
    """
    statements, key = _events(database, name)
    with statement_errors(f"The stream {name!r} could not be registered"), database.open() as link:
        with link.transaction():
            if not link.run(statements.has_trigger)[0][0]:
                for text in statements.create_trigger(_prepare_ddl(link), database.location):
                    link.run(text)
                link.run(statements.unknown_positions, key)
            link.run(statements.register, key)
        # In its own transaction: all that begin later write events.
        with link.transaction():
            link.run(statements.lock_positions, key)
            link.run(statements.begin, key)


def unregister_stream(database: Database, name: str) -> None:
    """Forget a stream that will not come back. The last one of a task table drops the trigger and its events.

    Needs the owner of the task table. Raises PipelineError, also for an unknown name.
    """
    statements, key = _events(database, name)
    refused = statement_errors(f"The stream {name!r} could not be unregistered")
    with refused, database.open() as link, link.transaction():
        names = {found for (found,) in link.run(statements.lock_positions, key)}
        if name not in names:
            known = ", ".join(sorted(names)) or "none"
            raise PipelineError(f"No stream {name!r} is registered for {database.location}. Registered: {known}.")
        link.run(statements.unregister, key)
        if names == {name}:
            link.run(statements.drop_trigger(_prepare_ddl(link)))
            link.run(statements.clear, key)


def _prepare_ddl(link: Link) -> str:
    """Bound the wait for the lock of the task table; return the schema of the events, quoted."""
    link.run(f"SET LOCAL lock_timeout = '{pipeline.TRIGGER_LOCK_TIMEOUT}'")
    if not (found := link.run(EVENT_SCHEMA_SQL)):
        raise PipelineError("The database has no table of events: run `manage.py migrate`.")
    return str(found[0][0])


def _events(database: Database, name: str | None) -> tuple[FinishEventStatements, dict[str, str | None]]:
    """Return the statements about the events of the database, and their parameters for a stream."""
    return FinishEventStatements(database.tables, database.dialect), {"location": database.location, "name": name}
