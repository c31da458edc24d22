"""What pollers count: outcomes by the minute, and failures by what they have in common. Appended, merged later."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _


class Metric(models.Model):
    """What became of a queue's attempts in one minute, by outcome.

    Each poller appends its own rows, so several may stand for one minute; older ones are merged, in the end per hour.
    ``outcome`` is completed, deleted, retried (failed, with another attempt to come), failed (for good), poisoned,
    reenqueued or lost. The histograms speak for all attempts, but only a sample of them was measured.
    """

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    minute = models.DateTimeField(_("minute"))
    outcome = models.CharField(_("outcome"), max_length=30)
    count = models.BigIntegerField(_("count"))
    run_seconds = models.FloatField(_("seconds of work"), db_default=0.0)
    wait_seconds = models.FloatField(_("seconds waited"), db_default=0.0)
    runs = models.JSONField(_("histogram of run times"), db_default=models.Value({}, models.JSONField()))
    waits = models.JSONField(_("histogram of waits"), db_default=models.Value({}, models.JSONField()))

    class Meta:
        verbose_name = _("metric")
        verbose_name_plural = _("metrics")
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["minute", "queue"], name="dbtaskqueue_metric_minute"),
        ]

    def __str__(self) -> str:
        return f"{self.queue}: {self.count} {self.outcome}"


class FailureGroup(models.Model):
    """Failures that have queue, exception type, place in the project's code and message in common."""

    fingerprint = models.CharField(_("fingerprint"), max_length=40, primary_key=True)
    queue = models.CharField(_("queue"), max_length=200, db_column="queue_name")
    error_type = models.CharField(_("exception"), max_length=200, db_default="")
    frame = models.CharField(_("place in the code"), max_length=300, db_default="")
    message = models.CharField(_("message"), max_length=500, db_default="")
    first_seen = models.DateTimeField(_("first seen"))
    last_seen = models.DateTimeField(_("last seen"))

    class Meta:
        verbose_name = _("failure group")
        verbose_name_plural = _("failure groups")
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["last_seen"], name="dbtaskqueue_failure_seen"),
        ]

    def __str__(self) -> str:
        return f"{self.queue}: {self.error_type or self.message}"


class FailureCount(models.Model):
    """How many attempts of one failure group failed in one minute. Appended, and merged, as ``Metric``."""

    id = models.BigAutoField(primary_key=True)
    fingerprint = models.CharField(_("fingerprint"), max_length=40)
    minute = models.DateTimeField(_("minute"))
    count = models.BigIntegerField(_("count"))

    class Meta:
        verbose_name = _("failures in a minute")
        verbose_name_plural = _("failures by the minute")
        indexes: ClassVar[list[models.Index]] = [
            models.Index(fields=["minute", "fingerprint"], name="dbtaskqueue_failure_minute"),
        ]

    def __str__(self) -> str:
        return f"{self.fingerprint}: {self.count}"
