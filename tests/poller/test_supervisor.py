"""``--processes``: children die, hang, and lose their parent."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from django_dbtaskqueue import enqueue, enqueue_many
from django_dbtaskqueue.models import Attempt, Poller, Task
from django_dbtaskqueue.poller.process.shutdown import DRAIN, ShutdownRequest
from django_dbtaskqueue.poller.process.supervisor import Supervisor, exit_text
from tests.clock import SteppedClock
from tests.conftest import ProcessDatabase
from tests.factories import age
from tests.poller.processes import alive, lines, pids, runtaskpoller
from tests.support import until


def test_a_killed_child_is_replaced_and_a_signal_to_each_process_counts_once(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    with runtaskpoller(postgres_process_database, "--queue", "work", "--processes", "2") as poller:
        until(lambda: len(pids()) == 2)
        victim, other = pids()
        # When one is killed, then there is another one
        os.kill(victim, signal.SIGKILL)
        poller.until_logged(f"Child {victim} ended: killed by SIGKILL. Starting another one in 100ms")
        until(lambda: len(pids()) == 3)
        # When a service manager signals parent and children alike, then what runs may end
        task = enqueue("work", "running", {"do": "wait", "until": str(gate), "mark": str(mark)})
        until(lambda: lines(mark))
        for pid in {*pids()} - {victim}:
            os.kill(pid, signal.SIGTERM)
        poller.signal()
        poller.until_logged("Stopping: waiting")
        gate.touch()
        poller.ended()
    task.refresh_from_db()
    assert task.status == "COMPLETED"
    assert Poller.objects.filter(state="STOPPED").count() == 2
    assert not any(alive(pid) for pid in (*pids(), other))


def test_a_child_that_is_worn_out_is_replaced_without_a_gap(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    slow = enqueue("work", "slow", {"do": "wait", "until": str(gate), "mark": str(mark)})
    options = ("--processes", "1", "--recycle-after", "3", "--shutdown-timeout", "100ms")
    with runtaskpoller(postgres_process_database, "--queue", "work", *options) as poller:
        until(lambda: lines(mark) and pids())
        (old,) = pids()
        for number in range(3):
            enqueue("work", f"quick {number}")
        # Then another one polls, and the old one waits for its task, which may take longer than a shutdown
        until(lambda: Poller.objects.filter(pid=old, state="ENDING").exists())
        (new,) = set(pids()) - {old}
        after = enqueue("work", "after", {"mark": str(mark)})
        until(lambda: Task.objects.get(pk=after.pk).status == "COMPLETED")
        assert lines(mark)[-1][-1] == str(new) and alive(old)
        gate.touch()
        poller.until_logged(f"Child {old} was replaced: exit code 0")
        slow.refresh_from_db()
        assert (slow.status, slow.total_attempt) == ("COMPLETED", 1)
        poller.signal()
        poller.ended()
    assert not alive(new)


@pytest.mark.slow
def test_a_child_with_too_much_memory_is_replaced(sqlite_process_database: ProcessDatabase) -> None:
    options = ("--queue", "work", "--processes", "1", "--recycle-memory", "1")
    with runtaskpoller(sqlite_process_database, *options) as poller:
        until(lambda: pids())
        poller.until_logged(f"Child {pids()[0]} was replaced: exit code 0")
        poller.signal()
        poller.ended()


def test_children_drain_when_the_parent_is_killed(sqlite_process_database: ProcessDatabase, tmp_path: Path) -> None:
    mark, gate = tmp_path / "mark", tmp_path / "gate"
    task = enqueue("work", "running", {"do": "wait", "until": str(gate), "mark": str(mark)})
    with runtaskpoller(sqlite_process_database, "--queue", "work", "--processes", "1") as poller:
        until(lambda: lines(mark) and pids())
        (child,) = pids()
        poller.signal(signal.SIGKILL)
        poller.until_logged("The supervisor is gone: stopping")
        gate.touch()
        until(lambda: not alive(child))
    task.refresh_from_db()
    assert task.status == "COMPLETED"
    assert Poller.objects.get().state == "STOPPED"


@pytest.mark.slow
@pytest.mark.parametrize(("vendor", "how"), [("postgres", "kill"), ("postgres", "exit"), ("sqlite", "kill")])
def test_a_task_that_kills_its_process_ends_in_error_after_its_budget(
    request: pytest.FixtureRequest, tmp_path: Path, vendor: str, how: str
) -> None:
    # Given a killer among innocents
    process_database: ProcessDatabase = request.getfixturevalue(f"{vendor}_process_database")
    mark = tmp_path / "mark"
    killer = enqueue("work", "killer", {"do": how, "code": 3, "mark": str(mark)}, priority=-1)
    enqueue_many("work", [(f"good{n}", {}) for n in range(100)])
    # When a supervised poller drains the queue
    with runtaskpoller(process_database, "--queue", "work", "--processes", "1", "--threads", "1", "--drain") as poller:
        poller.until_logged("Starting another one")
        age(timedelta(minutes=1), pk=killer.pk)
        log = poller.ended()
    # Then the killer got exactly its attempts, each charged, and all others are done
    killer.refresh_from_db()
    assert (killer.status, killer.attempt, len(lines(mark))) == ("ERROR", 3, 3)
    # ... the first killed the poller's process, the others the one that is there for such tasks
    attempts = list(Attempt.objects.filter(task_id=killer.pk).order_by("attempt"))
    died = "django_dbtaskqueue.core.exceptions.ProcessDied"
    assert [(attempt.attempt, attempt.error_type) for attempt in attempts] == [(2, died), (3, died)]
    assert "The task ended its process" in attempts[-1].message
    assert "during attempt 3 of 3" in attempts[-1].message
    assert "ended its process" in (killer.process_result or "")
    assert log.count("Starting another one") == 1
    assert Task.objects.filter(status="COMPLETED", attempt=1).count() == 100


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


def run(supervised: Supervisor, clock: SteppedClock) -> int:
    """Run to the end. A child that has said that it lives says no more for hours."""

    def pass_time(_: object) -> None:
        if any(child.last_seen for child in supervised.children):
            clock.advance(SILENCE.total_seconds())

    return supervised.run(pass_time)


def first_time(then: str) -> str:
    """Do something at the first start only: of two children that start at once, one is the first."""
    create = "open(first, 'x').close()"
    return f"try:\n    {create}\nexcept FileExistsError:\n    pass\nelse:\n    {then}\n"


def test_a_stopped_child_is_killed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: SteppedClock
) -> None:
    stops = first_time(f"{HEARTBEAT_CODE}; os.kill(os.getpid(), signal.SIGSTOP)")
    assert run(supervisor(tmp_path, stops), clock) == 0
    assert "gave no sign of life" in caplog.text
    assert "killed by SIGKILL" in caplog.text


def test_a_child_that_crashes_is_replaced_until_it_ends_by_itself(tmp_path: Path) -> None:
    assert supervisor(tmp_path, first_time("sys.exit(5)")).run() == 0


def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    assert supervisor(tmp_path, "sys.exit(3)", count=2, endless=True).run() == 3


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSTOP)", "os._exit(7)"])
def test_what_a_child_started_ends_with_it(tmp_path: Path, end: str, clock: SteppedClock) -> None:
    """Given a child with a worker process of its own, when it hangs or crashes, then its worker is killed, too."""
    start = "worker = subprocess.Popen(['sleep', '1000']); open(first, 'w').write(str(worker.pid))"
    program = f"import subprocess\nif not os.path.exists(first):\n    {start}; {HEARTBEAT_CODE}; {end}\n"
    assert run(supervisor(tmp_path, program), clock) == 0
    worker = int((tmp_path / "first").read_text())
    until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


def test_an_exit_code_of_a_task_is_no_wrong_configuration(tmp_path: Path) -> None:
    """Given a child that polls, when a task calls ``os._exit(3)``, then another child starts."""
    polls = 'os.write(int(sys.argv[-1]), b\'{"state": "STARTUP"}\\n\')'
    assert supervisor(tmp_path, first_time(f"{polls}; os._exit(3)")).run() == 0


def test_the_worst_exit_code_wins_after_a_stop(tmp_path: Path) -> None:
    # Given two children, the first of which will fail when it is asked to stop
    asked = f"{HEARTBEAT_CODE}; socket.socket(fileno=int(sys.argv[-1])).recv(1)\n"
    pair = supervisor(tmp_path, first_time(f"{asked.strip()}; sys.exit(1)") + asked, count=2, endless=True)

    def stop_once_they_live(_: object) -> None:
        if all(child.last_seen for child in pair.children):
            pair.shutdown.request(DRAIN)

    # Then that is what the supervisor ends with
    assert pair.run(stop_once_they_live) == 1
    assert sorted(child.code or 0 for child in pair.children) == [0, 1]


def test_children_write_their_log_above_the_status_line(tmp_path: Path) -> None:
    above: list[str] = []
    assert supervisor(tmp_path, "sys.stderr.write('one\\ntwo\\n')", above=above.append).run() == 0
    assert above == ["one", "two"]
