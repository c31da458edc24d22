"""A database that the task queue does not run on is refused in a sentence, by every command, before any work."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import django
import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.backends.base import base
from django.test import Client

from tests.conftest import REPOSITORY
from tests.operations.test_api import BEARER, DIGEST
from tests.support import sql

URL = "sqlite:///tests.sqlite3"  # for tests.settings, which start no server then
SETTINGS = """
from tests.settings import *

DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"},
    "tasks": {"ENGINE": "%s", "NAME": "tasks"},
}
DBTASKQUEUE = {"DATABASE": "tasks", "QUEUES": {"claims": {}}}
"""
EVERY_COMMAND = """
import sys, traceback
import django
from django.core.management import execute_from_command_line, get_commands

django.setup()
ours = [name for name, app in get_commands().items() if app == "django_dbtaskqueue"]
more = {"taskqueue": ["status"], "runtaskpipeline": ["check"]}
every = django.VERSION < (6,) and sys.argv[1] == "every"
commands = [[name, *more.get(name, [])] for name in ours] if every else []
for words in [["check", "--tag", "dbtaskqueue"], *commands]:
    try:
        execute_from_command_line(["manage.py", *words])
    except SystemExit as end:
        print("ended", words[0], end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
"""


@pytest.mark.parametrize(
    ("engine", "name", "commands"),
    [("django.db.backends.mysql", "MySQL and MariaDB", "every"), ("django.db.backends.oracle", "Oracle", "check")],
)
def test_every_command_refuses_another_engine(engine: str, name: str, commands: str, tmp_path: Path) -> None:
    (tmp_path / "other_engine.py").write_text(SETTINGS % engine)
    env = {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}", "DJANGO_SETTINGS_MODULE": "other_engine", "DATABASE_URL": URL}
    words = [sys.executable, "-c", EVERY_COMMAND, commands]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    ended = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("ended ")]
    # Django 6 lets each engine check the fields first, for which it needs the driver.
    every = commands == "every" and django.VERSION < (6,)
    assert len(ended) >= (5 if every else 1) and {code for _command, code in ended} == {"1"}
    sentence = f"(dbtaskqueue.E008) The task queue does not run on {name}, the engine of database 'tasks'."
    assert done.stderr.count(sentence) == len(ended)
    assert done.stderr.count("HINT: Use PostgreSQL or SQLite for tasks") == len(ended)


@pytest.mark.usefixtures("postgres_process_database")
def test_a_server_that_is_too_old_is_refused_at_the_start() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(connection.features), "minimum_database_version", (99,))
        patched.setattr(base, "RAN_DB_VERSION_CHECK", set())  # Django asks once for each alias
        connection.close()
        (error,) = run_checks(tags=["database"], databases=["default"])
        assert error.id == "dbtaskqueue.E009" and "PostgreSQL 99 or later is required (found " in error.msg
        for command in ("runtaskpoller", "housekeeptasks"):
            connection.close()
            with pytest.raises(CommandError, match="PostgreSQL 99 or later is required") as refused:
                call_command(command)
            assert refused.value.returncode == 3


@pytest.mark.usefixtures("postgres_process_database")
def test_the_api_answers_503_where_the_database_is_not_migrated_or_away(settings: Any, monkeypatch: Any) -> None:
    settings.DBTASKQUEUE |= {"API_TOKENS": {"robot": DIGEST}}
    User.objects.create_superuser("robot")
    caller = Client(headers=BEARER)
    sql("ALTER TABLE dbtaskqueue_task RENAME TO elsewhere")
    answer = caller.get("/api/tasks")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
    assert "Run: python manage.py migrate" in answer.json()["error"]
    connection.close()
    with monkeypatch.context() as away:
        away.setitem(connection.settings_dict, "PORT", "1")
        answer = caller.get("/api/tasks")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert answer.json() == {"error": "The database does not answer."}
