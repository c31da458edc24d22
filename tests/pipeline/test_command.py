"""``manage.py runtaskpipeline`` and ``python -m django_dbtaskqueue.pipeline``: words in, exit codes out; their jobs."""

import inspect
import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from django.core.management import CommandError, call_command
from py4j import java_gateway

from django_dbtaskqueue.core.exceptions import CheckFailed, JobOptionError, PipelineError
from django_dbtaskqueue.core.masking import MASKED
from django_dbtaskqueue.management.commands.runtaskpipeline import database_of_alias
from django_dbtaskqueue.models import ArchiveBatch, Queue, Task
from django_dbtaskqueue.pipeline import command_line, jobs, spark as terminal
from django_dbtaskqueue.pipeline.command_line import Face
from django_dbtaskqueue.pipeline.database import Database
from django_dbtaskqueue.pipeline.jobs import Argument, Context, Objective, by_queue, complete, job, objective
from django_dbtaskqueue.pipeline.lake import Lake
from django_dbtaskqueue.pipeline.spark import shown_on
from tests.conftest import ProcessDatabase
from tests.factories import make_task
from tests.pipeline.commands import CHEAP, in_turn
from tests.pipeline.lakes import Bucket
from tests.poller.processes import Started, manage
from tests.poller.test_logs import Terminal
from tests.support import PATIENCE, output_of, until


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
    code = command_line.perform(words, Face("run", (url,), command_line.database_of_url, out, err))
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
        (["echo", "--json", f"{__file__}/x"], "x' is not a file that can be written. Give another place"),
        (["echo", "--conf", "a"], "--conf: 'a' is not NAME=VALUE"),
        (["echo", "--conf", "a=1", "--conf", "a=2"], "--conf: one of a, a is given twice"),
        (["erase", "--reason", "x" * 501], "is not a reason of at most 500 characters"),
        (["check", "--threshold", "nan"], "'nan' is not a number above 0"),
        (["echo", "--database-url", "postgresql://me:sesame@db/x"], "can read a password in the process list"),
        (["report", "--since", "soon"], "--since: 'soon' is neither a time"),
    ):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert reason in err and "sesame" not in err


def test_help_list_and_explain_do_nothing_else() -> None:
    assert "Exit codes: 0 done" in run("--help")[1]
    assert "--text TEXT" in run("echo", "--help")[1]
    assert [line.split()[0] for line in run("list")[1].splitlines()] == list(jobs.JOBS)
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
    return output_of("runtaskpipeline", "explain", *words)


def test_the_database_is_django_s(database: Database) -> None:
    assert database_of_alias(None) == database


@pytest.mark.soak  # quick: the commands in this process (tests/docs); slow: some in their own, on a cluster
@pytest.mark.timeout(600)
def test_each_job_does_its_work(postgres_process_database: ProcessDatabase, tmp_path: Path, bucket: Bucket) -> None:
    root = bucket.lake
    orders, kept = tmp_path / "orders.jsonl", ("--checkpoint", tmp_path / "checkpoint")
    orders.write_text('{"reference": "a", "payload": "{}"}\n')
    Queue.objects.create(name="parcels")
    for number in range(3):
        times = {"create_time": -timedelta(days=8), "start_time": -timedelta(days=8)}
        make_task("COMPLETED", finish_time=-timedelta(days=7 - number), reference=f"r{number}", **times)
    with in_turn(postgres_process_database, *CHEAP) as run:
        assert run("check") == (0, "3 tasks checked\nno findings\n", "")
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
        bucket.flip(path)
        code, out, err = run("replay", "--lake", root)
        assert (code, "enqueued: 1\n" in out, f"{path} is damaged" in err) == (3, True, True)
        assert sorted(Task.objects.values_list("reference", "status")) == [("a", "CREATED"), ("r2", "CREATED")]
        code, out, err = run("report", "--lake", root, "--no-store", "--json", "-")
        assert (code, json.loads(out)["damaged_files"]) == (3, [err.splitlines()[1]])
        assert "Damaged files of the lake were left out: 1." in json.loads(out)["summary"]
        assert bucket.env["AWS_SECRET_ACCESS_KEY"] not in out + err
    assert ArchiveBatch.objects.get().lake == root


@pytest.fixture
def reporting(sqlite_process_database: ProcessDatabase) -> Iterator[Started]:
    make_task("COMPLETED")
    with manage(sqlite_process_database, "runtaskpipeline", "report", "--no-store", *CHEAP) as job:
        yield job


def interrupted(job: Started, started: Sequence[psutil.Process]) -> None:
    """See that the job has ended well, without a stack trace or a process that stays."""
    said = job.ended(130)
    assert psutil.wait_procs(started, timeout=PATIENCE)[1] == []
    assert said.splitlines()[-1].startswith("Interrupted. Finished work stays") and "Traceback" not in said, said


@pytest.mark.slow
def test_ctrl_c_ends_a_process_without_a_stack_trace(reporting: Started) -> None:
    reporting.until_logged("reading tasks")
    started = psutil.Process(reporting.process.pid).children(recursive=True)
    os.killpg(reporting.process.pid, signal.SIGINT)  # as a terminal does: to Spark's processes too
    interrupted(reporting, started)


@pytest.mark.slow
def test_sigterm_while_spark_starts_leaves_no_process(reporting: Started) -> None:
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


def test_an_interrupt_waits_for_what_must_not_be_cut_off_and_a_second_one_does_not(handler: Any) -> None:
    """Whatever handler the block sets, as PySpark does."""
    finished = []
    with pytest.raises(KeyboardInterrupt), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        finished.append("start")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert finished == ["start"] and signal.getsignal(signal.SIGINT) == handler
    with terminal.interrupts_delayed():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == handler
    with pytest.raises(KeyboardInterrupt), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("The second one was held as well.")
    assert signal.getsignal(signal.SIGINT) == handler
    finished = []
    with pytest.raises(KeyboardInterrupt), terminal.sigterm_interrupts(), terminal.interrupts_delayed():
        signal.raise_signal(signal.SIGTERM)
        finished.append("start")
    assert finished == ["start"] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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


def test_every_job_says_what_it_is() -> None:
    for name in jobs.JOBS:
        found = job(name)
        assert found.name == name
        assert found.summary and inspect.getdoc(type(found)), name
        assert all(one.help for one in found.arguments), name
        text = found.explain(found.context().options)
        assert text.startswith(f"{name}: {found.summary}")
        assert all(one.flag in text for one in found.arguments), name


VALUES: list[tuple[Callable[[str], Any], str, object]] = [
    (jobs.utc_moment, "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
    (jobs.utc_moment, "2026-01-31T08:00+01:00", datetime(2026, 1, 31, 7, tzinfo=UTC)),
    (jobs.day, "2026-01-31", date(2026, 1, 31)),
    (jobs.count, "12", 12),
    (jobs.share, "99.5%", pytest.approx(0.995)),
    (jobs.share, "0.5", 0.5),
    (jobs.pair, "a=b=c", ("a", "b=c")),
    (objective, "claims=99.9%/5m", Objective("claims", 0.999, timedelta(minutes=5))),
    (objective, "*=99%", Objective("*", 0.99)),
]
WRONG: list[tuple[Callable[[str], Any], str, str]] = [
    (jobs.utc_moment, "tomorrow", "is not a time. Write it as 2026-01-31"),
    (jobs.day, "31.1.", "is not a day. Write it as 2026-01-31"),
    (jobs.count, "0", "is not a whole number of at least 1"),
    (jobs.share, "120%", "is not a share"),
    (jobs.share, "much", "is not a share"),
    (jobs.pair, "a", "is not NAME=VALUE"),
    (objective, "99%", 'is not an objective. Write it as "claims=99.9%/5m"'),
]


def test_text_becomes_a_value_or_is_explained() -> None:
    assert [read(text) for read, text, _ in VALUES] == [value for _, _, value in VALUES]
    for read, text, reason in WRONG:
        with pytest.raises(ValueError, match=re.escape(reason)) as caught:
            read(text)
        assert text in str(caught.value)


def test_options_get_their_defaults_and_types() -> None:
    known = (
        Argument("rate", "", type=jobs.count, default=5),
        Argument("queue", "", many=True),
        Argument("mode", "", choices=("a", "b")),
        Argument("dry", "", type=bool, default=False),
    )
    assert complete(known, {"queue": "x"}) == {"rate": 5, "queue": ("x",), "mode": None, "dry": False}
    assert complete(known, {"queue": ["x", "y"], "rate": "7"})["rate"] == 7
    with pytest.raises(JobOptionError, match="--mode: 'c' is not one of a, b"):
        complete(known, {"mode": "c"})


def test_a_queue_s_own_objective_wins_over_everybody_s() -> None:
    found = by_queue([Objective("*", 0.5), Objective("claims", 0.9)])
    assert (found["claims"].share, found["*"].share, by_queue([])["*"].share) == (0.9, 0.5, 0.99)
    assert str(Objective("a", 0.999, timedelta(minutes=5))) == "99.9% within 5m"


def test_progress_off_a_terminal_is_a_line_for_each_tenth() -> None:
    stream = io.StringIO()
    with shown_on(stream) as progress:
        for done in range(101):
            progress("copying", done, 100)
        progress("counting", 0, 0)
        progress("counting", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["copying: 0 of 100", "copying: 10 of 100"]
    assert (len(lines), lines[-1]) == (12, "counting")


def test_progress_on_a_terminal_is_a_bar_that_goes_away() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with shown_on(stream) as progress:
        progress("copying", 5, 10)
    assert "copying" in stream.getvalue()
    quiet = Terminal()
    with shown_on(quiet, quiet=True) as progress:
        progress("copying", 5, 10)
    assert quiet.getvalue() == ""


def test_an_error_is_one_paragraph_and_tells_no_password() -> None:
    for secret in ("postgresql://me:sesame@db/x failed", "password=sesame user=me", "password='sesame street' user=me"):
        said = terminal.one_paragraph(psycopg.OperationalError(f"host=db {secret}"))
        assert "sesame" not in said and MASKED in said
        assert said.startswith("The database says: ")
    assert terminal.one_paragraph(PipelineError("Do this instead.")) == "Do this instead."
    assert terminal.one_paragraph(KeyError("a\n\tb")) == r"KeyError: 'a\n\tb'."
    assert terminal.one_paragraph(ValueError("first\n  second")) == "ValueError: first second."


def test_a_result_is_plain_json_in_a_file_that_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    value = {"when": datetime(2026, 1, 1, tzinfo=UTC), "long": timedelta(minutes=2), "no": float("nan"), 1: (1, "a")}
    expected = {"when": "2026-01-01T00:00:00+00:00", "long": 120.0, "no": None, "1": [1, "a"]}
    assert json.loads(jobs.result_json(value)) == expected
    jobs.write_whole(tmp_path / "new" / "a.json", "x")
    assert (tmp_path / "new" / "a.json").read_text() == "x"
    with pytest.raises(PipelineError, match="cannot be written"):
        jobs.write_whole(tmp_path / "new" / "a.json" / "b", "x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
