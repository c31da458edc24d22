"""The Django admin of the queue: pages to read everything, and the operator's verbs. No row is edited by hand.

The classes work on any ``AdminSite``; ``register`` puts all of them on a site of a project's own.
"""

from django.apps import apps
from django.contrib import admin

from django_dbtaskqueue import models
from django_dbtaskqueue.admin import record_pages
from django_dbtaskqueue.admin.frame import list_in_order
from django_dbtaskqueue.admin.queue_pages import DoctorAdmin, OverviewAdmin, QueueAdmin
from django_dbtaskqueue.admin.record_pages import AttemptAdmin, PollerAdmin, TaskHistoryAdmin
from django_dbtaskqueue.admin.schedule_and_batch_pages import BatchAdmin, ScheduleAdmin
from django_dbtaskqueue.admin.task_pages import PoisonTaskAdmin, TaskAdmin

__all__ = [
    "AttemptAdmin", "PollerAdmin", "QueueAdmin", "TaskAdmin", "TaskHistoryAdmin", "register", "register_own_tables",
]  # fmt: skip

ADMIN_CLASSES = {
    models.Overview: OverviewAdmin,
    models.FailureGroup: record_pages.FailureGroupAdmin,
    models.Task: TaskAdmin,
    models.TemporaryTask: TaskAdmin,
    models.PoisonTask: PoisonTaskAdmin,
    models.Queue: QueueAdmin,
    models.Schedule: ScheduleAdmin,
    models.Batch: BatchAdmin,
    models.Poller: PollerAdmin,
    models.BulkOperation: record_pages.BulkOperationAdmin,
    models.AuditEntry: record_pages.AuditEntryAdmin,
    models.Attempt: AttemptAdmin,
    models.TaskHistory: TaskHistoryAdmin,
    models.PipelineReport: record_pages.PipelineReportAdmin,
    models.Doctor: DoctorAdmin,
}


def register(site: admin.AdminSite) -> None:
    """Register every admin class on ``site``, and ``TaskAdmin`` for each task table of the project's own."""
    _register_ours(site)
    register_own_tables(site)


def register_own_tables(site: admin.AdminSite) -> None:
    """Register ``TaskAdmin`` for the task tables of the project that have no admin class on ``site`` yet."""
    for model in apps.get_models():
        is_own = issubclass(model, models.AbstractTask) and not model._meta.proxy and model not in ADMIN_CLASSES
        if is_own and not site.is_registered(model):
            site.register(model, TaskAdmin)


def _register_ours(site: admin.AdminSite) -> None:
    for model, admin_class in ADMIN_CLASSES.items():
        site.register(model, admin_class)
    list_in_order(site)


_register_ours(admin.site)
