"""Settings of the tests: ``default`` is a real PostgreSQL, ``sqlite`` a file, so that processes can share both.

Without ``DATABASE_URL`` an embedded PostgreSQL is started here, on a folder that the next run uses again. Databases
carry the process id in their names, so that several runs fit beside each other.
"""

import os
import tempfile
from pathlib import Path

from django_dbtaskqueue.contrib.embedded import EmbeddedPostgres, find_binaries
from example_project.database import database_from_url, sqlite


def _server_url() -> str:
    root = Path(tempfile.gettempdir()) / f"dbtaskqueue-tests-{os.getuid()}-{find_binaries().version}"
    # Nothing here need survive a crash: tests about that use the fixture pg_server. Each of the many databases that
    # tests make and drop would wait for the disk.
    forgetful = dict.fromkeys(("synchronous_commit", "fsync", "full_page_writes"), "off")
    return EmbeddedPostgres.start(root, settings=forgetful).url


SERVER_URL = os.environ.get("DATABASE_URL") or _server_url()
LAKES = Path(tempfile.gettempdir()) / f"dbtaskqueue-tests-{os.getpid()}-lakes"  # of demos; without Spark there are none
SQLITE_FILE = str(Path(tempfile.gettempdir()) / f"dbtaskqueue-tests-{os.getpid()}.sqlite3")

DATABASES = {
    "default": database_from_url(SERVER_URL) | {"TEST": {"NAME": f"test_{os.getpid()}"}},
    "sqlite": sqlite(SQLITE_FILE) | {"TEST": {"NAME": SQLITE_FILE}},
}

CONTRIB = ("admin", "auth", "contenttypes", "sessions", "messages", "staticfiles")
INSTALLED_APPS = [
    *(f"django.contrib.{app}" for app in CONTRIB),
    *("django_filters", "django_tables2", "django_dbtaskqueue", "example_project.flights", "tests.testapp"),
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

CONTEXT_PROCESSORS = [
    "django.template.context_processors.request",
    *(f"django.contrib.{app}.context_processors.{app}" for app in ("auth", "messages")),
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": CONTEXT_PROCESSORS},
    }
]

ROOT_URLCONF = "example_project.urls"
SECRET_KEY = "tests"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"

DBTASKQUEUE = {"QUEUES": {"claims": {}}}
