"""A site without the admin, whose database and release the test names."""

import json
import os

DATABASES = {"default": json.loads(os.environ["UPGRADE_DATABASE"])}
INSTALLED_APPS = ["django_dbtaskqueue", "load", *os.environ.get("UPGRADE_APPS", "").split()]
SECRET_KEY = "upgrade"
USE_TZ = True
QUEUES = {"history": {"keep": "history"}, "lost": {"max_attempts": 2}}
DBTASKQUEUE = {"DEFAULTS": {"retry": "fixed:20ms", "reenqueue": "fixed:20ms"}, "QUEUES": QUEUES}
