"""Start-up: register the system checks, find the processors."""

from django.apps import AppConfig, apps
from django.conf import settings
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
        from django_dbtaskqueue.operations import checks, schedules  # noqa: F401 -- they register themselves

        autodiscover_modules("tasks")
        given = getattr(settings, "DBTASKQUEUE", None)
        if isinstance(given, dict) and given.get("EMBEDDED_POLLER"):
            from django_dbtaskqueue.poller import web_process

            web_process.start_with_the_first_request()
        if not apps.is_installed("django.contrib.admin"):
            return
        # Imported here: a poller without the admin pays for none of it, and at the top AdminConfig would be found as a
        # second AppConfig of this module.
        from django.contrib import admin
        from django.contrib.admin.apps import AdminConfig

        from django_dbtaskqueue.admin import register_own_tables

        if isinstance(apps.get_app_config("admin"), AdminConfig):  # else the project registers its pages itself
            admin.autodiscover()  # the project's own admin classes come first
            register_own_tables(admin.site)
