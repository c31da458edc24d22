"""Names under which a page that has no table of its own stands in the admin's index. Proxies: nothing is stored."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from django_dbtaskqueue.models.control import Queue
from django_dbtaskqueue.models.tasks import Task


class Overview(Queue):
    """All queues at a glance."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("overview")
        verbose_name_plural = _("overview")


class PoisonTask(Task):
    """Tasks put aside."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("poison task")
        verbose_name_plural = _("poison")


class Doctor(Queue):
    """What is wrong, and what helps."""

    class Meta:
        proxy = True
        default_permissions = ()
        verbose_name = _("doctor")
        verbose_name_plural = _("doctor")
