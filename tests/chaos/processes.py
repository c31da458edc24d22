"""``runtaskpoller`` as a process of its own, and what tests want to know of it and of its database."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.db import connections
from django.db.models import Count
from django.db.utils import Error

from django_dbtaskqueue import models
from django_dbtaskqueue.models import Task
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.patience import DEFAULT_S
from tests.support import PATIENCE, Audit, eventually, until


class PollerProcess:
    """One ``runtaskpoller`` of both queues, with its log in a file."""

    def __init__(self, database: ProcessDatabase, log: Path, options: Sequence[str], *, die: str | None = None) -> None:
        """``die``: the point of ``tests.chaos.crashing`` where it kills itself."""
        env = {**database.env, "DJANGO_SETTINGS_MODULE": "tests.chaos.settings"}
        if die is not None:
            env["CHAOS_KILL"] = die
        self.log_file = log
        self.command = ["runtaskpoller", "--queue", "chaos,ledger", *options]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / "manage.py"), *self.command],
                env=env,
                cwd=REPOSITORY,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def facts(self) -> psutil.Process:
        """Return the process as psutil sees it."""
        return psutil.Process(self.pid)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its children, stopped ones too; nothing when it has ended."""
        if self.code is None:
            family = [*self.facts().children(recursive=True), self.facts()]
            for member in reversed(family):
                member.kill()
            self._process.wait(PATIENCE)

    def end(self) -> None:
        """Ask it to drain, and see that it ends well."""
        self.signal(signal.SIGTERM)
        self.ended()

    def ended(self, code: int = 0, *, timeout: float = DEFAULT_S) -> None:
        """Wait for the end with this exit code."""

        def over() -> None:
            assert self.code is not None, f"{self.command} still runs"

        eventually(over, timeout=timeout)
        assert self.code == code, self.log[-4000:]

    def until_logged(self, text: str, *, times: int = 1) -> None:
        """Wait until the log holds ``text``."""

        def logged() -> None:
            assert self.log.count(text) >= times, f"{text!r} is not in the log:\n{self.log[-4000:]}"

        eventually(logged)

    def ready(self, *, state: str = "RUNNING") -> PollerProcess:
        """Wait until it reports that it polls."""

        def reports() -> None:
            if self.code is not None:
                pytest.fail(f"it ended with {self.code}:\n{self.log[-4000:]}")
            assert models.Poller.objects.filter(pid=self.pid, state=state).exists()

        eventually(reports)
        return self


def clock() -> float:
    """Return the database's time in seconds."""
    return float(_ask(f"SELECT {_seconds('now')}")[0][0])


def starts(task_ids: Any = None) -> dict[int, list[float]]:
    """Return when each task was checked out, by the audit, in seconds."""
    found: dict[int, list[float]] = {}
    for task_id, when in _ask(
        f"SELECT task_id, {_seconds('clock')} FROM test_audit WHERE new_total > old_total ORDER BY seq"
    ):
        if task_ids is None or task_id in task_ids:
            found.setdefault(task_id, []).append(float(when))
    return found


def _seconds(what: str) -> str:
    if connections["default"].vendor == "postgresql":
        return f"extract(epoch FROM {'clock_timestamp()' if what == 'now' else what})"
    moment = "'now'" if what == "now" else what
    return f"(julianday({moment}) - 2440587.5) * 86400.0"


def _ask(sql: str) -> list[Any]:
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)
        return list(cursor.fetchall())


def audit() -> Audit:
    """Watch every change of status from now on."""
    watched = Audit()
    watched.install()
    return watched


def statuses(**selection: Any) -> dict[str, int]:
    """Return how many tasks have each status; the connection may have to be made anew."""
    counted = Task.objects.filter(**selection).values_list("status").annotate(Count("pk")).order_by()
    try:
        return dict(counted)
    except Error as error:
        connections["default"].close()
        raise AssertionError(f"the database did not answer: {error}") from error


def until_all(status: str, *, timeout: float = 60.0, **selection: Any) -> None:
    """Wait until every task has this status."""

    def all_of_them() -> None:
        found = statuses(**selection)
        assert set(found) == {status}, found

    eventually(all_of_them, timeout=timeout)


def until_dead(process: PollerProcess) -> None:
    """Wait until it was killed by SIGKILL."""
    until(lambda: process.code is not None)
    assert process.code == -signal.SIGKILL, process.log[-4000:]
