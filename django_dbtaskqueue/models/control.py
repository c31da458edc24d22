"""What runs and what it counts: queues, schedules, pollers, outcomes by the minute, failures by what they share; what
operators did, are doing, and look for again: the audit, bulk operations, saved searches; tokens of the API.

A process appends its counts as rows of its own, so that none waits for a row. Retention merges those of a minute.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.models.readable import JsonField, NumberedRow, TimeField, index, readable, row_check, unique

MISSED_HEARTBEATS = 3  # after which a poller does not count as alive
# Of a queue's row: a pause is in effect.
IN_EFFECT = Q(paused_time__isnull=False) & (Q(paused_until__isnull=True) | Q(paused_until__gt=Now()))


class Queue(models.Model):
    """A queue's runtime control: what an operator changed, and whether it is paused."""

    name = models.CharField(_("name"), max_length=200, primary_key=True)
    overrides = JsonField(_("runtime overrides"), db_default=models.Value({}, models.JSONField()), blank=True)
    create_time = TimeField(_("created"), db_default=Now())
    paused_time = TimeField(_("paused since"), null=True, blank=True)
    paused_until = TimeField(_("paused until"), null=True, blank=True)
    paused_by = models.CharField(_("paused by"), max_length=200, blank=True, db_default="")
    paused_reason = models.CharField(_("reason"), max_length=500, blank=True, db_default="")

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("queue"), _("queues")
        permissions: ClassVar = [
            ("pause_queue", "Can pause and resume queues"),
            ("purge_queue", "Can delete every task of a queue"),
            ("change_queue_settings", "Can change settings of queues while they run"),
        ]
        constraints: ClassVar = [readable("paused_time", "paused_until")]

    def __str__(self) -> str:
        return self.name

    @property
    def changes(self) -> dict[str, object]:
        """The settings that an operator changed; none where SQL wrote no object: the doctor names such a row."""
        return dict(self.overrides) if isinstance(self.overrides, dict) else {}


class Limit(NumberedRow):
    """What a limit needs between two checkouts: the leases that count, and the tokens of the rate.

    ``group`` "" is the queue itself: a checkout locks its row, and makes it from the task table if it was deleted. The
    other rows are groups of a queue with ``rate_per_group``. Without a row, a group has all of its tokens.
    """

    shown_by = ("queue", "group")

    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    group = models.CharField(_("group"), max_length=200, blank=True, db_default="", db_column="group_key")
    leases = models.TextField(_("leases"), blank=True, db_default="")  # id:total_attempt,… Some may have ended
    stamp = models.CharField(_("stamp"), max_length=32, blank=True, db_default="")  # of ``leases``; "": not known
    tokens = models.FloatField(_("tokens"), db_default=0.0)
    check_time = TimeField(_("last checkout"), db_default=Now())
    idle_seconds = models.FloatField(_("seconds between the last checkouts"), null=True, blank=True)
    full_time = TimeField(_("full again"), null=True, blank=True)  # of a group: then the row can be deleted

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("unique", "queue", "group")]
        indexes: ClassVar = [index("limit_full", "full_time", full_time__isnull=False)]


class Poller(models.Model):
    """One running poller, as it last reported. Nothing depends on this row: a lease lives on its task.

    ``taken_``…: the last row of its latest large checkout, behind which other pollers need not look.
    """

    instance = models.CharField(_("instance"), max_length=200, primary_key=True)
    host = models.CharField(_("host"), max_length=200, db_default="")
    pid = models.IntegerField(_("process"), db_default=0)
    version = models.CharField(_("version"), max_length=50, db_default="")
    release = models.CharField(_("release"), max_length=100, db_default="")  # of the project
    queues = JsonField(_("queues"), shape=list)
    state = models.CharField(_("state"), max_length=30, db_default="INIT")
    start_time = TimeField(_("started"), db_default=Now())
    heartbeat_time = TimeField(_("heartbeat"), db_default=Now())
    slots = models.IntegerField(_("slots"), db_default=0)
    held = models.IntegerField(_("leases held"), db_default=0)
    finished = models.BigIntegerField(_("tasks finished"), db_default=0)
    failed = models.BigIntegerField(_("attempts failed"), db_default=0)
    running = JsonField(_("running"), shape=list, of=dict)
    applied_settings = models.TextField(_("applied settings"), db_default="")
    requested_command = models.CharField(_("requested command"), max_length=30, blank=True, db_default="")
    taken_queue = models.CharField(_("queue"), max_length=200, blank=True, db_default="")
    taken_priority = models.SmallIntegerField(_("priority"), null=True, blank=True)
    taken_time = TimeField(_("ready time"), null=True, blank=True)
    taken_id = models.BigIntegerField(_("task"), null=True, blank=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("poller"), _("pollers")
        permissions: ClassVar = [("control_poller", "Can drain, stop, pause and start pollers")]

    def __str__(self) -> str:
        return self.instance


def queue_names_in(reported: Iterable[object]) -> list[str]:
    """Return the names of the queues in ``Poller.queues``: a list of names, or of names with weights."""
    return [str(one.get("queue")) if isinstance(one, dict) else str(one) for one in reported]


MISSED_POLICIES = (
    ("skip", _("skip them")),
    ("one", _("enqueue one task for all of them")),
    ("all", _("enqueue one task for each, the newest 100 at most")),
)
OVERLAP_POLICIES = (("allow", _("enqueue the task all the same")), ("skip", _("skip the tick")))
CODE, PERSON = "code", "person"
SCHEDULE_SOURCES = ((CODE, _("code")), (PERSON, _("person")))


class Schedule(models.Model):
    """When tasks are enqueued by themselves: a cron text in a time zone, and what each tick enqueues.

    The row is in the first database of its queue, so that a tick and its task are one transaction. ``code`` is what
    the code says; ``edited`` names the fields that a person changed, which stay until the person goes back to the code.
    """

    name = models.CharField(_("name"), max_length=150, primary_key=True)
    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    cron = models.CharField(_("cron"), max_length=200)
    timezone = models.CharField(_("time zone"), max_length=100, db_default="UTC")
    payload = JsonField(_("payload"), null=True, blank=True)
    payload_type = models.CharField(_("payload type"), max_length=200, blank=True, db_default="")
    priority = models.SmallIntegerField(_("priority"), null=True, blank=True)
    missed = models.CharField(_("missed ticks"), max_length=30, choices=MISSED_POLICIES, db_default="one")
    overlap = models.CharField(
        _("earlier task not finished"), max_length=30, choices=OVERLAP_POLICIES, db_default="allow"
    )
    paused = models.BooleanField(_("paused"), db_default=False)
    source = models.CharField(_("source"), max_length=30, choices=SCHEDULE_SOURCES, db_default=PERSON)
    code = JsonField(_("the code says"), shape=dict, null=True, blank=True)
    edited = JsonField(_("changed by hand"), shape=list, of=str, blank=True)
    next_time = TimeField(_("next tick"), null=True, blank=True)
    last_time = TimeField(_("last tick"), null=True, blank=True)
    last_task = models.BigIntegerField(_("last task"), null=True, blank=True)
    note = models.CharField(_("note"), max_length=500, blank=True, db_default="")
    create_time = TimeField(_("created"), db_default=Now())
    clock: datetime  # the database's time, where a query adds it

    class Meta:
        verbose_name, verbose_name_plural = _("schedule"), _("schedules")
        permissions: ClassVar = [("run_schedule", "Can run schedules now")]
        constraints: ClassVar = [readable("next_time", "last_time")]

    def __str__(self) -> str:
        return self.name


# What is counted by the minute.
OUTCOME, FAILURE, CALL, DELETION = "outcome", "failure", "call", "deletion"
LEFT_BATCH = "batch_"  # and its id: tasks of a batch that left without having completed, by the status they ended in


class MinuteCount(NumberedRow):
    """How often something happened in a queue in one minute. Old rows become one per hour, calls and deletions per day.

    ``name`` of an ``outcome``: completed, deleted, retried (failed, with another attempt to come), failed (for good),
    poisoned, reenqueued or lost; only these have times, and the histograms of a sample stand for all attempts. Of a
    ``failure`` it is the fingerprint of its group, of a ``call`` the verb. A ``deletion`` of tasks has no name: it is
    counted in the deleting transaction.
    """

    shown_by = ("queue", "count", "kind", "name")

    kind = models.CharField(_("kind"), max_length=30)
    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    name = models.CharField(_("name"), max_length=40, blank=True, db_default="")
    minute = TimeField(_("minute"), db_default=Now())
    count = models.BigIntegerField(_("count"))
    run_seconds = models.FloatField(_("seconds of work"), db_default=0.0)
    wait_seconds = models.FloatField(_("seconds waited"), db_default=0.0)
    runs = JsonField(_("histogram of run times"), shape=dict, of=int)
    waits = JsonField(_("histogram of waits"), shape=dict, of=int)

    class Meta(NumberedRow.Meta):
        indexes: ClassVar = [index("count_minute", "kind", "minute", "queue"), index("count_calls", "queue", kind=CALL)]


class FailureGroup(models.Model):
    """Failures that have queue, exception type, place in the project's code and message in common."""

    fingerprint = models.CharField(_("fingerprint"), max_length=40, primary_key=True)
    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    error_type = models.CharField(_("exception"), max_length=200, db_default="")
    frame = models.CharField(_("place in the code"), max_length=300, db_default="")
    message = models.CharField(_("message"), max_length=500, db_default="")
    newest = models.CharField(_("newest message"), max_length=500, db_default="")
    release = models.CharField(_("release"), max_length=100, db_default="")  # of the project, when it was first seen
    first_seen = TimeField(_("first seen"))
    last_seen = TimeField(_("last seen"))

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("failure group"), _("failure groups")
        indexes: ClassVar = [index("failure_seen", "last_seen")]

    def __str__(self) -> str:
        return f"{self.queue}: {self.error_type or self.message}"


# The admin's index lists a page under the name of a model. These models store nothing.
class Overview(Queue):
    """All queues at a glance."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name, verbose_name_plural = _("overview"), _("overview")


class Doctor(Queue):
    """What is wrong, and what helps."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name, verbose_name_plural = _("doctor"), _("doctor")


# -- what operators do: named by user name and key, because the queue's database need not be the users' ----------------

WAITING, RUNNING, FINISHED, CANCELLED, FAILED = "WAITING", "RUNNING", "FINISHED", "CANCELLED", "FAILED"
STATES = (
    (WAITING, _("waiting")),
    (RUNNING, _("running")),
    (FINISHED, _("finished")),
    (CANCELLED, _("cancelled")),
    (FAILED, _("failed")),
)
UNFINISHED = (WAITING, RUNNING)
FIRST_WINDOW = 20_000  # ids that a bulk operation looks through at first


class BulkOperation(NumberedRow):
    """A verb over all tasks that match a search, run in chunks by an idle poller or the caller.

    ``cursor`` moves in the transaction of each chunk's effect: a chunk is done and counted, or neither.
    """

    shown_by = ("verb", "query")

    verb = models.CharField(_("verb"), max_length=50)
    query = models.TextField(_("search"))
    location = models.CharField(_("table"), max_length=200, db_default="dbtaskqueue.task")
    options = JsonField(_("options"), shape=dict, blank=True)
    max_tasks = models.BigIntegerField(_("max tasks"), null=True, blank=True)
    reason = models.CharField(_("reason"), max_length=500, blank=True, db_default="")
    actor = models.CharField(_("actor"), max_length=200, db_default="")
    actor_id = models.CharField(_("actor id"), max_length=200, blank=True, db_default="")
    source = models.CharField(_("source"), max_length=30, blank=True, db_default="")
    state = models.CharField(_("state"), max_length=30, choices=STATES, db_default=WAITING)
    note = models.TextField(_("note"), blank=True, db_default="")
    cursor = models.BigIntegerField(_("done up to id"), db_default=0)
    first_id = models.BigIntegerField(_("first id"), db_default=0)
    last_id = models.BigIntegerField(_("last id"), db_default=0)
    window_size = models.IntegerField(_("window size"), db_default=FIRST_WINDOW)
    estimate = models.BigIntegerField(_("expected"), null=True, blank=True)
    estimate_more = models.BooleanField(_("or more"), db_default=False)
    changed = models.BigIntegerField(_("changed"), db_default=0)
    skipped = models.BigIntegerField(_("skipped"), db_default=0)
    skips = JsonField(_("skipped, by reason"), shape=dict, of=int, blank=True)
    create_time = TimeField(_("ordered"), db_default=Now())
    start_time = TimeField(_("started"), null=True, blank=True)
    update_time = TimeField(_("last step"), db_default=Now())
    finish_time = TimeField(_("ended"), null=True, blank=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("bulk operation"), _("bulk operations")
        indexes: ClassVar = [index("bulk_unfinished", "update_time", "id", state__in=UNFINISHED)]

    @property
    def progress(self) -> float:
        """Share of the table that is done, from 0 to 1."""
        if self.state == FINISHED:
            return 1.0
        length = self.last_id - self.first_id
        return min(max((self.cursor - self.first_id) / length, 0.0), 1.0) if length > 0 else 0.0


class AuditEntry(NumberedRow):
    """One act of an operator, written in the transaction of the act; a bulk operation's counts grow with its steps."""

    time = TimeField(_("time"), db_default=Now())
    actor = models.CharField(_("actor"), max_length=200)
    actor_id = models.CharField(_("actor id"), max_length=200, blank=True, db_default="")
    source = models.CharField(_("source"), max_length=30, db_default="")
    verb = models.CharField(_("verb"), max_length=50)
    queue = models.CharField(_("queue"), max_length=200, blank=True, db_default="")
    query = models.TextField(_("search"), blank=True, db_default="")
    reason = models.CharField(_("reason"), max_length=500, blank=True, db_default="")
    changed = models.BigIntegerField(_("changed"), db_default=0)
    skipped = models.BigIntegerField(_("skipped"), db_default=0)
    details = JsonField(_("details"), shape=dict, blank=True)
    operation = models.ForeignKey(
        BulkOperation, models.SET_NULL, null=True, blank=True, related_name="audit", verbose_name=_("bulk operation")
    )

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("audit entry"), _("audit")
        indexes: ClassVar = [index("audit_queue", "queue", "id"), index("audit_actor", "actor", "id")]

    def __str__(self) -> str:
        return f"{self.actor}: {self.verb} {self.query or self.queue}"


class TaskChange(NumberedRow):
    """Tasks that one action, or one step of a bulk operation, changed, and how they were before.

    It answers who sent a task back, and "put back as it was" reads it. With ``skip_reason`` these are tasks that a step
    of a bulk operation left as they were, each of them. No foreign key in the database: retention deletes each alone.
    """

    shown_by = ("first_task_id", "last_task_id")

    time = TimeField(_("time"), db_default=Now())
    audit = models.ForeignKey(
        AuditEntry, models.DO_NOTHING, related_name="changes", db_constraint=False, verbose_name=_("audit entry")
    )
    operation = models.ForeignKey(
        BulkOperation, models.DO_NOTHING, null=True, blank=True, related_name="changes", db_constraint=False,
        verbose_name=_("bulk operation"),
    )  # fmt: skip
    location = models.CharField(_("table"), max_length=200, db_default="dbtaskqueue.task")
    first_task_id = models.BigIntegerField(_("first task"))
    last_task_id = models.BigIntegerField(_("last task"))
    task_ids = JsonField(_("task ids"), shape=list, of=int, db_default=models.NOT_PROVIDED)
    skip_reason = models.CharField(_("reason"), max_length=500, blank=True, db_default="")
    # By column, in the order of ``task_ids``; a column of equal values holds one. Null: it cannot be put back.
    before = JsonField(_("before"), shape=dict, null=True, blank=True)
    after_time = TimeField(_("last update by the action"), null=True, blank=True)
    difference = JsonField(_("difference"), null=True, blank=True)  # of an edited payload, masked

    class Meta(NumberedRow.Meta):
        indexes: ClassVar = [index("change_task", "location", "last_task_id", skip_reason="")]


class SavedSearch(NumberedRow):
    """A search under a name, for its owner or for all."""

    shown_by = ("name",)

    owner = models.CharField(_("owner"), max_length=200)
    name = models.CharField(_("name"), max_length=100)
    query = models.TextField(_("search"))
    shared = models.BooleanField(_("shared"), db_default=False)
    create_time = TimeField(_("created"), db_default=Now())

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("name", "owner", "name")]


READ_SCOPE, OPERATE_SCOPE = "read", "operate"
SCOPES = ((READ_SCOPE, _("read")), (OPERATE_SCOPE, _("operate")))


class ApiToken(NumberedRow):
    """A token of the JSON API: it acts as one user, within its scope. Only its hash is stored."""

    shown_by = ("user", "note")

    user = models.CharField(_("user"), max_length=200)
    actor_id = models.CharField(_("actor id"), max_length=200, db_default="")  # a name can become another user's
    digest = models.CharField(_("hash"), max_length=64, unique=True)
    note = models.CharField(_("note"), max_length=200, blank=True, db_default="")
    scope = models.CharField(_("scope"), max_length=30, choices=SCOPES, db_default=OPERATE_SCOPE)
    queues = JsonField(_("queues"), db_default=models.Value([], models.JSONField()), blank=True)
    create_time = TimeField(_("created"), db_default=Now())
    expire_time = TimeField(_("expires"), null=True, blank=True)
    last_used_time = TimeField(_("last used"), null=True, blank=True)

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [row_check("scope", Q(scope__in=[READ_SCOPE, OPERATE_SCOPE]))]

    @property
    def queue_names(self) -> tuple[str, ...]:
        """The queues it is for; () is all of them. What SQL wrote and is no list names a queue that is not there."""
        return tuple(map(str, self.queues if isinstance(self.queues, list) else [self.queues]))


# -- what the data pipeline keeps in the database: its archive batches, and how far its streams have read --------------

BATCH_STATES = [("open", _("open")), ("closed", _("closed")), ("abandoned", _("abandoned"))]


class ArchiveBatch(NumberedRow):
    """Finished tasks on their way into the lake: the rows of one table that fit a frozen range and predicate.

    ``open``: the rows are in the database, and files of them may count in the lake. ``closed``: the rows left the
    database, in the transaction that wrote this state, and are in the lake; those in ``withdrawn`` had been changed and
    stayed. ``abandoned``: nothing left the database, no file counts.
    """

    shown_by = ("location", "source", "first_id", "last_id", "state")

    token = models.CharField(_("token"), max_length=32, unique=True)
    location = models.CharField(_("location"), max_length=200)
    source = models.CharField(_("table"), max_length=30)
    lake = models.TextField(_("lake"))
    state = models.CharField(_("state"), max_length=30, choices=BATCH_STATES, db_default="open")
    first_id = models.BigIntegerField(_("first id"))
    last_id = models.BigIntegerField(_("last id"))
    cutoff = TimeField(_("finished before"))
    statuses = JsonField(_("statuses"), shape=list, of=str)
    queues = JsonField(_("queues"), shape=list, of=str, blank=True)
    tasks = models.BigIntegerField(_("tasks archived"), db_default=0)
    attempts = models.BigIntegerField(_("failed attempts archived"), db_default=0)
    withdrawn = JsonField(_("withdrawn"), shape=list, of=int, blank=True)
    size = models.BigIntegerField(_("bytes"), db_default=0)
    note = models.TextField(_("note"), blank=True, db_default="")
    create_time = TimeField(_("created"), db_default=Now())
    close_time = TimeField(_("closed at"), null=True, blank=True)

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [
            row_check("state", Q(state__in=[state for state, _name in BATCH_STATES])),
            # Two batches of one table under way at once could take the same rows into the lake twice.
            unique("one_open", "location", "source", condition=Q(state="open")),
        ]


class StreamPosition(NumberedRow):
    """A stream that reads finished tasks by their events. ``location``: the task table, as in other tables.

    ``position``: the stream has read what transactions below it finished, and has the events of the others. NULL: it
    may have missed events, and reads the whole table once.
    """

    shown_by = ("location", "name", "position")

    location = models.CharField(_("location"), max_length=200)
    name = models.CharField(_("stream"), max_length=200)
    position = models.BigIntegerField(_("position"), null=True, blank=True)
    read_time = TimeField(_("last read"), db_default=Now())

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("name", "location", "name")]


class FinishEvent(models.Model):
    """A transaction finished a task. A trigger writes it on PostgreSQL, while a stream is registered."""

    pk = models.CompositePrimaryKey("location", "transaction_id", "task_id")
    location = models.CharField(_("location"), max_length=200)
    transaction_id = models.BigIntegerField(_("transaction"))
    task_id = models.BigIntegerField(_("task"))

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.location} {self.task_id}: {self.transaction_id}"


class PipelineReport(NumberedRow):
    """The figures that ``report``, ``forecast`` or ``whatif`` found; the admin shows them as a page."""

    kind = models.CharField(_("job"), max_length=30)
    create_time = TimeField(_("created"), db_default=Now())
    since = TimeField(_("from"), null=True, blank=True)
    until = TimeField(_("to"), null=True, blank=True)
    summary = models.TextField(_("summary"), db_default="", blank=True)
    data = JsonField(_("figures"), shape=dict, blank=True)
    location = models.TextField(_("files"), db_default="", blank=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("pipeline report"), _("pipeline reports")

    def __str__(self) -> str:
        return f"{self.kind} of {self.create_time:%Y-%m-%d %H:%M}"
