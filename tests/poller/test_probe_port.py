"""``--metrics-port``: a service manager's probes and Prometheus ask a real poller over HTTP."""

from __future__ import annotations

import re
import socket
from http.client import HTTPConnection
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from prometheus_client.parser import text_string_to_metric_families as parsed

from django_dbtaskqueue import enqueue
from django_dbtaskqueue.metrics.exposition import POLLER_METRICS, PROCESS_METRICS
from django_dbtaskqueue.models import Task
from django_dbtaskqueue.poller.process.probe_port import Address, PollerProbes, address, served
from tests.conftest import ProcessDatabase
from tests.docs.pages import free_port
from tests.operations.test_prometheus import scraped
from tests.poller.processes import PollerProcess, runtaskpoller, stuck_poller
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


def ports(poller: PollerProcess, number: int = 1) -> list[int]:
    until(lambda: len(PORT.findall(poller.log)) >= number or poller.process.poll() is not None)
    return [int(found) for found in PORT.findall(poller.log)]


def test_a_poller_is_ready_once_it_polls_and_not_when_it_drains(
    postgres_process_database: ProcessDatabase, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with runtaskpoller(postgres_process_database, "--queue", "work,other", "--metrics-port", "0") as poller:
        (port,) = ports(poller)
        until(lambda: status(port, "ready") == 200)
        assert status(port, "startup") == status(port, "live") == 200
        assert ask(port, "/healthz/live", "HEAD") == (200, "")
        for wrong in ("soon", "nan", "-1"):
            assert ask(port, f"/healthz/live?within={wrong}")[0] == 400
        assert ask(port, "/admin")[0] == 404
        enqueue("work", "one", {"do": "ok"})
        enqueue("other", "two", {"do": "fail", "retry": False})
        until(lambda: Task.objects.filter(status__in=["COMPLETED", "ERROR"]).count() == 2)
        enqueue("work", "held", {"do": "wait", "until": str(go)})
        until(lambda: Task.objects.filter(status="PROCESSING").exists())
        found: dict[tuple[str, ...], float] = {}

        def counted() -> bool:
            found.update(scraped(ask(port, "/metrics")[1]))
            return found[("dbtaskqueue_poller_finished_total",)] == 2

        until(counted)
        assert found["dbtaskqueue_poller_attempts_total", "work", "completed"] == 1
        assert found["dbtaskqueue_poller_attempts_total", "other", "failed"] == 1
        assert found["dbtaskqueue_poller_run_seconds_count", "work"] == 1
        assert found["dbtaskqueue_poller_wait_seconds_bucket", "work", "+Inf"] == 1
        until(lambda: scraped(ask(port, "/metrics")[1])[("dbtaskqueue_poller_running_tasks",)] == 1)
        text = ask(port, "/metrics")[1]
        assert "process_cpu_seconds_total" in text  # the library's own, with the project's
        families = {family.name: family.type for family in parsed(text)}
        assert {one.name.removesuffix("_total"): one.type for one in POLLER_METRICS}.items() <= families.items()
        poller.signal()
        until(lambda: status(port, "ready") == 503)
        assert "ENDING" in ask(port, "/healthz/ready")[1]
        assert status(port, "live") == 200
        go.touch()
        poller.ended()


def test_a_supervisor_answers_for_its_children(postgres_process_database: ProcessDatabase) -> None:
    options = "--queue", "work", "--metrics-port", "0", "--processes", "2"
    with runtaskpoller(postgres_process_database, *options) as poller:
        supervisor, *children = ports(poller, 3)
        for probe in ("startup", "ready", "live"):
            until(lambda probe=probe: status(supervisor, probe) == 200)  # type: ignore[misc]
        text = ask(supervisor, "/metrics")[1]
        assert {one.name for one in PROCESS_METRICS if one.name not in text} == set()
        assert all("dbtaskqueue_poller_leases" in ask(child, "/metrics")[1] for child in children)
        poller.signal()
        poller.ended()


@pytest.mark.django_db(transaction=True)
def test_a_poller_whose_thread_is_stuck_does_not_live() -> None:
    here = Address("127.0.0.1", free_port())
    with stuck_poller() as stuck, served(here, PollerProbes(stuck.poller, stuck.heartbeat)):
        assert status(here.port, "startup") == 503
        stuck.start()
        assert status(here.port, "live") == 200  # for up to five minutes it may be a slow database
        until(lambda: ask(here.port, "/healthz/live?within=0.2")[0] == 503)
        assert "fetch 0" in ask(here.port, "/healthz/live?within=0.2")[1]
        stuck.go.set()
        until(lambda: status(here.port, "ready") == 200)
    assert not Task.objects.exists()


def test_a_port_in_use_is_a_wrong_configuration(sqlite_process_database: ProcessDatabase) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CommandError, match=f"--metrics-port 127.0.0.1:{port} cannot be opened") as refused:
            call_command("runtaskpoller", f"--metrics-port={port}", queue=["work"])
    assert refused.value.returncode == 3


def test_what_an_address_says() -> None:
    assert address("9187") == ("127.0.0.1", 9187)
    assert address("10.0.0.5:9187") == ("10.0.0.5", 9187)
    assert address("[::1]:9187") == ("::1", 9187)
    for text in ("", "web", "1.2.3.4", "70000", "-1", "host:"):
        with pytest.raises(ValueError):
            address(text)
