"""Settings of a plain project whose database is the one ``DATABASE_URL`` names; benchmarks set it for their processes.

Environment: ``BENCHMARK_APPS`` adds apps, by commas; ``BENCHMARK_TASKQUEUE``, in JSON, is laid over ``DBTASKQUEUE``.
"""

import json
import os

from example_project.database import database_from_url

SECRET_KEY = "benchmarks"
DATABASES = {"default": database_from_url(os.environ["DATABASE_URL"])}
INSTALLED_APPS = [
    *("django.contrib.auth", "django.contrib.contenttypes", "django_filters", "django_tables2"),
    *("django_dbtaskqueue", "tests.benchmarks"),
    *filter(None, os.environ.get("BENCHMARK_APPS", "").split(",")),
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
DBTASKQUEUE = {"QUEUES": {f"queue-{number}": {} for number in range(1000)}}
DBTASKQUEUE |= json.loads(os.environ.get("BENCHMARK_TASKQUEUE", "{}"))
# What peers read; each only looks at its own.
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []}}
Q_CLUSTER = {
    "name": "benchmarks", "orm": "default", "workers": 1, "timeout": 60, "retry": 120, "bulk": 100, "queue_limit": 500,
    "recycle": 1_000_000, "save_limit": 0, "log_level": "ERROR",
}  # fmt: skip
