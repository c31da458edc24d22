"""``manage.py runtaskpipeline`` and ``python -m django_dbtaskqueue.pipeline``: words in, exit codes out."""

import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.core.management import CommandError, call_command
from py4j import java_gateway

from django_dbtaskqueue.core.exceptions import CheckFailed, PipelineError
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import ArchiveBatch, Queue, Task
from django_dbtaskqueue.pipeline import jobs
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Face, perform
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.spark import terminal
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.pipeline.commands import CHEAP, in_turn
from tests.pipeline.lakes import Bucket, flip
from tests.poller.processes import Program, manage
from tests.support import PATIENCE, until


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
    out, err = io.StringIO(), io.StringIO()
    url = Argument("database_url", "the database", metavar="URL")
    code = perform(words, Face("run", (url,), jobs.database_of_url, out, err))
    return code, out.getvalue(), err.getvalue()


def test_a_result_is_lines_or_json(tmp_path: Path) -> None:
    said = run("echo", "--text", "a", "--dry-run", "--lake", "l")
    assert said == (0, "text: a\ndry run: yes\nlake: l\n", "echoing\n")
    code, out, _ = run("echo", "--json", "-", "--quiet")
    assert (code, json.loads(out)) == (0, {"text": "hello", "dry_run": False, "lake": None})
    run("echo", "--json", str(tmp_path / "result.json"))
    assert json.loads((tmp_path / "result.json").read_text())["text"] == "hello"


def test_each_end_has_its_exit_code_and_one_paragraph() -> None:
    ends = {"failed": (1, "It failed. Try again."), "broken": (1, "ZeroDivisionError: by zero.")}
    ends |= {"found": (3, "One fault."), "interrupted": (130, "Interrupted."), "cut off": (130, "Interrupted.")}
    for end, (code, said) in ends.items():
        found, out, err = run("echo", "--end", end)
        assert (found, said in err, "Traceback" in err) == (code, True, False), end
        assert ("text: hello" in out) == (end == "found")


def test_wrong_words_are_explained() -> None:
    for words, reason in (
        (["echoo"], "there is no such job. Did you mean 'echo'"),
        (["echo", "--txt", "a"], "unrecognized arguments: --txt a. run echo --help shows the options"),
        (["echo", "--text"], "expected one argument"),
        (["explain"], "which job?"),
        (["echo", "--conf", "a"], "--conf: 'a' is not NAME=VALUE"),
        (["echo", "--database-url", "postgresql://me:sesame@db/x"], "can read a password in the process list"),
        (["report", "--since", "soon"], "--since: 'soon' is neither a time"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert reason in err and "sesame" not in err


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
    found = jobs.database_of_url(None)
    assert found is not None and found.conninfo["dbname"] == "shop"
    monkeypatch.delenv("DATABASE_URL")
    assert jobs.database_of_url(None) is None
    with pytest.raises(PipelineError, match="is not understood"):
        jobs.database_of_url("mysql://db/x")


# -- manage.py ---------------------------------------------------------------------------------------------------------


def test_the_command_knows_the_project_s_database_queues_and_objectives(pg: Database, settings: Any) -> None:
    settings.DBTASKQUEUE = {
        "QUEUES": {"claims": {"max_attempts": 3, "priority": 4}, "parcels": {"model": "testapp.Parcel"}},
        "OBJECTIVES": {"claims": "50%/1h"},
        "PAYLOAD_MAX_BYTES": 2000,
    }
    Queue.objects.create(name="mails")
    assert "--objective 50% within 1h" in explained("report")
    assert "--objective 99% within 5s" in explained("report", "--objective", "*=99%/5s")
    text = explained("enqueue", "--queue", "claims")
    assert "--max-attempts 3" in text and "--priority 4" in text
    assert {"claims", "mails"} <= set(re.findall(r"\w+", text.split("--known-queue ")[1]))
    assert "--payload-max-bytes 2,000" in text and "--payload-max-bytes 2,000" in explained("replay")
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


@pytest.mark.soak  # quick: the commands in this process (tests/docs); slow: some in their own, on a cluster
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_each_job_does_its_work(
    postgres_process_database: ProcessDatabase, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket | None = request.getfixturevalue("bucket") if where == "bucket" else None
    root = bucket.lake if bucket else str(tmp_path / "lake")
    orders, kept = tmp_path / "orders.jsonl", ("--checkpoint", tmp_path / "checkpoint")
    orders.write_text('{"reference": "a", "payload": "{}"}\n')
    Queue.objects.create(name="parcels")
    for number in range(3):
        times = {"create_time": -timedelta(days=8), "start_time": -timedelta(days=8)}
        make_task("COMPLETED", finish_time=-timedelta(days=7 - number), reference=f"r{number}", **times)
    with in_turn(postgres_process_database, *CHEAP) as run:
        assert run("check") == (0, "3 tasks checked\nno findings\n", "")
        if bucket:
            code, _out, err = run("stream", "--once", "--lake", root)
            assert (code, "--checkpoint: a lake in an object store needs a local folder" in err) == (2, True)
        code, out, err = run("stream", "--once", "--lake", root, *kept)
        assert (code, "rows: 3\n" in out, err) == (0, True, "")
        code, out, err = run("archive", "--lake", root)
        assert (code, "tasks: 3\n" in out, err) == (0, True, "")
        answers = {"forecast --since 30d": "to keep 95 % of the waits", "whatif --slots 2": "would have waited"}
        for words, said in answers.items():
            code, out, err = run(*words.split(), "--lake", root, "--no-store")
            assert (code, said in out, err) == (0, True, ""), out
        found = ["--input", orders, "--queue", "claims", "--format", "json", "--map", "reference=reference"]
        assert "enqueued: 1\n" in run("enqueue", *found)[1]
        assert "lake: tasks: 1 -> 0\n" in run("erase", "--reference", "r0", "--lake", root)[1]

        lake = Lake.at(root)
        path = lake.path(lake.files("tasks")[0])
        if bucket:
            bucket.flip(path)
        else:
            flip(Path(path), Path(path).stat().st_size // 2)
        code, out, err = run("replay", "--lake", root)
        assert (code, "enqueued: 1\n" in out, f"{path} is damaged" in err) == (3, True, True)
        assert sorted(Task.objects.values_list("reference", "status")) == [("a", "CREATED"), ("r2", "CREATED")]
        code, out, err = run("report", "--lake", root, "--no-store", "--json", "-")
        assert (code, json.loads(out)["damaged_files"]) == (3, [err.splitlines()[1]])
        assert "Damaged files of the lake were left out: 1." in json.loads(out)["summary"]
        assert not bucket or bucket.env["AWS_SECRET_ACCESS_KEY"] not in out + err
    assert ArchiveBatch.objects.get().lake == root


@pytest.fixture
def reporting(sqlite_process_database: ProcessDatabase) -> Iterator[Program]:
    """A process that makes a report of one task."""
    make_task("COMPLETED")
    with manage(sqlite_process_database, "runtaskpipeline", "report", "--no-store", *CHEAP) as job:
        yield job


def interrupted(job: Program, started: Sequence[psutil.Process]) -> None:
    """See that the job has ended well, without a stack trace or a process that stays."""
    said = job.ended(130)
    assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    assert said.splitlines()[-1].startswith("Interrupted. Finished work stays") and "Traceback" not in said, said


@pytest.mark.slow
def test_ctrl_c_ends_a_process_without_a_stack_trace(reporting: Program) -> None:
    reporting.until_logged("reading tasks")
    started = psutil.Process(reporting.process.pid).children(recursive=True)
    os.killpg(reporting.process.pid, signal.SIGINT)  # as a terminal does: to Spark's processes too
    interrupted(reporting, started)


@pytest.mark.slow
def test_sigterm_while_spark_starts_leaves_no_process(reporting: Program) -> None:
    def children() -> list[psutil.Process]:
        return psutil.Process(reporting.process.pid).children(recursive=True)

    until(lambda: any("org.apache.spark.deploy.SparkSubmit" in command_of(child) for child in children()))
    started = children()
    reporting.signal()  # as a service manager does that only knows this process
    interrupted(reporting, started)


def command_of(process: psutil.Process) -> str:
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


def test_ctrl_c_waits_for_what_must_not_be_cut_off_and_a_second_one_does_not(handler: Any) -> None:
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
    with pytest.raises(KeyboardInterrupt), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("The second one was held as well.")
    assert signal.getsignal(signal.SIGINT) == handler


def test_sigterm_interrupts_and_waits_as_ctrl_c_does() -> None:
    finished = []
    with pytest.raises(KeyboardInterrupt), terminal.sigterm_interrupts(), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGTERM)
        finished.append("start")
    assert finished == ["start"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_only_the_main_thread_is_held() -> None:
    def run() -> threading.Thread:
        with terminal.interrupts_delayed():
            return threading.current_thread()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(run).result() is not threading.main_thread()


def test_what_py4j_raises_it_does_not_log_too(caplog: pytest.LogCaptureFixture) -> None:
    line = logging.LogRecord("root", logging.ERROR, java_gateway.__file__, 1, "Exception while sending.", (), None)
    with terminal.py4j_silenced():
        logging.getLogger().handle(line)
        logging.getLogger("py4j.clientserver").error("Exception while closing.")
        logging.getLogger().error("Ours.")
    assert caplog.messages == ["Ours."]
    logging.getLogger().handle(line)
    assert caplog.messages == ["Ours.", "Exception while sending."]
