"""The history of every task, written by triggers in the transaction of each change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from django.db import connections

BATCH_ROWS = 20_000  # of the history, per read

COLUMNS = {
    "seq": "bigserial PRIMARY KEY",
    "clock": "timestamptz DEFAULT clock_timestamp()",  # later than the statement that tested a time
    "txid": "bigint DEFAULT txid_current()",
    "task": "bigint",
    "queue": "text",
    "reference": "text",
    "group_key": "text",
    "old_status": "text",
    "new_status": "text",
    "old_fence": "bigint",
    "new_fence": "bigint",
    "old_attempt": "int",
    "new_attempt": "int",
    "budget": "int",
    "due": "timestamptz",  # when the old row could be taken: the end of its lease, or the time it was delayed to
    "old_poller": "text",
    "new_poller": "text",
}
WRITTEN = [name for name, kind in COLUMNS.items() if "DEFAULT" not in kind and "serial" not in kind]
OLD, NEW = (
    (
        f"{side}.id, {side}.queue_name, {side}.reference_number, {side}.group_key",
        f"{side}.status",
        f"{side}.total_attempt",
        f"{side}.attempt",
        f"{side}.poller_instance",
    )
    for side in ("OLD", "NEW")
)
DUE = (
    "CASE OLD.status WHEN 'PROCESSING' THEN OLD.next_process_time"
    " ELSE greatest(OLD.ready_time, OLD.next_process_time) END"
)
INTO = f"INSERT INTO faults_history ({', '.join(WRITTEN)}) VALUES "
STATEMENTS = (
    f"CREATE TABLE faults_history ({', '.join(f'{name} {kind}' for name, kind in COLUMNS.items())})",
    "CREATE FUNCTION faults_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    f"IF TG_OP = 'INSERT' THEN {INTO} ({NEW[0]}, NULL, {NEW[1]}, NULL, {NEW[2]}, NULL, {NEW[3]}, NEW.max_attempts,"
    f" NULL, NULL, {NEW[4]}); "
    f"ELSIF TG_OP = 'DELETE' THEN {INTO} ({OLD[0]}, {OLD[1]}, NULL, {OLD[2]}, NULL, {OLD[3]}, NULL, OLD.max_attempts,"
    f" {DUE}, {OLD[4]}, NULL); "
    f"ELSE {INTO} ({NEW[0]}, {OLD[1]}, {NEW[1]}, {OLD[2]}, {NEW[2]}, {OLD[3]}, {NEW[3]}, NEW.max_attempts,"
    f" {DUE}, {OLD[4]}, {NEW[4]}); END IF; RETURN NULL; END $$",
    "CREATE TRIGGER faults_insert AFTER INSERT OR DELETE ON dbtaskqueue_task FOR EACH ROW"
    " EXECUTE FUNCTION faults_write()",
    "CREATE TRIGGER faults_update AFTER UPDATE ON dbtaskqueue_task FOR EACH ROW WHEN (OLD.status <> NEW.status"
    " OR OLD.total_attempt <> NEW.total_attempt OR OLD.attempt <> NEW.attempt) EXECUTE FUNCTION faults_write()",
)


class Change(NamedTuple):
    """One change of one task. ``old_status`` None: it was enqueued; ``new_status`` None: its row left the table."""

    seq: int
    clock: float  # seconds since 1970, by the database
    txid: int
    task: int
    queue: str
    reference: str | None
    group: str | None
    old_status: str | None
    new_status: str | None
    old_fence: int | None
    new_fence: int | None
    old_attempt: int | None
    new_attempt: int | None
    budget: int
    due: float | None
    old_poller: str | None
    new_poller: str | None

    @property
    def is_checkout(self) -> bool:
        """Whether a poller took the task."""
        return self.old_fence is not None and self.new_fence is not None and self.new_fence > self.old_fence

    @property
    def fence(self) -> int:
        """The token that the task had when the change began."""
        return self.old_fence or 0


def install(using: str = "default") -> None:
    """Create the table and the triggers."""
    with connections[using].cursor() as cursor:
        for statement in STATEMENTS:
            cursor.execute(statement)


def read(using: str = "default") -> Iterator[Change]:
    """Return all changes, in the order in which they were written."""
    names = [f"extract(epoch FROM {name})::float8" if "timestamptz" in kind else name for name, kind in COLUMNS.items()]
    last = 0
    while True:
        with connections[using].cursor() as cursor:
            cursor.execute(
                f"SELECT {', '.join(names)} FROM faults_history WHERE seq > %s ORDER BY seq LIMIT {BATCH_ROWS}", [last]
            )
            rows = cursor.fetchall()
        if not rows:
            return
        yield from map(Change._make, rows)
        last = rows[-1][0]
