"""The Django admin of the queue: pages to read everything, and the operator's verbs. No row is edited by hand.

The classes work on any ``AdminSite``; ``register`` puts all of them on a site of a project's own.
"""

from __future__ import annotations

from django.contrib import admin

from django_dbtaskqueue.admin.operation_pages import AuditEntryAdmin, BulkOperationAdmin, PollerAdmin
from django_dbtaskqueue.admin.overview_pages import DoctorAdmin, OverviewAdmin
from django_dbtaskqueue.admin.queue_pages import QueueAdmin
from django_dbtaskqueue.admin.record_pages import AttemptAdmin, FailureGroupAdmin, PipelineReportAdmin, TaskHistoryAdmin
from django_dbtaskqueue.admin.task_pages import PoisonTaskAdmin, TaskAdmin
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

ADMIN_CLASSES = {
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
    """Register every admin class on ``site``."""
    for model, admin_class in ADMIN_CLASSES.items():
        site.register(model, admin_class)


register(admin.site)
