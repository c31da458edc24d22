"""What the data pipeline keeps in the database: its archive batches, and how far its streams have read."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.models.readable import JsonField, TimeField

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
