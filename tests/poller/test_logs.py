"""What a process shows: log lines, one per event and harmless, and a status line, which they pass whole."""

import io
import json
import logging
import logging.config
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from django_dbtaskqueue.poller import lifetime, logs
from django_dbtaskqueue.poller.lifetime import PollerSnapshot, StatusLine
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.poller.processes import Gate

HOSTILE = "one\r\n12:00:00 INFO forged\x1b[2J\u2028end"


def record(message: str = HOSTILE, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("django_dbtaskqueue", logging.WARNING, __file__, 1, "said: %s", (message,), None)
    made.__dict__.update(extra)
    return made


def failed() -> logging.LogRecord:
    made = record("no")
    made.exc_info = (ValueError, ValueError(HOSTILE), None)
    return made


def test_each_format_is_one_line_whatever_the_message_holds() -> None:
    line = logs.TextFormatter().format(record())
    assert line[8:] == " WARNING said: one\\r\\n12:00:00 INFO forged\\x1b[2J\\u2028end"
    assert len(line.splitlines()) == 1
    first, *rest = logs.TextFormatter().format(failed()).splitlines()
    assert first.endswith("said: no")
    assert rest and all(line.startswith("    ") and "\x1b" not in line for line in rest)
    line = logs.LogfmtFormatter().format(record(task_id=7, reference='a "b"', run_seconds=0.5, trace_id=None))
    assert len(line.splitlines()) == 1
    assert ' level=WARNING logger=django_dbtaskqueue message="said: one\\r\\n' in line
    assert line.endswith(' task_id=7 reference="a \\"b\\"" run_seconds=0.5')
    line = logs.JsonFormatter().format(record(task_id=7, queue="q", reference="r\n", attempt=2))
    assert len(line.splitlines()) == 1
    facts = json.loads(line)
    assert facts.pop("time").endswith("+00:00")
    said = {"level": "WARNING", "logger": "django_dbtaskqueue", "message": f"said: {HOSTILE}"}
    assert facts == {**said, "task_id": 7, "queue": "q", "reference": "r\n", "attempt": 2}
    assert "ValueError" in json.loads(logs.JsonFormatter().format(failed()))["exception"]


@contextmanager
def without_handlers() -> Iterator[None]:
    """As in a process that configured no logging: pytest's own handlers step aside."""
    root = logging.getLogger()
    kept, level, root.handlers = root.handlers, root.level, []
    try:
        yield
    finally:
        root.handlers = kept
        root.setLevel(level)


@pytest.mark.parametrize("verbosity", [0, 1, 2])
def test_verbosity_and_the_way_back(verbosity: int) -> None:
    said, ours, levels = io.StringIO(), logging.getLogger("django_dbtaskqueue"), ("debug", "info", "warning")
    before = ours.level
    with without_handlers(), logs.configured("text", verbosity, said):
        for level in levels:
            getattr(ours, level)(level)
        assert len(logging.getLogger().handlers) == 1
    assert [line.split()[-1] for line in said.getvalue().splitlines()] == [*levels[2 - verbosity :]]
    assert ours.level == before
    assert not any(isinstance(handler.formatter, logs.TextFormatter) for handler in logging.getLogger().handlers)


def test_the_projects_own_logging_wins() -> None:
    said = io.StringIO()
    with logs.configured("text", 1, said):  # pytest has handlers on the root
        logging.getLogger("django_dbtaskqueue").warning("for the project")
    assert said.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_queues_slots_counts_rate_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    times, stream = iter([100.0, 101.0, 102.0, 103.0, 104.0, 105.0]), Terminal()
    monkeypatch.setattr(lifetime.clock, "monotonic", lambda: next(times))
    monkeypatch.setenv("COLUMNS", "120")
    line = StatusLine(stream, ["work", "other"])
    line.draw(PollerSnapshot("RUNNING", 1, 8, 10, 2))
    line.draw(PollerSnapshot("WAITING", 3, 8, 70, 2))
    assert "work, other | 1/8 running | 10 done | 2 failed | 0/s | working" in stream.getvalue()
    assert "work, other | 3/8 running | 70 done | 2 failed | 20/s | waiting for the database" in stream.getvalue()


def test_several_pollers_are_added_up_and_the_worst_state_shows() -> None:
    parts = [PollerSnapshot("RUNNING", 1, 4, 10, 1), PollerSnapshot("WAITING", 2, 4, 5, 0), PollerSnapshot(finished=7)]
    assert PollerSnapshot.total(parts) == PollerSnapshot("WAITING", 3, 8, 22, 1)
    assert PollerSnapshot(**asdict(parts[0])) == parts[0]


def test_log_lines_stand_whole_above_it() -> None:
    stream = Terminal()
    line = StatusLine(stream, ["work"])
    line.draw(PollerSnapshot("RUNNING"))
    line.write("from a child process")
    handler = logging.StreamHandler(line)
    handler.emit(logging.LogRecord("ours", logging.INFO, __file__, 1, "from this process", (), None))
    line.close()
    line.write("at the end")
    shown = stream.getvalue().split(lifetime.CLEAR_LINE)
    assert [part.partition("\n")[0] for part in shown] == [
        "", "work | 0/0 running | 0 done | 0 failed | 0/s | idle", "from a child process", "from this process", "",
        "at the end",
    ]  # fmt: skip
    assert all("work | 0/0 running" in part for part in shown[1:4]) and shown[-1] == "at the end\n"


@pytest.mark.parametrize("options", [{}, {"log_format": "json"}, {"verbosity": 0}, {"child": 1}])
def test_only_people_get_it(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    given = {"log_format": "text", "verbosity": 1, "child": None, **options}
    with without_handlers(), Command()._logging({"work": 1}, given) as status:
        assert bool(status) is not bool(options)


def test_a_terminal_gets_it(sqlite_process_database: ProcessDatabase, gate: Gate) -> None:
    enqueue("work", "seen", gate.payload)
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runtaskpoller", "--queue", "work", "--drain"]
    ours, theirs = pty.openpty()
    env = {**sqlite_process_database.env, "COLUMNS": "150"}
    with subprocess.Popen(command, env=env, cwd=REPOSITORY, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # how a terminal says that the other side is gone
            while part := os.read(ours, 65_536):
                seen += part
                if b"| 1/4 running | 0 done | 0 failed |" in seen:
                    gate.open()  # or the process does not end
    os.close(ours)
    assert process.returncode == 0
