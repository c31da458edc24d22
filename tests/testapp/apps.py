"""The test application's configuration."""

from django.apps import AppConfig


class TestAppConfig(AppConfig):
    """No migrations: its tables are made by ``migrate --run-syncdb``, as test databases do."""

    name = "tests.testapp"
    default_auto_field = "django.db.models.BigAutoField"
