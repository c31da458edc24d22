"""Settings of the example project: its database is found or started on import, everything else is plain Django.

Environment: ``DATABASE_URL`` names a database; ``DBTASKQUEUE_DATA_ROOT`` moves the folder of the embedded one;
``DBTASKQUEUE_NO_DATABASE=1`` starts none, for commands that need none (checks, linters); ``DEBUG``, ``SECRET_KEY`` and
``ALLOWED_HOSTS`` as usual.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from example_project.database import choose_database

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_ROOT = Path(os.environ.get("DBTASKQUEUE_DATA_ROOT") or BASE_DIR / ".data")

DEBUG = os.environ.get("DEBUG", "1" if "runserver" in sys.argv[1:2] else "0") == "1"
SECRET_KEY = os.environ.get("SECRET_KEY", "for development only: set SECRET_KEY where others can reach the site")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "localhost 127.0.0.1 [::1]").split()

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_filters",
    "django_tables2",
    "django_dbtaskqueue",
    "example_project.flights",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"

DATABASES: dict[str, dict[str, Any]] = {}
if os.environ.get("DBTASKQUEUE_NO_DATABASE") != "1":
    DATABASES["default"] = choose_database(DATA_ROOT)

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-us"
STATIC_URL = "static/"
STATIC_ROOT = DATA_ROOT / "static"
LAKES = DATA_ROOT / "lakes"  # where the demo's pipeline archives to: a lake for each database

# An empty dict means the defaults; the processor in example_project/flights/tasks.py adds its own.
DBTASKQUEUE: dict[str, Any] = {"QUEUES": {"claims": {}}}
