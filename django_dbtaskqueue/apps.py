"""Start-up: introduce the flow to the manager, find the processors."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class TaskQueueConfig(AppConfig):
    """The app ``dbtaskqueue``."""

    name = "django_dbtaskqueue"
    label = "dbtaskqueue"
    verbose_name = _("Task queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Bind the flow, register the system checks, import every installed app's ``tasks.py``."""
        from django_dbtaskqueue.flow import enqueue, enqueue_many, housekeep, move
        from django_dbtaskqueue.models import querysets
        from django_dbtaskqueue.pull import checkout

        querysets.bind(enqueue=enqueue, bulk=enqueue_many, checkout=checkout, move=move, housekeep=housekeep)
        autodiscover_modules("tasks")
