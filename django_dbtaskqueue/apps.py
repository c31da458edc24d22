"""Start-up: register the system checks, find the processors."""

from __future__ import annotations

from django.apps import AppConfig, apps
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _


class TaskQueueConfig(AppConfig):
    """The app ``dbtaskqueue``."""

    name = "django_dbtaskqueue"
    label = "dbtaskqueue"
    verbose_name = _("Task queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks and the pages of own tables, import every installed app's ``tasks.py``."""
        from django_dbtaskqueue.operations import checks  # noqa: F401 -- checks registers itself

        autodiscover_modules("tasks")
        from django.contrib.admin.apps import AdminConfig  # an import above would make it a second AppConfig here

        if isinstance(apps.app_configs.get("admin"), AdminConfig):  # else the project registers its pages itself
            from django.contrib import admin

            from django_dbtaskqueue.admin import register_own_tables

            admin.autodiscover()  # the project's own admin classes come first
            register_own_tables(admin.site)
