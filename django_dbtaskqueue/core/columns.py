"""The columns of a task, one entry each. Every list of columns in the package derives from this table.

Some columns have another name in the database (``queue_name``); models, searches and JSON use ``name``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from django_dbtaskqueue.core.durations import MAX_DELAY, MIN_LEASE, ZERO

if TYPE_CHECKING:
    from django_dbtaskqueue.core.unique import UniqueRule

INTEGER_TYPES = ("bigint", "int", "smallint")


class TaskOptions(NamedTuple):
    """What a caller says of one task: the arguments of ``enqueue`` that make its row."""

    reference: str | None = None
    payload: object = None
    delay: timedelta | None = None
    run_at: datetime | None = None
    priority: int | None = None
    group: str | None = None
    tag: str | None = None
    ttl: timedelta | None = None
    context: Mapping[str, object] | None = None
    lease: timedelta | None = None
    columns: Mapping[str, object] | None = None


class InsertOptions(NamedTuple):
    """What a caller says of one call: the arguments that ``enqueue`` and ``enqueue_many`` share."""

    unique: "UniqueRule | str | None" = None
    on_duplicate: str = "error"
    keep_due: bool = False
    after: object = None
    on_parent_failure: str = "hold"
    timeout: timedelta | None = None
    using: str | None = None


class _CallOptions(TypedDict, total=False):
    unique: "UniqueRule | str | None"
    on_duplicate: str
    keep_due: bool
    after: object
    on_parent_failure: str
    timeout: timedelta | None


class EnqueueManyOptions(_CallOptions, total=False):
    """The options of ``enqueue_many``."""

    on_invalid: str
    using: str | None


class PutOptions(_CallOptions, total=False):
    """The options of ``enqueue``, without the place: those of a queue's handle."""

    delay: timedelta | None
    run_at: datetime | None
    priority: int | None
    group: str | None
    tag: str | None
    ttl: timedelta | None
    context: Mapping[str, object] | None
    lease: timedelta | None
    columns: Mapping[str, object] | None


class EnqueueOptions(PutOptions, total=False):
    """The options of ``enqueue``."""

    using: str | None


class Shown(Enum):
    """How the API, the command line and the admin's page of one task show a column."""

    NO = "not as a value of its own"
    ALWAYS = "in lists and on the task's page"
    IF_SET = "in lists; on the task's page only if it has a value"
    LONG = "as JSON, on the task's page only, and only to users who may see payloads"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of TASKS."""

    name: str  # the attribute of models.Task
    type: str  # as PostgreSQL names it
    column: str = ""  # the column's name in the database, if it is not ``name``
    enqueued: bool = False  # enqueue() writes it
    option: str = ""  # the argument of enqueue() that sets it; "" if there is none
    copied: bool = True  # an enqueued column: "Enqueue again as new" and the job replay copy it
    leased: str = ""  # the field of Lease that holds it; "" if a checkout does not return it
    shown: Shown = Shown.NO
    search: tuple[str, ...] = ()  # the qualifiers that search it
    history: bool = True  # TaskHistory has it too
    archived: bool = True  # Spark reads it, and the archive keeps it

    @property
    def db(self) -> str:
        return self.column or self.name

    @property
    def argument(self) -> str:
        """The name in a DataFrame of tasks to enqueue: that of the option, if there is one."""
        return self.option or self.name


TASK_COLUMNS = (
    Column("id", "bigint", leased="id", shown=Shown.ALWAYS, search=("id",), history=False),
    Column("queue", "text", "queue_name", leased="queue", shown=Shown.ALWAYS, search=("queue",)),
    Column(
        "reference", "text", "reference_number", enqueued=True, option="reference", copied=False, leased="reference",
        shown=Shown.ALWAYS, search=("", "ref"),
    ),
    Column("status", "text", shown=Shown.ALWAYS),
    Column("attempt", "int", leased="attempt", shown=Shown.ALWAYS, search=("attempt",)),
    Column("reenqueue_attempt", "int", leased="reenqueue_attempt", shown=Shown.ALWAYS),
    Column("total_attempt", "bigint", leased="total_attempt", shown=Shown.ALWAYS, search=("total",)),
    Column("max_attempts", "int", enqueued=True, leased="max_attempts", shown=Shown.ALWAYS),
    Column(
        "priority", "smallint", enqueued=True, option="priority", leased="priority", shown=Shown.ALWAYS,
        search=("priority",),
    ),
    Column("payload", "jsonb", enqueued=True, option="payload", leased="payload_text", shown=Shown.LONG),
    Column("payload_type", "text", enqueued=True, leased="payload_type", shown=Shown.IF_SET, search=("type",)),
    Column("result", "jsonb", shown=Shown.LONG),
    Column("process_result", "text"),
    Column("context", "jsonb", enqueued=True, option="context", leased="context_text", shown=Shown.LONG),
    Column(
        "group_key", "text", enqueued=True, option="group", leased="group", shown=Shown.IF_SET, search=("group",)
    ),
    Column("tag", "text", enqueued=True, option="tag", shown=Shown.IF_SET, search=("tag",)),
    Column("poller_instance", "text", leased="poller_instance", shown=Shown.ALWAYS, search=("poller",)),
    Column("create_time", "timestamptz", leased="create_text", shown=Shown.ALWAYS, search=("age", "created")),
    Column("next_process_time", "timestamptz", leased="until_text", shown=Shown.ALWAYS),
    Column("last_update_time", "timestamptz"),
    Column("lease_seconds", "float8", enqueued=True, option="lease", leased="lease_seconds"),
    Column("expire_time", "timestamptz", leased="expire_text", shown=Shown.ALWAYS),
    Column("start_time", "timestamptz", leased="start_text", shown=Shown.ALWAYS, search=("started",)),
    Column("finish_time", "timestamptz", shown=Shown.ALWAYS, search=("finished",)),
    Column("ready_time", "timestamptz", leased="ready_text", shown=Shown.ALWAYS, history=False),
    Column("parked_by", "text", shown=Shown.IF_SET, search=("parked",), history=False),
    Column("final_status", "text", history=False, archived=False),
    Column("fingerprint", "text", search=("fingerprint",), history=False, archived=False),
    Column("lost_leases", "int", leased="lost_leases", history=False, archived=False),
    Column("watched", "bool", history=False, archived=False),
    Column("batch", "bigint", shown=Shown.IF_SET, search=("batch",), history=False, archived=False),
    Column("signals", "int", history=False, archived=False),
)  # fmt: skip
BY_NAME = {column.name: column for column in TASK_COLUMNS}
ENQUEUED = tuple(column for column in TASK_COLUMNS if column.enqueued)
# Arguments of enqueue() that are not stored as they are: they set next_process_time, ready_time and expire_time.
TIMING = {"delay": "float8", "run_at": "timestamptz", "ttl": "float8"}


class Bounds(NamedTuple):
    """The least and the greatest value of an argument of ``enqueue``, and what they are."""

    least: Any
    most: Any
    words: str


SPANS = Bounds(ZERO, MAX_DELAY, "a timedelta from zero to a hundred years")
PRIORITIES = Bounds(-32768, 32767, "a whole number from -32768 to 32767")
# The time zones of a first or last day lead out of what Python can say.
FIRST_RUN, LAST_RUN = datetime(2, 1, 1, tzinfo=UTC), datetime(9001, 1, 1, tzinfo=UTC)
BOUNDS = {
    "delay": SPANS,
    "ttl": SPANS,
    "lease": Bounds(MIN_LEASE, MAX_DELAY, "a timedelta from 100 ms to a hundred years"),
    "priority": PRIORITIES,
    "run_at": Bounds(FIRST_RUN, LAST_RUN, "a datetime of the years 2 to 9000"),
}
OWN_COLUMNS = "columns"  # the argument of enqueue() for the columns that only a project's own table has
OPTIONS = TaskOptions._fields
COPIED = tuple(column for column in ENQUEUED if column.copied)
HISTORY_COLUMNS = tuple(column for column in TASK_COLUMNS if column.history)
LISTED = tuple(column.name for column in TASK_COLUMNS if column.shown in (Shown.ALWAYS, Shown.IF_SET))
SHOWN_IF_SET = tuple(column.name for column in TASK_COLUMNS if column.shown is Shown.IF_SET)
LONG = tuple(column.name for column in TASK_COLUMNS if column.shown is Shown.LONG)


def searched(*types: str) -> dict[str, str]:
    """Return, by qualifier, the columns of the given types that a search can name."""
    return {qualifier: column.name for column in TASK_COLUMNS if column.type in types for qualifier in column.search}
