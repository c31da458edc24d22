"""``Type=notify``: a service manager's socket hears from a real poller how it is, and nothing from one that stands."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.process.probe_port import PollerProbes
from django_dbtaskqueue.poller.process.service_manager import ServiceManager
from django_dbtaskqueue.poller.process.status_lines import Snapshot
from tests.conftest import ProcessDatabase
from tests.poller.processes import runtaskpoller, stuck_poller
from tests.poller.test_probe_port import ask, ports, status
from tests.support import PATIENCE, until


class Manager:
    """The socket of a service manager, and what it heard."""

    def __init__(self, address: str, watchdog_s: float) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(watchdog_s * 1_000_000))}
        self.heard: list[str] = []

    def hear(self) -> str:
        """Wait for the next message, and return it."""
        self.heard.append(self.socket.recv(4096).decode())
        return self.heard[-1]

    def until(self, line: str) -> str:
        """Wait for a message with this line."""
        while line not in self.hear().splitlines():
            pass
        return self.heard[-1]

    def silent(self, seconds: float = 0) -> bool:
        """Whether nothing waits to be heard, nor comes within the time."""
        self.socket.settimeout(seconds)
        try:
            self.hear()
        except (BlockingIOError, TimeoutError):
            return True
        finally:
            self.socket.settimeout(PATIENCE)
        return False


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"), PATIENCE)
    with found.socket:
        yield found


@pytest.mark.parametrize("options", [(), pytest.param(("--processes", "2"), marks=pytest.mark.slow)], ids=len)
def test_a_poller_says_that_it_polls_works_and_stops(
    options: tuple[str, ...], postgres_process_database: ProcessDatabase, manager: Manager, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    database = replace(postgres_process_database, extra=manager.environment)
    with runtaskpoller(database, "--queue", "work", *options) as poller:
        ready = manager.until("READY=1")
        assert "WATCHDOG=1" in ready and "STATUS=RUNNING: 0 of " in ready
        assert not any("STOPPING" in one for one in manager.heard)
        enqueue("work", "held", {"do": "wait", "until": str(go)})
        until(lambda: Task.objects.filter(status="PROCESSING").exists())
        poller.signal()
        assert "READY=1" not in manager.until("STOPPING=1")
        assert poller.process.poll() is None, "it drains: the task still runs"
        go.touch()
        poller.ended()
    assert manager.silent()


def test_a_poller_without_its_database_is_not_ready_and_yet_works(manager: Manager) -> None:
    away = ProcessDatabase("postgresql", "postgres://nobody@127.0.0.1:1/none", extra=manager.environment)
    with runtaskpoller(away, "--queue", "work", "--metrics-port", "0") as poller:
        (port,) = ports(poller)
        poller.until_logged("Polling failed")
        manager.until("WATCHDOG=1")
        assert [status(port, probe) for probe in ("startup", "ready", "live")] == [503, 503, 200]
        assert ask(port, "/metrics")[0] == 200
        poller.signal()
        manager.until("STOPPING=1")
        assert not any("READY=1" in one for one in manager.heard)


@pytest.mark.slow
def test_a_processor_that_holds_the_interpreter_keeps_the_watchdog_silent(
    postgres_process_database: ProcessDatabase, manager: Manager, tmp_path: Path
) -> None:
    database = replace(postgres_process_database, extra=manager.environment | {"WATCHDOG_USEC": "300000"})
    program = tmp_path / "program"
    with runtaskpoller(database, "--queue", "work") as poller:
        manager.until("WATCHDOG=1")
        enqueue("work", "held", {"do": "hold", "program": str(program), "end": str(tmp_path / "end")})
        until(lambda: program.exists() and program.read_text())  # it holds the interpreter soon, not yet for sure
        until(lambda: manager.silent(0.6))  # twice the watchdog's time
        poller.signal(signal.SIGKILL)
    os.kill(int(program.read_text()), signal.SIGKILL)


@pytest.mark.django_db(transaction=True)
def test_a_poller_whose_thread_stands_still_sends_no_watchdog(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (manager.environment | {"WATCHDOG_USEC": "200000"}).items():
        monkeypatch.setenv(name, value)
    ours = ServiceManager()
    with stuck_poller() as stuck:
        probes = PollerProbes(stuck.poller, stuck.heartbeat)

        def said() -> str:
            ours.tell(probes, Snapshot.of(stuck.poller), stopping=False)
            return "" if manager.silent() else manager.heard[-1]

        stuck.start()
        until(lambda: "Threads are busy for longer than 200ms: fetch 0" in said())
        assert "WATCHDOG" not in manager.heard[-1]
        stuck.go.set()
        until(lambda: "WATCHDOG=1" in said())


@pytest.mark.django_db(transaction=True)
def test_the_watchdog_of_another_process_gets_nothing(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (manager.environment | {"WATCHDOG_PID": "1"}).items():
        monkeypatch.setenv(name, value)
    poller = Poller({"work": 1})
    ServiceManager().tell(PollerProbes(poller, Heartbeat(poller)), Snapshot.of(poller), stopping=False)
    assert manager.hear().startswith("STATUS=INIT: 0 of ")
    poller.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_an_abstract_socket_and_the_environment_of_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager = Manager(f"@{tmp_path}", 1)
    with manager.socket:
        for name, value in manager.environment.items():
            monkeypatch.setenv(name, value)
        ServiceManager().stopped()
        assert manager.hear() == "STOPPING=1"
        assert not ServiceManager().present, "the programs that a processor starts must not speak for the poller"
