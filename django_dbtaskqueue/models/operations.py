"""What operators did, are doing, and look for again: the audit, bulk operations, saved searches; tokens of the API.

Users are named by their user name and key, without a foreign key: the queue's database need not be the users'.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.models.readable import JsonField, TimeField

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


class BulkOperation(models.Model):
    """A verb over all tasks that match a search, run in chunks by an idle poller or the caller.

    ``cursor`` moves in the transaction of each chunk's effect: a chunk is done and counted, or neither.
    """

    id = models.BigAutoField(primary_key=True)
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
        verbose_name = _("bulk operation")
        verbose_name_plural = _("bulk operations")
        indexes: ClassVar = [
            models.Index(
                fields=["update_time", "id"],
                condition=models.Q(state__in=UNFINISHED),
                name="dbtaskqueue_bulk_unfinished",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.verb} {self.query}"

    @property
    def progress(self) -> float:
        """Share of the table that is done, from 0 to 1."""
        if self.state == FINISHED:
            return 1.0
        length = self.last_id - self.first_id
        return min(max((self.cursor - self.first_id) / length, 0.0), 1.0) if length > 0 else 0.0


class AuditEntry(models.Model):
    """One act of an operator, written in the transaction of the act; a bulk operation's counts grow with its steps."""

    id = models.BigAutoField(primary_key=True)
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
        BulkOperation,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="audit",
        verbose_name=_("bulk operation"),
    )

    class Meta:
        verbose_name = _("audit entry")
        verbose_name_plural = _("audit")
        indexes: ClassVar = [
            models.Index(fields=["queue", "id"], name="dbtaskqueue_audit_queue"),
            models.Index(fields=["actor", "id"], name="dbtaskqueue_audit_actor"),
        ]

    def __str__(self) -> str:
        return f"{self.actor}: {self.verb} {self.query or self.queue}"


class TaskChange(models.Model):
    """Tasks that one action, or one step of a bulk operation, changed, and how they were before.

    It answers who sent a task back, and "put back as it was" reads it. With ``skip_reason`` these are tasks that a step
    of a bulk operation left as they were, every one of them. No foreign key in the database: retention deletes each
    table by its own times.
    """

    id = models.BigAutoField(primary_key=True)
    time = TimeField(_("time"), db_default=Now())
    audit = models.ForeignKey(
        AuditEntry, models.DO_NOTHING, related_name="changes", db_constraint=False, verbose_name=_("audit entry")
    )
    operation = models.ForeignKey(
        BulkOperation,
        models.DO_NOTHING,
        null=True,
        blank=True,
        related_name="changes",
        db_constraint=False,
        verbose_name=_("bulk operation"),
    )
    location = models.CharField(_("table"), max_length=200, db_default="dbtaskqueue.task")
    first_task_id = models.BigIntegerField(_("first task"))
    last_task_id = models.BigIntegerField(_("last task"))
    task_ids = JsonField(_("task ids"), shape=list, of=int, db_default=models.NOT_PROVIDED)
    skip_reason = models.CharField(_("reason"), max_length=500, blank=True, db_default="")
    # By column, in the order of ``task_ids``; a column of equal values holds one. Null: it cannot be put back.
    before = JsonField(_("before"), shape=dict, null=True, blank=True)
    after_time = TimeField(_("last update by the action"), null=True, blank=True)
    difference = JsonField(_("difference"), null=True, blank=True)  # of an edited payload, masked

    class Meta:
        verbose_name = _("changed tasks")
        verbose_name_plural = _("changed tasks")
        indexes: ClassVar = [
            models.Index(
                fields=["location", "last_task_id"],
                condition=models.Q(skip_reason=""),
                name="dbtaskqueue_change_task",
            )
        ]

    def __str__(self) -> str:
        return f"{self.first_task_id}-{self.last_task_id}"


class SavedSearch(models.Model):
    """A search under a name, for its owner or for all."""

    id = models.BigAutoField(primary_key=True)
    owner = models.CharField(_("owner"), max_length=200)
    name = models.CharField(_("name"), max_length=100)
    query = models.TextField(_("search"))
    shared = models.BooleanField(_("shared"), db_default=False)
    create_time = TimeField(_("created"), db_default=Now())

    class Meta:
        verbose_name = _("saved search")
        verbose_name_plural = _("saved searches")
        constraints: ClassVar = [models.UniqueConstraint(fields=["owner", "name"], name="dbtaskqueue_savedsearch_name")]

    def __str__(self) -> str:
        return self.name


READ_SCOPE, OPERATE_SCOPE = "read", "operate"
SCOPES = ((READ_SCOPE, _("read")), (OPERATE_SCOPE, _("operate")))


class ApiToken(models.Model):
    """A token of the JSON API: it acts as one user, within its scope. Only its hash is stored."""

    id = models.BigAutoField(primary_key=True)
    user = models.CharField(_("user"), max_length=200)
    actor_id = models.CharField(_("actor id"), max_length=200, db_default="")  # a name can become another user's
    digest = models.CharField(_("hash"), max_length=64, unique=True)
    note = models.CharField(_("note"), max_length=200, blank=True, db_default="")
    scope = models.CharField(_("scope"), max_length=30, choices=SCOPES, db_default=OPERATE_SCOPE)
    queues = JsonField(_("queues"), db_default=models.Value([], models.JSONField()), blank=True)
    create_time = TimeField(_("created"), db_default=Now())
    expire_time = TimeField(_("expires"), null=True, blank=True)
    last_used_time = TimeField(_("last used"), null=True, blank=True)

    class Meta:
        verbose_name = _("API token")
        verbose_name_plural = _("API tokens")
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=models.Q(scope__in=[READ_SCOPE, OPERATE_SCOPE]), name="dbtaskqueue_apitoken_scope"
            )
        ]

    def __str__(self) -> str:
        return f"{self.user}: {self.note or self.pk}"

    @property
    def queue_names(self) -> tuple[str, ...]:
        """The queues it is for; () is all of them. What SQL wrote and is no list names a queue that is not there."""
        return tuple(map(str, self.queues if isinstance(self.queues, list) else [self.queues]))


# -- archive batches ---------------------------------------------------------------------------------------------------

# What the data pipeline keeps in the database: its archive batches, and how far its streams have read.

BATCH_STATES = [("open", _("open")), ("closed", _("closed")), ("abandoned", _("abandoned"))]


class ArchiveBatch(models.Model):
    """Finished tasks on their way into the lake: the rows of one table that fit a frozen range and predicate.

    ``open``: the rows are in the database, and files of them may count in the lake. ``closed``: the rows left the
    database, in the transaction that wrote this state, and are in the lake; those in ``withdrawn`` had been changed and
    stayed. ``abandoned``: nothing left the database, no file counts.
    """

    id = models.BigAutoField(primary_key=True)
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

    class Meta:
        verbose_name = _("archive batch")
        verbose_name_plural = _("archive batches")
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=Q(state__in=[state for state, _name in BATCH_STATES]), name="dbtaskqueue_archivebatch_state"
            ),
            # Two batches of one table under way at once could take the same rows into the lake twice.
            models.UniqueConstraint(
                fields=["location", "source"],
                condition=Q(state="open"),
                name="dbtaskqueue_archivebatch_one_open",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.location} {self.source} {self.first_id}-{self.last_id}: {self.state}"


class StreamPosition(models.Model):
    """A stream that reads finished tasks by their events. ``location``: the task table, as in other tables.

    ``position``: the stream has read what transactions below it finished, and has the events of the others. NULL: it
    may have missed events, and reads the whole table once.
    """

    id = models.BigAutoField(primary_key=True)
    location = models.CharField(_("location"), max_length=200)
    name = models.CharField(_("stream"), max_length=200)
    position = models.BigIntegerField(_("position"), null=True, blank=True)
    read_time = TimeField(_("last read"), db_default=Now())

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["location", "name"], name="dbtaskqueue_streamposition_name")
        ]

    def __str__(self) -> str:
        return f"{self.location} {self.name}: {self.position}"


class FinishEvent(models.Model):
    """A transaction finished a task. A trigger writes it on PostgreSQL, while a stream is registered."""

    pk = models.CompositePrimaryKey("location", "transaction_id", "task_id")
    location = models.CharField(_("location"), max_length=200)
    transaction_id = models.BigIntegerField(_("transaction"))
    task_id = models.BigIntegerField(_("task"))

    class Meta:
        verbose_name = _("finish of a task")
        verbose_name_plural = _("finishes of tasks")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.location} {self.task_id}: {self.transaction_id}"


class PipelineReport(models.Model):
    """The figures that ``report``, ``forecast`` or ``whatif`` found; the admin shows them as a page."""

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(_("job"), max_length=30)
    create_time = TimeField(_("created"), db_default=Now())
    since = TimeField(_("from"), null=True, blank=True)
    until = TimeField(_("to"), null=True, blank=True)
    summary = models.TextField(_("summary"), db_default="", blank=True)
    data = JsonField(_("figures"), shape=dict, blank=True)
    location = models.TextField(_("files"), db_default="", blank=True)

    class Meta:
        verbose_name = _("pipeline report")
        verbose_name_plural = _("pipeline reports")

    def __str__(self) -> str:
        return f"{self.kind} of {self.create_time:%Y-%m-%d %H:%M}"
