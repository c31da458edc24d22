"""``manage.py runtaskpipeline`` and ``python -m django_dbtaskqueue.pipeline``: words in, exit codes out."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from django.core.management import CommandError, call_command
from py4j import java_gateway

from django_dbtaskqueue.core.exceptions import CheckFailed, PipelineError
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import ArchiveBatch, Queue, Task
from django_dbtaskqueue.pipeline import command_line, jobs
from django_dbtaskqueue.pipeline.command_line import Face, perform
from django_dbtaskqueue.pipeline.jobs import Argument
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.spark import terminal
from tests.conftest import REPOSITORY
from tests.factories import make_task
from tests.patience import PATIENCE
from tests.pipeline.lakes import MEANWHILE, Bucket, flip
from tests.support import until

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_django.fixtures import SettingsWrapper

    from django_dbtaskqueue.pipeline.database import Database
    from django_dbtaskqueue.pipeline.jobs import Context
    from tests.conftest import ProcessDatabase


class Echo(jobs.Job):
    """Returns its options, or ends as it is told."""

    name = "echo"
    summary = "says what it hears"
    arguments = (Argument("text", "what to say", default="hello"), Argument("end", "how to end"))

    def run(self, context: Context) -> Mapping[str, Any]:
        context.progress("echoing", 0, 0)
        found = {"text": context.options["text"], "dry_run": context.dry_run, "lake": context.lake}
        match context.options["end"]:
            case "interrupted":
                raise KeyboardInterrupt
            case "failed":
                raise PipelineError("It failed. Try again.")
            case "cut off":
                try:
                    raise KeyboardInterrupt
                finally:
                    raise PipelineError("The connection broke.")  # as a rollback does that finds no connection any more
            case "broken":
                raise ZeroDivisionError("by\nzero")
            case "found":
                raise CheckFailed("One fault.", found)
        return found


@pytest.fixture(autouse=True)
def _echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(jobs.JOBS, "echo", "echo:Echo")
    monkeypatch.setitem(sys.modules, "django_dbtaskqueue.pipeline.echo", sys.modules[__name__])


def run(*words: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command line."""
    out, err = io.StringIO(), io.StringIO()
    url = Argument("database_url", "the database", metavar="URL")
    code = perform(words, Face("run", (url,), command_line.database_of_url, out, err))
    return code, out.getvalue(), err.getvalue()


def test_a_result_is_lines_or_json(tmp_path: Path) -> None:
    assert run("echo", "--text", "a", "--dry-run", "--lake", "l") == (
        0,
        "text: a\ndry run: yes\nlake: l\n",
        "echoing\n",
    )
    code, out, _ = run("echo", "--json", "-", "--quiet")
    assert (code, json.loads(out)) == (0, {"text": "hello", "dry_run": False, "lake": None})
    run("echo", "--json", str(tmp_path / "result.json"))
    assert json.loads((tmp_path / "result.json").read_text())["text"] == "hello"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("failed", 1, "It failed. Try again."),
        ("broken", 1, "ZeroDivisionError: by zero."),
        ("found", 3, "One fault."),
        ("interrupted", 130, "Interrupted."),
        ("cut off", 130, "Interrupted."),
    ],
)
def test_each_end_has_its_exit_code_and_one_paragraph(end: str, code: int, said: str) -> None:
    found, out, err = run("echo", "--end", end)
    assert found == code
    assert said in err and "Traceback" not in err
    assert ("text: hello" in out) == (end == "found")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["echoo"], "there is no such job. Did you mean 'echo'"),
        (["echo", "--txt", "a"], "unrecognized arguments: --txt a. run echo --help shows the options"),
        (["echo", "--text"], "expected one argument"),
        (["explain"], "which job?"),
        (["echo", "--conf", "a"], "--conf: 'a' is not NAME=VALUE"),
        (["echo", "--database-url", "postgresql://me:sesame@db/x"], "can read a password in the process list"),
        (["report", "--since", "soon"], "--since: 'soon' is neither a time"),
    ],
)
def test_wrong_words_are_explained(words: list[str], said: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert said in err and "sesame" not in err


def test_help_list_and_explain_do_nothing_else() -> None:
    assert "Exit codes: 0 done" in run("--help")[1]
    assert "--text TEXT" in run("echo", "--help")[1]
    listed = run("list")[1].splitlines()
    assert [line.split()[0] for line in listed] == list(jobs.JOBS)
    code, out, _ = run("explain", "echo", "--text", "b")
    assert code == 0
    assert "Returns its options" in out and "--text b" in out
    assert run("echo", "--explain", "--text", "b")[1] == out


def test_the_database_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:sesame@db/shop")
    found = command_line.database_of_url(None)
    assert found is not None and found.conninfo["dbname"] == "shop"
    monkeypatch.delenv("DATABASE_URL")
    assert command_line.database_of_url(None) is None
    with pytest.raises(PipelineError, match="is not understood"):
        command_line.database_of_url("mysql://db/x")


# -- manage.py ---------------------------------------------------------------------------------------------------------


def test_the_command_knows_the_project_s_database_queues_and_objectives(
    pg: Database, settings: SettingsWrapper
) -> None:
    settings.DBTASKQUEUE = {
        "QUEUES": {"claims": {"max_attempts": 3, "priority": 4}, "parcels": {"model": "testapp.Parcel"}},
        "OBJECTIVES": {"claims": "50%/1h"},
    }
    Queue.objects.create(name="mails")
    assert "--objective 50% within 1h" in explained("report")
    assert "--objective 99% within 5s" in explained("report", "--objective", "*=99%/5s")
    text = explained("enqueue", "--queue", "claims")
    assert "--max-attempts 3" in text and "--priority 4" in text
    assert {"claims", "mails"} <= set(re.findall(r"\w+", text.split("--known-queue ")[1]))
    with pytest.raises(CommandError, match=r"unknown queue 'claim'\. Did you mean 'claims'") as caught:
        call_command("runtaskpipeline", "enqueue", "--queue", "claim", "--input", "nowhere")
    assert caught.value.returncode == 2
    with pytest.raises(CommandError, match="the tasks of queue 'parcels' are in another table: give --task-table test"):
        call_command("runtaskpipeline", "enqueue", "--queue", "parcels", "--input", "nowhere")
    assert "--queue parcels" in explained("enqueue", "--queue", "parcels", "--task-table", "testapp.parcel")
    with pytest.raises(CommandError, match="'replica' is not in DATABASES"):
        call_command("runtaskpipeline", "report", "--database", "replica")


def explained(*words: str) -> str:
    out = io.StringIO()
    call_command("runtaskpipeline", "explain", *words, stdout=out)
    return out.getvalue()


def test_the_database_is_django_s(database: Database) -> None:
    assert database_of_alias(None) == database


CHEAP = (  # of Spark's start
    *("--master", "local[1]"),
    *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
    *("--conf", "spark.sql.shuffle.partitions=1"),
)


def as_typed(database: ProcessDatabase, *words: object) -> tuple[int, str, str]:
    """Run a job as its command does, in a process of its own; return exit code, output and errors."""
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpipeline", *map(str, words), *CHEAP, "--quiet"]
    done = subprocess.run(command, env=database.env, cwd=REPOSITORY, text=True, capture_output=True, timeout=200)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.soak  # nine starts of Spark; the blocks of the pages in docs/ run each job, too
@pytest.mark.timeout(600)
def test_each_job_runs_in_a_process_of_its_own(sqlite_process_database: ProcessDatabase, tmp_path: Path) -> None:
    database, lake, orders = sqlite_process_database, tmp_path / "lake", tmp_path / "orders.jsonl"
    orders.write_text('{"reference": "a", "payload": "{}"}\n')
    for number in range(3):
        times = {"create_time": -timedelta(days=8), "start_time": -timedelta(days=8)}
        make_task("COMPLETED", finish_time=-timedelta(days=7 - number), reference=f"r{number}", **times)

    assert as_typed(database, "check")[:2] == (0, "3 tasks checked\nno findings\n")
    assert "tasks: 3\n" in as_typed(database, "archive", "--lake", lake)[1]
    assert as_typed(database, "check", "--lake", lake)[:2] == (0, "3 tasks checked\nno findings\n")
    for job, words in {"report": [], "forecast": ["--since", "30d"], "whatif": ["--slots", 2]}.items():
        code, _out, err = as_typed(database, job, "--lake", lake, "--no-store", *words)
        assert (code, err) == (0, ""), job
    found = ["--input", orders, "--queue", "claims", "--format", "json", "--map", "reference=reference"]
    assert "enqueued: 1\n" in as_typed(database, "enqueue", *found)[1]

    path = next(lake.glob("tasks/*/*.parquet"))
    flip(path, path.stat().st_size // 2)
    code, out, err = as_typed(database, "replay", "--lake", lake)
    assert (code, "enqueued: 2\n" in out) == (3, True)
    assert f"{path} is damaged" in err
    code, out, err = as_typed(database, "report", "--lake", lake, "--no-store", "--json", "-")
    assert (code, json.loads(out)["damaged_files"]) == (3, [err.splitlines()[1]])
    assert "Damaged files of the lake were left out: 1." in json.loads(out)["summary"]


@pytest.mark.slow
def test_stream_runs_in_a_process_of_its_own(postgres_process_database: ProcessDatabase, tmp_path: Path) -> None:
    assert as_typed(postgres_process_database, "stream", "--once", "--lake", tmp_path)[0] == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_jobs_keep_a_lake_in_an_object_store(
    postgres_process_database: ProcessDatabase, bucket: Bucket, tmp_path: Path
) -> None:
    database, options = postgres_process_database, ("--lake", bucket.lake)
    for day in (2, 3):
        make_task("COMPLETED", finish_time=-timedelta(days=day), **MEANWHILE)
    code, _out, err = as_typed(database, "stream", "--once", *options)
    assert (code, "--checkpoint: a lake in an object store needs a local folder" in err) == (2, True)
    code, out, err = as_typed(database, "stream", "--once", *options, "--checkpoint", tmp_path)
    assert (code, "rows: 2\n" in out, err) == (0, True, "")
    assert "tasks: 2\n" in as_typed(database, "archive", *options)[1]
    assert as_typed(database, "check", *options)[:2] == (0, "2 tasks checked\nno findings\n")
    for job, words in {"report": [], "forecast": ["--since", "30d"], "whatif": ["--slots", 2]}.items():
        code, _out, err = as_typed(database, job, *options, "--no-store", *words)
        assert (code, err) == (0, ""), job
    code, out, err = as_typed(database, "replay", *options)
    assert (code, "enqueued: 2\n" in out, err) == (0, True, "")
    assert Task.objects.filter(status="CREATED").count() == 2
    lake = Lake.at(bucket.lake)
    path = lake.path(lake.files("tasks")[0])
    bucket.flip(path)
    code, out, err = as_typed(database, "report", *options, "--no-store", "--json", "-")
    assert (code, json.loads(out)["damaged_files"]) == (3, [err.splitlines()[1]])
    assert f"{path} is damaged" in err
    assert bucket.env["AWS_SECRET_ACCESS_KEY"] not in out + err
    assert ArchiveBatch.objects.get().lake == bucket.lake


@pytest.mark.slow
def test_ctrl_c_ends_a_process_without_a_stack_trace(sqlite_process_database: ProcessDatabase) -> None:
    make_task("COMPLETED")
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpipeline", "report", "--no-store", *CHEAP]
    process = subprocess.Popen(
        command, env=sqlite_process_database.env, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    killer = threading.Timer(200, process.kill)
    killer.start()
    assert process.stderr is not None
    said = []
    for line in process.stderr:  # to its end: no process that Spark has started may stay
        said.append(line)
        if line.startswith("reading tasks"):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to Spark's processes too
    killer.cancel()
    process.communicate()
    assert process.returncode == 130, "".join(said)
    assert said[-1].startswith("Interrupted. Finished work stays"), "".join(said)
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
def test_sigterm_while_spark_starts_leaves_no_process(sqlite_process_database: ProcessDatabase) -> None:
    def starts() -> bool:
        children = psutil.Process(process.pid).children(recursive=True)
        return any("org.apache.spark.deploy.SparkSubmit" in command_of(child) for child in children)

    command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpipeline", "report", "--no-store", *CHEAP]
    process = subprocess.Popen(
        command, env=sqlite_process_database.env, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        until(starts)
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()  # as a service manager does that only knows this process
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in errors) == (130, False), errors
        assert "Interrupted. Finished work stays" in errors
        assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process, or nothing if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.fixture
def handler() -> Iterator[Any]:
    """Python's own, also where the tests run in the background of a shell, which ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_what_must_not_be_cut_off(handler: Any) -> None:
    """Whatever handler the block sets, as PySpark does."""
    finished = []
    with pytest.raises(KeyboardInterrupt), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        finished.append("start")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert finished == ["start"]
    assert signal.getsignal(signal.SIGINT) == handler
    with terminal.interrupts_delayed():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == handler


def test_sigterm_interrupts_and_waits_as_ctrl_c_does() -> None:
    finished = []
    with pytest.raises(KeyboardInterrupt), terminal.sigterm_interrupts(), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGTERM)
        finished.append("start")
    assert finished == ["start"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_ctrl_c_does_not_wait(handler: Any) -> None:
    with pytest.raises(KeyboardInterrupt), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("The second one was held as well.")
    assert signal.getsignal(signal.SIGINT) == handler


def test_only_the_main_thread_is_held() -> None:
    def run() -> None:
        with terminal.interrupts_delayed():
            done.append(threading.current_thread())

    done: list[threading.Thread] = []
    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert done == [other]


def test_what_py4j_raises_it_does_not_log_too(caplog: pytest.LogCaptureFixture) -> None:
    line = logging.LogRecord("root", logging.ERROR, java_gateway.__file__, 1, "Exception while sending.", (), None)
    with terminal.py4j_silenced():
        logging.getLogger().handle(line)
        logging.getLogger("py4j.clientserver").error("Exception while closing.")
        logging.getLogger().error("Ours.")
    assert caplog.messages == ["Ours."]
    logging.getLogger().handle(line)
    assert caplog.messages == ["Ours.", "Exception while sending."]
