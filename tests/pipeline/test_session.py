"""What a job starts with: Java, its archive of classes, workers like the driver, the address of a database."""

import os
import pickle
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import sql

from django_dbtaskqueue.core.exceptions import PipelineError
from django_dbtaskqueue.pipeline import spark as session
from django_dbtaskqueue.pipeline.database import Database


def test_workers_look_first_where_this_package_is() -> None:
    assert Path(session.python_path().partition(os.pathsep)[0], "django_dbtaskqueue", "__init__.py").exists()


def fake_java(home: Path, release: str) -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").write_text('#!/bin/sh\necho "$0" "$@"\n')
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(release)
    return home


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    return tmp_path


def test_no_java_names_the_extra_and_an_old_java_is_passed_over(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match=r'pip install "django-dbtaskqueue\[spark\]"'):
        session.find_java(no_java)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(no_java / "old", 'JAVA_VERSION="1.8.0_392"\n')))
    with pytest.raises(PipelineError, match="JAVA_HOME is Java 8"):
        session.find_java(no_java)
    (no_java / "java").symlink_to(fake_java(no_java / "new", 'JAVA_VERSION="21.0.8"\n') / "bin" / "java")
    assert (session.find_java(no_java / "ours") / "real").resolve() == no_java / "new"


def test_spark_s_option_for_a_module_few_have_is_left_out(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_java(no_java / "a $HOME 'of' mine", 'JAVA_VERSION="17.0.1"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    ours = session.find_java(no_java / "ours")
    command = [ours / "bin" / "java", "-a b", "--add-modules=jdk.incubator.vector", "-c"]
    said = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True).stdout
    assert said == f"{home}/bin/java -a b -c\n"
    monkeypatch.setenv("JAVA_HOME", str(ours))  # as in a process that a session has started
    assert session.find_java(no_java / "ours") == ours


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark", "pandas", "pyarrow", "psycopg"):
        monkeypatch.setattr(session, "find_spec", lambda wanted, name=name: None if wanted == name else object())
        with pytest.raises(PipelineError, match=rf'needs {name}.*pip install "django-dbtaskqueue\[spark\]"'):
            session.spark_session()


@pytest.fixture
def home(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a Java, which may keep an archive of classes."""
    home = fake_java(no_java / "jdk", 'JAVA_VERSION="21"\n')
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.delenv("DBTASKQUEUE_NO_CLASS_DATA", raising=False)
    return home


def test_the_jvm_keeps_an_archive_of_its_classes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").touch()
    options = session.class_archive(session.find_java(tmp_path), tmp_path)
    assert options[:1] == ["-XX:+AutoCreateSharedArchive"]
    assert str(tmp_path / "classes-") in options[1] and ":" not in options[1].partition("=")[2]
    (home / "release").write_text('JAVA_VERSION="17.0.1"\n')  # it has to be told which: to write one, or to use it
    (written,) = session.class_archive(session.find_java(tmp_path), tmp_path)[:1]
    archive = Path(written.removeprefix("-XX:ArchiveClassesAtExit="))
    for content, option in ((bytes(8), "ArchiveClassesAtExit"), (b"whole", "SharedArchiveFile")):
        archive.write_bytes(content)
        assert session.class_archive(session.find_java(tmp_path), tmp_path)[0] == f"-XX:{option}={archive}"
    monkeypatch.setenv("DBTASKQUEUE_NO_CLASS_DATA", "1")
    (home / "release").write_text('JAVA_VERSION="21"\n')
    assert session.class_archive(session.find_java(tmp_path), tmp_path) == []


def test_a_java_that_cannot_make_its_base_archive_starts_without_one(home: Path, tmp_path: Path) -> None:
    ours = session.find_java(tmp_path)
    assert session.class_archive(ours, tmp_path) == [], "the base was not written"
    (home / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    assert session.class_archive(ours, tmp_path) == []


def test_files_go_where_the_settings_say_or_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBTASKQUEUE_DATA_ROOT", str(tmp_path / "root"))
    assert session.scratch() == tmp_path / "root" / "spark"
    monkeypatch.delenv("DBTASKQUEUE_DATA_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert session.scratch() == tmp_path / "cache" / "dbtaskqueue" / "spark"
    assert session.scratch().stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert session.scratch() == tmp_path / f"dbtaskqueue-spark-{os.getuid()}"


URLS = [
    ("postgresql://me:p%40ss@db.example:5433/tasks?sslmode=require", {"password": "p@ss"}),
    ("postgres://me@localhost/tasks", {}),
    ("postgresql:///tasks?host=/run/postgresql", {}),
    ("postgresql://me:secret@[::1]:5432/tasks", {"password": "secret"}),
    ("postgresql://me:key1@one,two:1,2/tasks?sslpassword=key2", {"password": "key1", "sslpassword": "key2"}),
    ("sqlite:////var/lib/tasks%20of%20mine.sqlite3", {}),
]


def test_an_address_without_its_secrets_is_still_the_address_and_another_form_is_refused() -> None:
    for url, secrets in URLS:
        database = Database.from_url(url)
        shown = Database.from_url(database.url_without_password)
        assert secrets.keys().isdisjoint(shown.conninfo) and {**shown.conninfo, **secrets} == database.conninfo
        assert pickle.loads(pickle.dumps(database)) == database  # noqa: S301 -- just pickled here
        assert not any(map(f"{database!r} {database} {database.url_without_password}".count, secrets.values()))
    for url in (
        "mysql://me:canary@host/tasks", "postgresql://me:canary@host/", "postgresql://me:canary@host:port/x",
        "sqlite://",
    ):  # fmt: skip
        with pytest.raises(PipelineError, match="not understood") as error:
            Database.from_url(url)
        assert "canary" not in str(error.value)


def test_a_database_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    nowhere = Database.from_url("postgresql://me:canary@127.0.0.1:1/tasks")
    for connect in (nowhere.connect, nowhere.connect_arrow):
        with pytest.raises(PipelineError, match=r"postgresql://me@127\.0\.0\.1:1/tasks cannot be used") as error:
            connect()
        assert "canary" not in str(error.value)
    with pytest.raises(PipelineError, match="cannot be used"):
        Database.from_url(f"sqlite:///{tmp_path}/none.sqlite3").connect()
    assert list(tmp_path.iterdir()) == []


def test_a_password_may_hold_any_character(pg: Database) -> None:
    user, password = f"odd_{os.getpid()}", "a' b\\c=\""
    with pg.open() as link:
        link.run(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(user), password).as_string(None))
        try:
            odd = replace(pg, conninfo={**pg.conninfo, "user": user, "password": password})
            for connect in (odd.connect, odd.connect_arrow):
                with closing(connect()) as connection, closing(connection.cursor()) as cursor:
                    assert cursor.execute("SELECT 1") is not False
        finally:
            link.run(sql.SQL("DROP ROLE {}").format(sql.Identifier(user)).as_string(None))


def test_a_process_that_plans_a_read_imports_little() -> None:
    """Spark starts two of them in each session. psycopg and the writer took a third of their time."""
    program = "import sys, django_dbtaskqueue.pipeline.source; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"psycopg", "asyncio", "pyarrow.compute", "django"} & {*done.stdout.split()}


def test_what_fails_inside_a_transaction_leaves_nothing(database: Database) -> None:
    with database.open() as link:
        with pytest.raises(ZeroDivisionError), link.transaction():
            link.run("INSERT INTO dbtaskqueue_queue (name) VALUES ('q')")
            1 / 0  # noqa: B018 -- it is to fail
        assert link.run("SELECT name FROM dbtaskqueue_queue") == []
