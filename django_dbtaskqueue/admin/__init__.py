"""The Django admin of the queue: look at everything, act through the operator's verbs, edit nothing by hand.

The classes work on any ``AdminSite``; ``register`` puts all of them on a site of a project's own.
"""

from __future__ import annotations

from django.contrib import admin

from django_dbtaskqueue.admin.activity import AuditEntryAdmin, BulkOperationAdmin
from django_dbtaskqueue.admin.doctor import DoctorAdmin
from django_dbtaskqueue.admin.failures import FailureGroupAdmin
from django_dbtaskqueue.admin.overview import OverviewAdmin
from django_dbtaskqueue.admin.queues import QueueAdmin
from django_dbtaskqueue.admin.records import AttemptAdmin, PollerAdmin, TaskHistoryAdmin
from django_dbtaskqueue.admin.reports import PipelineReportAdmin
from django_dbtaskqueue.admin.tasks import PoisonTaskAdmin, TaskAdmin
from django_dbtaskqueue.models import (
    Attempt,
    AuditEntry,
    BulkOperation,
    Doctor,
    FailureGroup,
    Overview,
    PipelineReport,
    PoisonTask,
    Poller,
    Queue,
    Task,
    TaskHistory,
    TemporaryTask,
)

__all__ = ["AttemptAdmin", "PollerAdmin", "QueueAdmin", "TaskAdmin", "TaskHistoryAdmin", "register"]

PAGES = {
    Overview: OverviewAdmin,
    FailureGroup: FailureGroupAdmin,
    Task: TaskAdmin,
    TemporaryTask: TaskAdmin,
    PoisonTask: PoisonTaskAdmin,
    Queue: QueueAdmin,
    Poller: PollerAdmin,
    BulkOperation: BulkOperationAdmin,
    AuditEntry: AuditEntryAdmin,
    Attempt: AttemptAdmin,
    TaskHistory: TaskHistoryAdmin,
    PipelineReport: PipelineReportAdmin,
    Doctor: DoctorAdmin,
}


def register(site: admin.AdminSite) -> None:
    """Put every page on ``site``, in its index."""
    for model, page in PAGES.items():
        site.register(model, page)


register(admin.site)
