"""``--reload``: a changed file is in force with the next task, and what runs ends first."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Poller, Task
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.poller.processes import lines, runtaskpoller
from tests.support import until

SETTINGS = """
from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "shop"]
"""
TASKS = """
from pathlib import Path
from threading import Event

from django_dbtaskqueue import processor

VERSION = %s


@processor("shop")
def process(task):
    if task.payload:
        with Path(task.payload["mark"]).open("a") as mark:
            print(task.id, file=mark)
        while not Path(task.payload["until"]).exists():
            Event().wait(0.01)
    return VERSION
"""


def write(file: Path, version: object) -> None:
    """Write the module anew, at another second than before: times of files may be coarse."""
    before = file.stat().st_mtime if file.exists() else 0.0
    file.write_text(TASKS % version)
    os.utime(file, (before + 2, before + 2) if before else None)


@dataclass
class Shop:
    """A project with an app ``shop`` whose processor returns the version of its file."""

    database: ProcessDatabase
    tasks: Path

    def write_until(self, version: object, condition: Callable[[], Any]) -> None:
        """Save the file until the process, which may just have begun to watch it, has noticed."""

        def noticed() -> Any:
            write(self.tasks, version)
            return condition()

        until(noticed)

    def until_result(self, expected: int) -> None:
        task = enqueue("shop")
        until(lambda: Task.objects.get(pk=task.pk).result == expected)


@pytest.fixture
def shop(sqlite_process_database: ProcessDatabase, tmp_path: Path, settings: Any) -> Shop:
    settings.DBTASKQUEUE = {"QUEUES": {"shop": {}}}
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "site_settings.py").write_text(SETTINGS)
    path = f"{REPOSITORY}{os.pathsep}{tmp_path}"
    more = {"DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    made = Shop(replace(sqlite_process_database, extra=more), tmp_path / "shop" / "tasks.py")
    write(made.tasks, 1)
    return made


def test_a_changed_file_restarts_the_poller_after_what_runs(shop: Shop, tmp_path: Path) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    with runtaskpoller(shop.database, "--queue", "shop", "--reload") as poller:
        running = enqueue("shop", payload={"mark": str(mark), "until": str(gate)})
        until(lambda: lines(mark))
        shop.write_until(2, lambda: Poller.objects.filter(state="ENDING").exists())
        gate.touch()
        shop.until_result(2)
        running.refresh_from_db()
        assert (running.result, running.total_attempt) == (1, 1)
        # And a file with a fault is waited for
        shop.write_until("=", lambda: "It is started again when a file changes" in poller.log)
        write(shop.tasks, 3)
        shop.until_result(3)
        poller.signal()
        poller.ended()
    assert set(Poller.objects.values_list("state", flat=True)) == {"STOPPED"}
