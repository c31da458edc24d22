"""TASKS, its history and the failed attempts. Data only: every change of ``status`` is made in ``flow/``.

Some columns have another name in the database, so that tables of older systems fit. Each has a database default, so
``INSERT INTO dbtaskqueue_task (queue_name) VALUES ('q')`` makes a valid task. Times are by the database's clock.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce, Now
from django.db.models.lookups import Exact, IsNull
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.core.json import MAX_NAME_CHARS
from django_dbtaskqueue.core.states import TERMINAL, Status
from django_dbtaskqueue.models.querysets import TaskManager, Waiting
from django_dbtaskqueue.models.readable import JsonField, NumberedRow, TimeField, index, readable, row_check, unique

STATUS_CHOICES = [(str(status), str(status)) for status in Status]
STATUS_VALUES = [str(status) for status in Status]
TERMINAL_VALUES = [str(status) for status in TERMINAL]
FAILURE_VALUES = [str(Status.ERROR), str(Status.POISON)]
# The same as that it has a ready time, but the condition of the index of groups (``core.sql.groups``).
IS_READY = Q(IsNull(Coalesce("parked_by", "final_status"), True))
IS_BEHIND_ITS_HEAD = Q(Exact(Coalesce("parked_by", models.Value("")), "group"))
# What a row may hold, so that each poller can read it and count on from it.
MAX_LEASE_SECONDS = 3_155_760_000  # a hundred years
MAX_TOTAL_ATTEMPT, MAX_REENQUEUE_ATTEMPT = 2**62, 10**9


if TYPE_CHECKING:
    # What a column holds, which checkers without Django's plugin must be told.
    Text = models.Field[str, str]
    OptionalText = models.Field[str | None, str | None]
    Whole = models.Field[int, int]
    OptionalWhole = models.Field[int | None, int | None]
    OptionalNumber = models.Field[float | None, float | None]
    Json = models.Field[Any, Any]
    Time = models.Field[datetime, datetime]
    OptionalTime = models.Field[datetime | None, datetime | None]


class TaskColumns(models.Model):
    """The columns that TASKS and the history share."""

    queue: Text = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    reference: OptionalText = models.CharField(  # noqa: DJ001 -- NULL means "never a duplicate", '' would be one
        _("reference"), max_length=200, null=True, blank=True, db_column="reference_number"
    )
    status: Text = models.CharField(_("status"), max_length=30, choices=STATUS_CHOICES, db_default="CREATED")
    attempt: Whole = models.IntegerField(_("attempt"), db_default=0)
    reenqueue_attempt: Whole = models.IntegerField(_("reenqueue attempt"), db_default=0)
    total_attempt: Whole = models.BigIntegerField(_("total attempt"), db_default=0)
    max_attempts: Whole = models.IntegerField(_("max attempts"), db_default=5)
    priority: Whole = models.SmallIntegerField(_("priority"), db_default=0)
    payload: Json = JsonField(_("payload"), null=True, blank=True)
    payload_type: OptionalText = models.CharField(_("payload type"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- NULL is "the queue's default"
    result: Json = JsonField(_("result"), null=True, blank=True)
    process_result: OptionalText = models.TextField(_("process result"), null=True, blank=True)  # noqa: DJ001 -- NULL is "no result"
    context: Json = JsonField(_("context"), null=True, blank=True)
    group_key: OptionalText = models.CharField(_("group"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- NULL is "no group"
    tag: OptionalText = models.CharField(_("tag"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- NULL is "any host"
    poller_instance: OptionalText = models.CharField(_("poller"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- NULL is "no poller"
    create_time: Time = TimeField(_("created"), db_default=Now())
    next_process_time: Time = TimeField(_("next process time"), db_default=Now())
    last_update_time: Time = TimeField(_("last update"), db_default=Now())
    lease_seconds: OptionalNumber = models.FloatField(_("lease in seconds"), null=True, blank=True)
    expire_time: OptionalTime = TimeField(_("expires"), null=True, blank=True)
    start_time: OptionalTime = TimeField(_("started"), null=True, blank=True)
    finish_time: OptionalTime = TimeField(_("finished"), null=True, blank=True)

    class Meta:
        abstract = True


class AbstractTask(Waiting, TaskColumns):
    """A task table. Subclass it to give queues a table of their own, under any name."""

    id: Whole = models.BigAutoField(primary_key=True)
    ready_time: OptionalTime = TimeField(_("ready time"), null=True, blank=True, db_default=Now())
    parked_by: OptionalText = models.CharField(_("parked by"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- NULL is "not parked"
    # The status once it is terminal: what pages and housekeeping look for, in indexes that no checkout writes.
    final_status: OptionalText = models.CharField(_("final status"), max_length=30, null=True, blank=True)  # noqa: DJ001 -- NULL is "not finished"
    fingerprint: OptionalText = models.CharField(_("fingerprint"), max_length=40, null=True, blank=True)  # noqa: DJ001 -- NULL is "never failed"
    # How many leases in a row ran out before an outcome: the task may have killed its process.
    lost_leases: Whole = models.IntegerField(_("leases lost in a row"), db_default=0)
    # True: a child, a batch or a client waits for the end of the task, and its end is still to be told. False: it was
    # told that the task failed, and waits for another end. NULL: nothing waits.
    watched = models.BooleanField(_("watched"), null=True, blank=True)
    batch = models.BigIntegerField(_("batch"), null=True, blank=True)
    # How many signals were sent to the task: a settle that parks it sees whether one came meanwhile.
    signals: OptionalWhole = models.IntegerField(_("signals"), null=True, blank=True)

    objects: ClassVar[TaskManager[Self]] = TaskManager()
    enqueue_note = ""  # of a task that ``enqueue`` returns: why no task was inserted; "": one was

    class Meta:
        abstract = True
        constraints: ClassVar = [
            # By bytes, so that how a reference begins can be looked up in a database of any collation.
            unique("reference", "reference", "queue", opclasses=["varchar_pattern_ops", "varchar_ops"]),
            row_check("status", Q(status__in=STATUS_VALUES)),
            # A task has a ready time only while a poller may take it, so the checkout index holds no other task.
            # It has a final status only when it is finished, so pages and retention find it by that column.
            row_check(
                "ready_time",
                Q(ready_time__isnull=False, parked_by__isnull=True, final_status__isnull=True)
                & ~Q(status__in=TERMINAL_VALUES)
                | Q(ready_time__isnull=True, status__in=TERMINAL_VALUES, parked_by__isnull=True)
                & Q(final_status__isnull=False, final_status=models.F("status"))
                | Q(ready_time__isnull=True, status="CREATED", parked_by__isnull=False, final_status__isnull=True),
            ),
            row_check("finished", Q(finish_time__isnull=True) | Q(status__in=TERMINAL_VALUES)),
            row_check("unleased", ~Q(status="CREATED") | Q(poller_instance__isnull=True)),
            row_check(
                "counters",
                Q(attempt__gte=0, reenqueue_attempt__gte=0, max_attempts__gte=1)
                & Q(total_attempt__gte=models.F("attempt"), total_attempt__lte=MAX_TOTAL_ATTEMPT)
                & Q(reenqueue_attempt__lte=MAX_REENQUEUE_ATTEMPT),
            ),
            # NULL passes: a condition that is not known to be false holds.
            row_check("lease", Q(lease_seconds__gt=0, lease_seconds__lte=MAX_LEASE_SECONDS)),
            readable("create_time", "next_process_time", "ready_time", "expire_time"),
        ]
        indexes: ClassVar = [
            # The ready order. Checkout changes no column of this or of any other index, so that it stays a HOT update.
            index("%(class)s_rdy", "queue", "priority", "ready_time", "id", ready_time__isnull=False),
            # The heads of groups, and the tasks behind them; core.sql.groups says why by these conditions.
            index("%(class)s_lead", "queue", "group_key", where=IS_READY, group_key__isnull=False),
            index("%(class)s_next", "queue", "group_key", "priority", "id", where=IS_BEHIND_ITS_HEAD),
            index("%(class)s_park", "queue", "payload_type", parked_by__isnull=False),
            # Of parked tasks those without a processor: pollers look for them often, and others may be many.
            index("%(class)s_nohd", "queue", "payload_type", parked_by__startswith="no handler"),
            index("%(class)s_end", "queue", "final_status", "id", final_status__isnull=False),
            # The hot path writes neither of these, because they hold failures only.
            index("%(class)s_fail", "final_status", "id", final_status__in=FAILURE_VALUES),
            index("%(class)s_fp", "fingerprint", "id", final_status__in=FAILURE_VALUES, fingerprint__isnull=False),
            index("%(class)s_told", "id", watched=True, final_status__isnull=False),
            index("%(class)s_bat", "batch", "final_status", batch__isnull=False),
        ]

    def __str__(self) -> str:
        return f"{self.queue}/{self.reference or self.pk}"


class Task(AbstractTask):
    """TASKS: the default table of every queue."""

    class Meta(AbstractTask.Meta):
        default_permissions = ("add", "delete", "view")  # a change is a verb, with a permission of its own
        verbose_name, verbose_name_plural = _("task"), _("tasks")
        permissions: ClassVar = [
            ("reprocess_task", "Can reprocess tasks (ERROR to CREATED)"),
            ("mark_poison_task", "Can mark tasks as poison (ERROR to POISON)"),
            ("unpoison_task", "Can take poison back (POISON to ERROR)"),
            ("kick_task", "Can kick poison (POISON to CREATED)"),
            ("cancel_task", "Can cancel tasks that wait or run (to POISON)"),
            ("release_task", "Can take tasks from their pollers (PROCESSING to CREATED)"),
            ("housekeep_task", "Can move or delete finished tasks"),
            ("run_now_task", "Can make waiting tasks due now"),
            ("snooze_task", "Can let waiting tasks wait longer"),
            ("change_priority_task", "Can change the priority of waiting tasks"),
            ("move_task", "Can move waiting tasks to another queue"),
            ("edit_payload_task", "Can edit the payload of failed tasks and retry them"),
            ("signal_task", "Can send signals to tasks"),
            ("view_payload", "Can see payloads, results and tracebacks"),
        ]


class PoisonTask(Task):
    """The name of the page of poison tasks in the admin's index. It stores nothing."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name, verbose_name_plural = _("poison task"), _("poison")


class TemporaryTask(AbstractTask):
    """The table of queues set to ``temporary``: UNLOGGED on PostgreSQL, so a crash of the server empties it."""

    class Meta(AbstractTask.Meta):
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("temporary task"), _("temporary tasks")


class TaskHistory(TaskColumns):
    """Tasks that left TASKS: by the queue's keep setting, by housekeeping, or by the pipeline.

    On PostgreSQL the table is partitioned by the month of ``moved_time``, so that old history goes by dropping a table.
    """

    id: Whole = models.BigAutoField(primary_key=True)
    location: Text = models.CharField(_("location"), max_length=200, db_default="dbtaskqueue.task")
    task_id: Whole = models.BigIntegerField(_("task"))
    moved_time: Time = TimeField(_("moved"), db_default=Now())

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("task in history"), _("history")
        indexes: ClassVar = [
            index("history_task", "location", "task_id"),
            index("history_finished", "queue", "finish_time"),
        ]

    def __str__(self) -> str:
        return f"{self.queue}/{self.reference or self.task_id}"


class UsedReference(NumberedRow):
    """A reference that stays taken, also when its task has left the table.

    For ever in a queue with ``unique_over="history"``; for its period where a rule of uniqueness has one. Under names
    that no queue can have are other things that happen once: a message or a task that came over the bridge, a task that
    came from another shard, a micro-batch of a stream.
    """

    shown_by = ("queue", "reference")

    queue: Text = models.CharField(_("queue"), max_length=300, db_column="queue_name")
    reference: Text = models.CharField(_("reference"), max_length=300, db_column="reference_number")
    digest: Text = models.CharField(_("hash of the content"), max_length=64, blank=True, db_default="")
    create_time: Time = TimeField(_("created"), db_default=Now())
    expire_time: OptionalTime = TimeField(_("expires"), null=True, blank=True)  # NULL: never

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("unique", "queue", "reference"), readable("create_time", "expire_time")]
        indexes: ClassVar = [index("usedref_expires", "expire_time", expire_time__isnull=False)]


class Attempt(NumberedRow):
    """One failed attempt. Successful ones live on the task row alone."""

    location: Text = models.CharField(_("location"), max_length=200, db_default="dbtaskqueue.task")
    task_id: Whole = models.BigIntegerField(_("task"))
    queue: Text = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    attempt: Whole = models.IntegerField(_("attempt"))
    total_attempt: Whole = models.BigIntegerField(_("total attempt"))
    poller_instance: OptionalText = models.CharField(_("poller"), max_length=200, null=True, blank=True)  # noqa: DJ001 -- copied from the task row
    start_time: OptionalTime = TimeField(_("started"), null=True, blank=True)
    finish_time: Time = TimeField(_("failed"), db_default=Now())
    error_type: Text = models.CharField(_("exception"), max_length=200, db_default="")
    message: Text = models.TextField(_("message"), db_default="")
    traceback: Text = models.TextField(_("traceback"), db_default="")
    fingerprint: Text = models.CharField(_("fingerprint"), max_length=40, db_default="")

    class Meta:
        default_permissions = ("view",)
        verbose_name, verbose_name_plural = _("failed attempt"), _("failed attempts")
        indexes: ClassVar = [
            index("attempt_task", "location", "task_id", "total_attempt"),
            index("attempt_fp", "fingerprint", "id"),
        ]

    def __str__(self) -> str:
        return f"{self.queue}/{self.task_id} attempt {self.attempt}: {self.error_type}"


# Kinds of steps. A wait is open until its signal came or its time was over.
STEP, SLEEP, WAIT, RECEIVED, TIMED_OUT = "step", "sleep", "wait", "signal", "timeout"
SENT = "sent"  # a signal that no wait has received
STEP_KINDS = (
    (STEP, _("step")),
    (SLEEP, _("sleep")),
    (WAIT, _("waits for a signal")),
    (RECEIVED, _("signal")),
    (TIMED_OUT, _("no signal in time")),
    (SENT, _("signal")),
)


class Step(NumberedRow):
    """A step that a task has taken: its result, a sleep, or a wait for a signal. Later attempts pass it.

    A signal that was sent is a row without a position, until the wait that receives it takes over its data and actor.
    """

    shown_by = ("task_id", "position", "name")

    location: Text = models.CharField(_("location"), max_length=200, db_default="dbtaskqueue.task")
    task_id: Whole = models.BigIntegerField(_("task"))
    task_time: Time = TimeField(_("task created"))  # a crash may empty a temporary table, and use ids again
    position: OptionalWhole = models.IntegerField(_("position"), null=True, blank=True)
    name: Text = models.CharField(_("name"), max_length=MAX_NAME_CHARS)
    kind: Text = models.CharField(_("kind"), max_length=30, choices=STEP_KINDS, db_default=SENT)
    result: Json = JsonField(_("result"), null=True, blank=True)
    actor: Text = models.CharField(_("actor"), max_length=200, db_default="", blank=True)  # who sent the signal
    until_time: OptionalTime = TimeField(_("until"), null=True, blank=True)
    create_time: Time = TimeField(_("stored"), db_default=Now())

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("position", "location", "task_id", "position")]
        indexes: ClassVar = [index("step_waits", "name", "id", kind=WAIT)]


ON_PARENT_FAILURE = (
    ("hold", _("wait until the parent completes after all")),
    ("cancel", _("cancel the task")),
    ("run", _("run the task all the same")),
)


class Dependency(NumberedRow):
    """A task that waits, or waited, for the end of another one. The tables may differ; the database is the same."""

    shown_by = ("child_id", "parent_id")

    parent_location = models.CharField(_("parent's location"), max_length=200)
    parent_id = models.BigIntegerField(_("parent"))
    child_location = models.CharField(_("child's location"), max_length=200)
    child_id = models.BigIntegerField(_("child"))
    name = models.CharField(_("name"), max_length=200, blank=True, db_default="")  # what the child calls the parent
    # The status that ended the wait. NULL: the child still waits for this parent.
    outcome = models.CharField(_("outcome"), max_length=30, null=True, blank=True)  # noqa: DJ001 -- NULL is "not ended"

    class Meta(NumberedRow.Meta):
        # No index has the outcome: ending a wait stays a HOT update.
        indexes: ClassVar = [
            index("dependency_parent", "parent_location", "parent_id"),
            index("dependency_child", "child_location", "child_id"),
        ]


class Hold(NumberedRow):
    """A task that may not start yet, and for how many parents it waits. One row, so a parent's end costs one update."""

    shown_by = ("task_id", "remaining")

    location = models.CharField(_("location"), max_length=200)
    task_id = models.BigIntegerField(_("task"))
    remaining = models.IntegerField(_("parents to wait for"))
    on_parent_failure = models.CharField(_("when a parent fails"), max_length=30, choices=ON_PARENT_FAILURE)

    class Meta(NumberedRow.Meta):
        constraints: ClassVar = [unique("task", "location", "task_id")]


class Batch(NumberedRow):
    """Tasks that were enqueued together, and the task that runs when all of them have ended."""

    shown_by = ("name",)

    name = models.CharField(_("name"), max_length=200)
    create_time = TimeField(_("created"), db_default=Now())
    total = models.IntegerField(_("tasks"), db_default=0)
    queues = JsonField(_("queues"), shape=list, of=str)  # names, of its tasks
    callback_location = models.CharField(_("location of the last task"), max_length=200, blank=True, db_default="")
    callback_id = models.BigIntegerField(_("last task"), null=True, blank=True)

    class Meta:
        verbose_name, verbose_name_plural = _("batch"), _("batches")
        default_permissions = ("view",)
        constraints: ClassVar = [readable("create_time")]
