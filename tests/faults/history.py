"""The history of every task, written by a trigger in the transaction of each change."""

from collections.abc import Iterator
from typing import NamedTuple

from django.db import connections

DUE = """
CASE OLD.status WHEN 'PROCESSING' THEN OLD.next_process_time ELSE greatest(OLD.ready_time, OLD.next_process_time) END
"""
# Leases of the queue, or of its group, that have not run out, when a task of a queue with limits was taken: at the
# commit, because others may have ended while a checkout that took tasks ahead of the limit's lock waited for it.
RUNNING = """
UPDATE faults_history SET running = (
    SELECT count(*) FROM dbtaskqueue_task WHERE queue_name = NEW.queue_name AND status = 'PROCESSING'
    AND next_process_time > statement_timestamp() AND group_key IS NOT DISTINCT FROM NEW.group_key
) WHERE task = NEW.id AND new_fence = NEW.total_attempt AND new_status = 'PROCESSING'
"""
# Of each column its type and its value; OLD and NEW are NULL where there is no such row.
WRITTEN = {
    "task": ("bigint", "coalesce(NEW.id, OLD.id)"),
    "queue": ("text", "coalesce(NEW.queue_name, OLD.queue_name)"),
    "reference": ("text", "coalesce(NEW.reference_number, OLD.reference_number)"),
    "group_key": ("text", "coalesce(NEW.group_key, OLD.group_key)"),
    "old_status": ("text", "OLD.status"),
    "new_status": ("text", "NEW.status"),
    "old_fence": ("bigint", "OLD.total_attempt"),
    "new_fence": ("bigint", "NEW.total_attempt"),
    "old_attempt": ("int", "OLD.attempt"),
    "new_attempt": ("int", "NEW.attempt"),
    "budget": ("int", "coalesce(NEW.max_attempts, OLD.max_attempts)"),
    "due": ("timestamptz", DUE),
    "new_poller": ("text", "NEW.poller_instance"),
    "running": ("int", "0"),
    "transaction": ("xid", "pg_current_xact_id()::xid"),
    "began": ("timestamptz", "transaction_timestamp()"),
}
READ = {
    **dict.fromkeys(("clock", "due", "began"), "extract(epoch FROM {})::float8"),
    "transaction": "transaction::text::bigint, extract(epoch FROM pg_xact_commit_timestamp(transaction))::float8",
}
# The clock is later than the statement that tested a time.
STATEMENTS = (
    "CREATE TABLE faults_history (seq bigserial PRIMARY KEY, clock timestamptz DEFAULT clock_timestamp(),"
    f" {', '.join(f'{name} {kind}' for name, (kind, _) in WRITTEN.items())})",
    "CREATE FUNCTION faults_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    f" INSERT INTO faults_history ({', '.join(WRITTEN)})"
    f" VALUES ({', '.join(value for _, value in WRITTEN.values())}); RETURN NULL; END $$",
    f"CREATE FUNCTION count_running() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {RUNNING}; RETURN NULL; END $$",
    "CREATE CONSTRAINT TRIGGER count_running AFTER UPDATE ON dbtaskqueue_task INITIALLY DEFERRED FOR EACH ROW WHEN ("
    "NEW.queue_name IN ('limited', 'wide') AND OLD.total_attempt < NEW.total_attempt) EXECUTE FUNCTION count_running()",
    "CREATE TRIGGER faults_insert AFTER INSERT OR DELETE ON dbtaskqueue_task FOR EACH ROW"
    " EXECUTE FUNCTION faults_write()",
    "CREATE TRIGGER faults_update AFTER UPDATE ON dbtaskqueue_task FOR EACH ROW WHEN (OLD.status <> NEW.status"
    " OR OLD.total_attempt <> NEW.total_attempt OR OLD.attempt <> NEW.attempt) EXECUTE FUNCTION faults_write()",
)


class Change(NamedTuple):
    """One change of one task. ``old_status`` None: it was enqueued; ``new_status`` None: its row left the table."""

    seq: int
    clock: float  # seconds since 1970, by the database
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
    due: float | None  # when the old row could be taken: the end of its lease, or the time it was delayed to
    new_poller: str | None
    running: int = 0  # leases that the limit counts, after a checkout
    transaction: int = 0
    committed: float | None = None
    began: float = 0.0  # of the transaction

    @property
    def edge(self) -> tuple[str | None, str | None]:
        return self.old_status, self.new_status

    @property
    def step(self) -> int | None:
        """By how much the fence rose; None where the row came or went."""
        return None if self.old_fence is None or self.new_fence is None else self.new_fence - self.old_fence

    @property
    def charge(self) -> int:
        return 0 if self.old_attempt is None or self.new_attempt is None else self.new_attempt - self.old_attempt

    @property
    def early(self) -> float:
        return max(0.0, (self.due or 0.0) - self.clock) if self.is_checkout else 0.0

    @property
    def is_checkout(self) -> bool:
        return (self.step or 0) > 0

    @property
    def fence(self) -> int:
        """The token that the task had when the change began."""
        return self.old_fence or 0


def install() -> None:
    with connections["default"].cursor() as cursor:
        for statement in STATEMENTS:
            cursor.execute(statement)


def read(alias: str = "default") -> Iterator[Change]:
    from tests.support import sql

    names = [READ.get(name, "{}").format(name) for name in ("seq", "clock", *WRITTEN)]
    some, last = f"SELECT {', '.join(names)} FROM faults_history WHERE seq > %s ORDER BY seq LIMIT 20000", 0
    while rows := sql(some, [last], alias):
        yield from map(Change._make, rows)
        last = rows[-1][0]
