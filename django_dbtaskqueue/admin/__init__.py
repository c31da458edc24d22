"""The Django admin of the queue: look at everything, act through the operator's verbs, edit nothing by hand.

The classes work on any ``AdminSite``; a project with a site of its own registers them there.
"""

from __future__ import annotations

from django.contrib import admin

from django_dbtaskqueue.admin.queues import QueueAdmin
from django_dbtaskqueue.admin.records import AttemptAdmin, PollerAdmin, TaskHistoryAdmin
from django_dbtaskqueue.admin.tasks import TaskAdmin
from django_dbtaskqueue.models import Attempt, Poller, Queue, Task, TaskHistory, TemporaryTask

__all__ = ["AttemptAdmin", "PollerAdmin", "QueueAdmin", "TaskAdmin", "TaskHistoryAdmin"]

admin.site.register(Task, TaskAdmin)
admin.site.register(TemporaryTask, TaskAdmin)
admin.site.register(Queue, QueueAdmin)
admin.site.register(Poller, PollerAdmin)
admin.site.register(Attempt, AttemptAdmin)
admin.site.register(TaskHistory, TaskHistoryAdmin)
