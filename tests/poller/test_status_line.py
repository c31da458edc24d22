"""The status line: what it says, and that log lines pass it whole."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.management.commands.runtaskpoller import Command
from django_dbtaskqueue.poller.process import status_lines
from django_dbtaskqueue.poller.process.status_lines import Snapshot, StatusLine
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.poller.test_logs import without_handlers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_says_queues_slots_counts_rate_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 101.0, 102.0, 103.0, 104.0, 105.0])
    monkeypatch.setattr(status_lines.clock, "monotonic", lambda: next(times))
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    line = StatusLine(stream, ["work", "other"])
    line.draw(Snapshot("RUNNING", 1, 8, 10, 2))
    line.draw(Snapshot("WAITING", 3, 8, 70, 2))
    assert "work, other | 1/8 running | 10 done | 2 failed | 0/s | working" in stream.getvalue()
    assert "work, other | 3/8 running | 70 done | 2 failed | 20/s | waiting for the database" in stream.getvalue()


def test_several_pollers_are_added_up_and_the_worst_state_shows() -> None:
    parts = [Snapshot("RUNNING", 1, 4, 10, 1), Snapshot("WAITING", 2, 4, 5, 0), Snapshot(finished=7)]
    assert Snapshot.total(parts) == Snapshot("WAITING", 3, 8, 22, 1)
    assert Snapshot(**asdict(parts[0])) == parts[0]


def test_log_lines_stand_whole_above_it() -> None:
    stream = Terminal()
    line = StatusLine(stream, ["work"])
    line.draw(Snapshot("RUNNING"))
    line.above("from a child process")
    handler = logging.StreamHandler(line)
    handler.emit(logging.LogRecord("ours", logging.INFO, __file__, 1, "from this process", (), None))
    line.close()
    line.above("at the end")
    shown = stream.getvalue().split(status_lines.CLEAR_LINE)
    assert [part.partition("\n")[0] for part in shown] == [
        "", "work | 0/0 running | 0 done | 0 failed | 0/s | idle", "from a child process", "from this process", "",
        "at the end",
    ]  # fmt: skip
    assert all("work | 0/0 running" in part for part in shown[1:4])
    assert shown[-1] == "at the end\n"


@pytest.mark.parametrize(
    ("options", "drawn"),
    [({}, True), ({"log_format": "json"}, False), ({"verbosity": 0}, False), ({"child": 1}, False)],
)
def test_only_people_get_it(options: dict[str, Any], drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    given = {"log_format": "text", "verbosity": 1, "child": None, **options}
    with without_handlers(), Command()._logging({"work": 1}, given) as status:
        assert bool(status) is drawn


def test_a_terminal_gets_it(sqlite_process_database: ProcessDatabase, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    enqueue("work", "seen", {"do": "wait", "until": str(gate)})
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
                    gate.touch()
    os.close(ours)
    assert (process.returncode, gate.exists()) == (0, True)
