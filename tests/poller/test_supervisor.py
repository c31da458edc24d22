"""``--processes``: children die, hang, and lose their parent. ``--reload``: a changed file restarts the poller."""

import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Poller, Task
from django_dbtaskqueue.poller.executors.process import exit_text
from django_dbtaskqueue.poller.lifetime import DRAIN, ShutdownRequest
from django_dbtaskqueue.poller.supervisor import Supervisor
from tests.clock import SteppedClock
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.poller.processes import Gate, Start, alive, manage, pids, status_of
from tests.support import until


def test_a_killed_child_is_replaced_and_a_signal_to_each_process_counts_once(start: Start, gate: Gate) -> None:
    with start("--queue", "work", "--processes", "1") as poller:
        until(pids)
        (victim,) = pids()
        os.kill(victim, signal.SIGKILL)
        poller.until_logged(f"Child {victim} ended: killed by SIGKILL. Starting another one in 100ms")
        until(lambda: len(pids()) == 2)
        _, heir = pids()
        # When a service manager signals parent and children alike, then what runs may end
        task = enqueue("work", "running", gate.payload)
        gate.until_started()
        os.kill(heir, signal.SIGTERM)
        poller.signal()
        poller.until_logged("Stopping: waiting")
        gate.open()
        poller.ended()
    assert status_of(task) == "COMPLETED"
    assert Poller.objects.get(state="STOPPED").pid == heir and not alive(heir)


def test_a_child_that_is_worn_out_is_replaced_without_a_gap(start: Start, gate: Gate, tmp_path: Path) -> None:
    slow = enqueue("work", "slow", gate.payload)
    options = ("--processes", "1", "--recycle-after", "3", "--shutdown-timeout", "100ms")
    with start("--queue", "work", *options) as poller:
        until(lambda: gate.starts() and pids())
        (old,) = pids()
        enqueue_many("work", [{}] * 3)
        until(Poller.objects.filter(pid=old, state="ENDING").exists)
        (new,) = set(pids()) - {old}
        mark = tmp_path / "mark"
        after = enqueue("work", "after", {"mark": str(mark)})
        until(lambda: status_of(after) == "COMPLETED")
        assert mark.read_text().split()[-1] == str(new) and alive(old)
        gate.open()
        poller.until_logged(f"Child {old} was replaced: exit code 0")
        slow.refresh_from_db()
        assert (slow.status, slow.total_attempt) == ("COMPLETED", 1)
        poller.stop()
    assert not alive(new)


@pytest.mark.slow
def test_a_child_with_too_much_memory_is_replaced(start_on_sqlite: Start) -> None:
    with start_on_sqlite("--queue", "work", "--processes", "1", "--recycle-memory", "1") as poller:
        until(pids)
        poller.until_logged(f"Child {pids()[0]} was replaced: exit code 0")
        poller.stop()


def test_children_drain_when_the_parent_is_killed(start_on_sqlite: Start, gate: Gate) -> None:
    task = enqueue("work", "running", gate.payload)
    with start_on_sqlite("--queue", "work", "--processes", "1") as poller:
        until(lambda: gate.starts() and pids())
        (child,) = pids()
        poller.signal(signal.SIGKILL)
        poller.until_logged("The supervisor is gone: stopping")
        gate.open()
        until(lambda: not alive(child))
    assert (status_of(task), Poller.objects.get().state) == ("COMPLETED", "STOPPED")


def test_exit_codes_in_words() -> None:
    assert [exit_text(code) for code in (7, -9, -77)] == ["exit code 7", "killed by SIGKILL", "killed by signal 77"]


# -- the supervisor alone, over small programs -----------------------------------------------------------------------
HEARTBEAT_CODE = 'os.write(int(sys.argv[-1]), b"{}\\n")'
SILENCE = timedelta(hours=1)


def supervisor(tmp_path: Path, program: str, *, count: int = 1, **options: Any) -> Supervisor:
    script = tmp_path / "child.py"
    script.write_text(f"import os, signal, socket, sys\nfirst = {str(tmp_path / 'first')!r}\n{program}")
    given: dict[str, Any] = {"endless": False, "heartbeat": SILENCE, "timeout": SILENCE, **options}
    return Supervisor([sys.executable, str(script)], count, ShutdownRequest(), **given)


def says(state: str) -> str:
    return f"""os.write(int(sys.argv[-1]), b'{{"state": "{state}"}}\\n')"""


def first_time(then: str) -> str:
    """Do something at the first start only: of two children that start at once, one is the first."""
    return f"try:\n    open(first, 'x').close()\nexcept FileExistsError:\n    pass\nelse:\n    {then}\n"


def test_a_stopping_child_may_take_long(tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: SteppedClock) -> None:
    program = f"{says('STOPPED')}; socket.socket(fileno=int(sys.argv[-1])).recv(1)"
    supervised = supervisor(tmp_path, program, heartbeat=timedelta(seconds=1))

    def let_pass(_: object) -> None:
        if supervised.children[0].last_seen is not None and not clock.monotonic() > 600:
            clock.advance(601)
        elif clock.monotonic() > 600:
            supervised.shutdown.request(DRAIN)

    assert supervised.run(let_pass) == 0
    assert "Killing it" not in caplog.text


@pytest.mark.parametrize("end", ["sys.exit(5)", f"{says('STARTUP')}; os._exit(3)"], ids=["crash", "of a task"])
def test_a_child_that_crashes_is_replaced_until_it_ends_by_itself(tmp_path: Path, end: str) -> None:
    """Once it polls, 3 is the exit code of a task that called ``os._exit``, and no wrong configuration."""
    assert supervisor(tmp_path, first_time(end)).run() == 0


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    assert supervisor(tmp_path, "sys.exit(3)", count=2, endless=True).run() == 3


STOPS = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("end", [STOPS, "os._exit(7)"])
def test_a_child_that_stops_is_replaced_with_what_it_started(tmp_path: Path, end: str, clock: Any, caplog: Any) -> None:
    start = "worker = subprocess.Popen(['sleep', '1000']); open(first, 'w').write(str(worker.pid))"
    program = f"import subprocess\nif not os.path.exists(first):\n    {start}; {HEARTBEAT_CODE}; {end}\n"
    supervised = supervisor(tmp_path, program)

    def pass_time(_: object) -> None:  # a child that has said that it lives says no more for hours
        if any(child.last_seen for child in supervised.children):
            clock.advance(SILENCE.total_seconds())

    assert supervised.run(pass_time) == 0
    assert end != STOPS or ("gave no sign of life" in caplog.text and "killed by SIGKILL" in caplog.text)
    until(lambda: not alive(int((tmp_path / "first").read_text())))


def test_the_worst_exit_code_wins_after_a_stop(tmp_path: Path) -> None:
    asked = f"{HEARTBEAT_CODE}; socket.socket(fileno=int(sys.argv[-1])).recv(1)\n"
    pair = supervisor(tmp_path, first_time(f"{asked.strip()}; sys.exit(1)") + asked, count=2, endless=True)

    def stop_once_they_live(_: object) -> None:
        if all(child.last_seen for child in pair.children):
            pair.shutdown.request(DRAIN)

    assert pair.run(stop_once_they_live) == 1
    assert sorted(child.code or 0 for child in pair.children) == [0, 1]


def test_children_write_their_log_above_the_status_line(tmp_path: Path) -> None:
    above: list[str] = []
    assert supervisor(tmp_path, "sys.stderr.write('one\\ntwo\\n')", above=above.append).run() == 0
    assert above == ["one", "two"]


SETTINGS = 'from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, "shop"]'
TASKS = """
from django_dbtaskqueue import processor
from tests.testapp import tasks

processor("shop")(lambda task: tasks.run(task) and %s)
"""


def write(file: Path, version: object) -> None:
    """Write the module anew, at another second than before: times of files may be coarse."""
    before = file.stat().st_mtime if file.exists() else 0.0
    file.write_text(TASKS % version)
    os.utime(file, (before + 2, before + 2) if before else None)


def until_result(expected: int) -> None:
    task = enqueue("shop")
    until(lambda: Task.objects.get(pk=task.pk).result == expected)


def test_a_changed_file_restarts_the_poller_after_what_runs(
    sqlite_process_database: ProcessDatabase, tmp_path: Path, gate: Gate, settings: Any
) -> None:
    settings.DBTASKQUEUE = {"QUEUES": {"shop": {}}}
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "site_settings.py").write_text(SETTINGS)
    path = f"{REPOSITORY}{os.pathsep}{tmp_path}"
    more = {"DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    write(file := tmp_path / "shop" / "tasks.py", 1)
    database = replace(sqlite_process_database, extra=more)
    with manage(database, "runtaskpoller", "--queue", "shop", "--reload") as poller:
        running = enqueue("shop", payload=gate.payload)
        gate.until_started()
        ending = Poller.objects.filter(state="ENDING")
        until(lambda: write(file, 2) or ending.exists())  # the process may just have begun to watch it
        gate.open()
        until_result(2)
        running.refresh_from_db()
        assert (running.result, running.total_attempt) == (1, 1)
        until(lambda: write(file, "=") or "It is started again when a file changes" in poller.log)
        write(file, 3)
        until_result(3)
        poller.stop()
    assert set(Poller.objects.values_list("state", flat=True)) == {"STOPPED"}
