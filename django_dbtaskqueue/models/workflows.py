"""Which tasks wait for others, and batches of tasks."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.core.durations import READABLE_TIMES
from django_dbtaskqueue.models.readable import JsonField, TimeField

ON_PARENT_FAILURE = (
    ("hold", _("wait until the parent completes after all")),
    ("cancel", _("cancel the task")),
    ("run", _("run the task all the same")),
)


class Dependency(models.Model):
    """A task that waits, or waited, for the end of another one. The tables may differ; the database is the same."""

    id = models.BigAutoField(primary_key=True)
    parent_location = models.CharField(_("parent's location"), max_length=200)
    parent_id = models.BigIntegerField(_("parent"))
    child_location = models.CharField(_("child's location"), max_length=200)
    child_id = models.BigIntegerField(_("child"))
    name = models.CharField(_("name"), max_length=200, blank=True, db_default="")  # what the child calls the parent
    # The status that ended the wait. NULL: the child still waits for this parent.
    outcome = models.CharField(_("outcome"), max_length=30, null=True, blank=True)  # noqa: DJ001 -- NULL is "not ended"

    class Meta:
        verbose_name = _("dependency")
        verbose_name_plural = _("dependencies")
        default_permissions = ()
        # No index has the outcome: ending a wait stays a HOT update.
        indexes: ClassVar = [
            models.Index(fields=["parent_location", "parent_id"], name="dbtaskqueue_dependency_parent"),
            models.Index(fields=["child_location", "child_id"], name="dbtaskqueue_dependency_child"),
        ]

    def __str__(self) -> str:
        return f"{self.child_id} after {self.parent_id}"


class Hold(models.Model):
    """A task that may not start yet, and for how many parents it waits. One row, so a parent's end costs one update."""

    id = models.BigAutoField(primary_key=True)
    location = models.CharField(_("location"), max_length=200)
    task_id = models.BigIntegerField(_("task"))
    remaining = models.IntegerField(_("parents to wait for"))
    on_parent_failure = models.CharField(_("when a parent fails"), max_length=30, choices=ON_PARENT_FAILURE)

    class Meta:
        verbose_name = _("held task")
        verbose_name_plural = _("held tasks")
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["location", "task_id"], name="dbtaskqueue_hold_task"),
        ]

    def __str__(self) -> str:
        return f"{self.task_id} waits for {self.remaining}"


class Batch(models.Model):
    """Tasks that were enqueued together, and the task that runs when all of them have ended."""

    id = models.BigAutoField(primary_key=True)
    name = models.CharField(_("name"), max_length=200)
    create_time = TimeField(_("created"), db_default=Now())
    total = models.IntegerField(_("tasks"), db_default=0)
    queues = JsonField(_("queues"), shape=list, of=str)  # names, of its tasks
    callback_location = models.CharField(_("location of the last task"), max_length=200, blank=True, db_default="")
    callback_id = models.BigIntegerField(_("last task"), null=True, blank=True)

    class Meta:
        verbose_name = _("batch")
        verbose_name_plural = _("batches")
        default_permissions = ("view",)
        constraints: ClassVar = [
            models.CheckConstraint(
                condition=models.Q(create_time__range=READABLE_TIMES), name="dbtaskqueue_batch_times"
            )
        ]

    def __str__(self) -> str:
        return self.name
