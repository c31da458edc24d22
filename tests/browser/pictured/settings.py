"""Settings of the demo, and of the tasks in ``tasks``."""

from example_project.settings import *  # noqa: F403 -- the same, and a little more
from example_project.settings import DBTASKQUEUE, INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.browser.pictured"]
SHOP = [  # nothing processes their tasks
    *("mail", "imports", "invoices", "payments", "reports", "webhooks"),
    *("exports", "thumbnails", "geocode", "refunds", "crm-sync", "night-batch"),
]
LIMITS = {"max_running": 20, "rate": "30/m", "burst": 5}
PLAIN: dict[str, dict[str, object]] = {name: {} for name in ("letters", *SHOP)}
DBTASKQUEUE = {**DBTASKQUEUE, "QUEUES": {**DBTASKQUEUE["QUEUES"], "register": LIMITS, **PLAIN}}
TASKS = {"default": {"BACKEND": "django_dbtaskqueue.backend.DatabaseTaskBackend", "QUEUES": ["letters"]}}
