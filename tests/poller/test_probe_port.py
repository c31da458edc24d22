"""How a poller's process is: a service manager's socket hears it, probes and Prometheus ask for it over HTTP."""

import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from select import select

import pytest
from django.core.management import CommandError, call_command
from prometheus_client.parser import text_string_to_metric_families as parsed

from django_dbtaskqueue import enqueue, signals
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller import probe_port
from django_dbtaskqueue.poller.heartbeat import Heartbeat
from django_dbtaskqueue.poller.lifetime import PollerSnapshot
from django_dbtaskqueue.poller.loop import Poller
from django_dbtaskqueue.poller.probe_port import POLLER_METRICS, PROCESS_METRICS, Address, PollerProbes, served
from tests.conftest import ProcessDatabase
from tests.docs.pages import free_port
from tests.forks import Program
from tests.operations.test_prometheus import scraped
from tests.poller.processes import Gate, running, runtaskpoller
from tests.processing.named import listening
from tests.support import PATIENCE, until

PORT = re.compile(r"Probes and metrics: http://127\.0\.0\.1:(\d+)/metrics")


def ask(port: int, where: str, method: str = "GET") -> tuple[int, str]:
    caller = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    caller.request(method, where)
    answer = caller.getresponse()
    text = answer.read().decode()
    caller.close()
    return answer.status, text


def status(port: int, probe: str) -> int:
    return ask(port, f"/healthz/{probe}")[0]


def ports(poller: Program, number: int = 1) -> list[int]:
    until(lambda: len(PORT.findall(poller.log)) >= number or poller.code is not None)
    return [int(found) for found in PORT.findall(poller.log)]


class Manager:
    """The socket of a service manager, and what it heard."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(PATIENCE)
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(PATIENCE * 1_000_000))}
        self.heard: list[str] = []

    def hear(self) -> str:
        self.heard.append(self.socket.recv(4096).decode())
        return self.heard[-1]

    def until(self, line: str) -> str:
        while line not in self.hear().splitlines():
            pass
        return self.heard[-1]

    def silent(self) -> bool:
        """Whether nothing waits to be heard. What does is heard."""
        waits, *_ = select([self.socket], [], [], 0)
        return not (waits and self.hear())

    def of_this_process(self, monkeypatch: pytest.MonkeyPatch, **environment: str) -> probe_port.ServiceManager:
        for name, value in (self.environment | environment).items():
            monkeypatch.setenv(name, value)
        return probe_port.ServiceManager()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify"))
    with found.socket:
        yield found


def test_it_is_ready_while_it_polls(postgres_process_database: ProcessDatabase, manager: Manager, gate: Gate) -> None:
    database = replace(postgres_process_database, extra=manager.environment)
    with runtaskpoller(database, "--queue", "work,other", "--metrics-port", "0") as poller:
        ready = manager.until("READY=1")
        assert "WATCHDOG=1" in ready and "STATUS=RUNNING: 0 of " in ready
        assert not any("STOPPING" in one for one in manager.heard)
        (port,) = ports(poller)
        until(lambda: status(port, "ready") == 200)
        assert status(port, "startup") == status(port, "live") == 200
        assert ask(port, "/healthz/live", "HEAD") == (200, "")
        assert {ask(port, f"/healthz/live?within={wrong}")[0] for wrong in ("soon", "nan", "-1")} == {400}
        assert ask(port, "/admin")[0] == 404
        enqueue("work", "one", {"do": "ok"})
        enqueue("other", "two", {"do": "fail", "retry": False})
        until(lambda: Task.objects.filter(status__in=["COMPLETED", "ERROR"]).count() == 2)
        enqueue("work", "held", gate.payload)
        gate.until_started()

        def counted() -> dict[tuple[str, ...], float]:
            return scraped(ask(port, "/metrics")[1])

        until(lambda: counted()[("dbtaskqueue_poller_finished_total",)] == 2)
        found = counted()
        assert found["dbtaskqueue_poller_attempts_total", "work", "completed"] == 1
        assert found["dbtaskqueue_poller_attempts_total", "other", "failed"] == 1
        assert found["dbtaskqueue_poller_run_seconds_count", "work"] == 1
        assert found["dbtaskqueue_poller_wait_seconds_bucket", "work", "+Inf"] == 1
        until(lambda: counted()[("dbtaskqueue_poller_running_tasks",)] == 1)
        text = ask(port, "/metrics")[1]
        assert "process_cpu_seconds_total" in text  # the library's own, with the project's
        families = {family.name: family.type for family in parsed(text)}
        assert {one.name.removesuffix("_total"): one.type for one in POLLER_METRICS}.items() <= families.items()
        poller.signal()
        assert "READY=1" not in manager.until("STOPPING=1")
        until(lambda: status(port, "ready") == 503)
        assert "ENDING" in ask(port, "/healthz/ready")[1]
        assert status(port, "live") == 200, "it drains: the task still runs"
        gate.open()
        poller.ended()
    assert manager.silent()


def test_a_supervisor_answers_for_its_children(postgres_process_database: ProcessDatabase, manager: Manager) -> None:
    options = "--queue", "work", "--metrics-port", "0", "--processes", "2"
    with runtaskpoller(replace(postgres_process_database, extra=manager.environment), *options) as poller:
        assert "WATCHDOG=1" in manager.until("READY=1")
        supervisor, *children = ports(poller, 3)
        until(lambda: {status(supervisor, probe) for probe in ("startup", "ready", "live")} == {200})
        assert {one.name for one in PROCESS_METRICS}.issubset(re.findall(r"\w+", ask(supervisor, "/metrics")[1]))
        assert all("dbtaskqueue_poller_leases" in ask(child, "/metrics")[1] for child in children)
        poller.signal()
        manager.until("STOPPING=1")
        poller.ended()


class Sticky(signals.Listener):
    """Keeps the fetching thread, as a bug in a project's listener would."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def poller_idle(self, poller: signals.RunningPoller) -> None:
        self.entered.set()
        self.go.wait(PATIENCE)


@pytest.mark.django_db(transaction=True)
def test_a_poller_whose_thread_is_stuck_does_not_live(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, listener = manager.of_this_process(monkeypatch, WATCHDOG_USEC="200000"), Sticky()
    here, poller = Address("127.0.0.1", free_port()), Poller({"work": 1})

    def said() -> str:
        ours.tell(probes, PollerSnapshot.of(poller), stopping=False)
        return "" if manager.silent() else manager.heard[-1]

    with listening(listener), running(poller) as heartbeat, served(here, probes := PollerProbes(poller, heartbeat)):
        assert listener.entered.wait(PATIENCE)
        assert status(here.port, "live") == 200  # for up to five minutes it may be a slow database
        until(lambda: "fetch 0" in ask(here.port, "/healthz/live?within=0.2")[1])
        assert status(here.port, "live?within=0.2") == 503
        until(lambda: "Threads are busy for longer than 200ms: fetch 0" in said())
        assert "WATCHDOG" not in manager.heard[-1]
        listener.go.set()
        until(lambda: status(here.port, "ready") == 200)
        until(lambda: "WATCHDOG=1" in said())


def test_a_port_in_use_is_a_wrong_configuration(sqlite_process_database: ProcessDatabase) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CommandError, match=f"--metrics-port 127.0.0.1:{port} cannot be opened") as refused:
            call_command("runtaskpoller", f"--metrics-port={port}", queue=["work"])
    assert refused.value.returncode == 3


def test_what_an_address_says() -> None:
    assert probe_port.address("9187") == ("127.0.0.1", 9187)
    assert probe_port.address("10.0.0.5:9187") == ("10.0.0.5", 9187)
    assert probe_port.address("[::1]:9187") == ("::1", 9187)
    for text in ("", "web", "1.2.3.4", "70000", "-1", "host:"):
        with pytest.raises(ValueError):
            probe_port.address(text)


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


@pytest.mark.django_db(transaction=True)
def test_the_watchdog_of_another_process_gets_nothing(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    poller, ours = Poller({"work": 1}), manager.of_this_process(monkeypatch, WATCHDOG_PID="1")
    ours.tell(PollerProbes(poller, Heartbeat(poller)), PollerSnapshot.of(poller), stopping=False)
    assert manager.hear().startswith("STATUS=INIT: 0 of ")
    poller.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_an_abstract_socket_and_the_environment_of_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manager = Manager(f"@{tmp_path}")
    with manager.socket:
        manager.of_this_process(monkeypatch).stopped()
        assert manager.hear() == "STOPPING=1"
        assert not probe_port.ServiceManager().present, "what a processor starts must not speak for the poller"
