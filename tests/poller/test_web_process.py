"""``EMBEDDED_POLLER``: a web process runs tasks, as someone sees who starts a server in a fresh project."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_started

from django_dbtaskqueue import enqueue, signals
from django_dbtaskqueue.conf import settings as conf
from django_dbtaskqueue.models import Poller, Task
from django_dbtaskqueue.poller import web_process
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.docs.pages import free_port
from tests.forks import Program, program
from tests.poller.processes import Gate, alive, pids, status_of
from tests.processing.named import listening
from tests.support import until

SETTINGS = """
from tests.settings import *
DEBUG = True
ROOT_URLCONF = "pages"
DBTASKQUEUE = {"EMBEDDED_POLLER": {"queues": ["work", "aio"]}, "HEARTBEAT": "200ms"}
"""
PAGES = """
from django.http import HttpResponse
from django.urls import path
from django_dbtaskqueue import enqueue
urlpatterns = [path("order", lambda request: HttpResponse(str(enqueue("work", "order").pk)))]
"""


@contextmanager
def server(database: ProcessDatabase, folder: Path, *options: str) -> Iterator[tuple[Program, str]]:
    """Run ``manage.py runserver`` in a project of its own; yield it with the address of its page."""
    (folder / "site_settings.py").write_text(SETTINGS)
    (folder / "pages.py").write_text(PAGES)
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runserver", *options, address]
    path = f"{REPOSITORY}{os.pathsep}{folder}"
    env = replace(database, extra={"DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": path}).env
    with program(command, env, folder) as web:
        web.until_logged("Starting development server")
        yield web, f"http://{address}/order"


def order(address: str) -> Task:
    with urlopen(address) as answer:  # noqa: S310 -- of our own server
        return Task.objects.get(pk=int(answer.read()))


def test_a_task_of_a_view_is_done_without_runtaskpoller(sqlite_process_database: Any, tmp_path: Path) -> None:
    with server(sqlite_process_database, tmp_path) as (web, address):
        assert not Poller.objects.exists()  # not before the first request
        task = order(address)
        until(lambda: status_of(task) == "COMPLETED" and pids())
        (row,) = Poller.objects.all()
        assert "-web:" in row.instance and {queue["queue"] for queue in row.queues} == {"work", "aio"}
        assert row.pid != web.pid  # with autoreload it is the child that serves
        os.killpg(web.pid, signal.SIGINT)
        web.ended()
        until(lambda: not alive(row.pid))


def test_what_runs_at_the_end_finishes_and_what_waits_is_released(
    postgres_process_database: ProcessDatabase, tmp_path: Path, gate: Gate
) -> None:
    running = [enqueue("work", payload=gate.payload) for _ in range(4)]
    with server(postgres_process_database, tmp_path, "--noreload") as (web, address):
        waiting = order(address)
        gate.until_started(4)
        until(lambda: pids() == [web.pid])
        web.signal(signal.SIGINT)
        until(Poller.objects.filter(state="ENDING").exists)
        gate.open()
        web.ended()
    assert {status_of(task) for task in running} == {"COMPLETED"}
    waiting.refresh_from_db()
    assert (waiting.status, waiting.attempt, Poller.objects.get().state) == ("CREATED", 0, "STOPPED")


class LeavesOnce(signals.Listener):
    """Ends the first thread that finds nothing to do."""

    left = False

    def poller_idle(self, poller: Any) -> None:
        if not self.left:
            self.left = True
            raise SystemExit


@pytest.mark.usefixtures("sqlite_process_database")
def test_a_poller_whose_thread_died_is_started_again(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.DBTASKQUEUE = {"EMBEDDED_POLLER": {"queues": ["work"]}, "HEARTBEAT": "200ms"}
    with listening(LeavesOnce()), ExitStack() as stack:
        stack.callback(web_process.EmbeddedPoller().stop)
        until(lambda: pids() and Poller.objects.count() == 2)
        task = enqueue("work")
        until(lambda: status_of(task) == "COMPLETED")
    assert "Thread dbtaskqueue-fetch-0 ended: its poller ends, another one must replace it" in caplog.messages
    assert set(Poller.objects.values_list("state", flat=True)) == {"STOPPED"}


def test_a_request_of_a_test_starts_nothing(settings: Any, client: Any) -> None:
    """Not one of the test client, nor one of a live server."""
    request_started.connect(web_process._begin, dispatch_uid="dbtaskqueue-embedded")
    try:
        client.get("/nowhere")
        web_process._begin(sender=WSGIHandler)  # not by the signal: Django would look at connections of earlier tests
        assert web_process._embedded is None
    finally:
        request_started.disconnect(dispatch_uid="dbtaskqueue-embedded")


def test_it_leaves_queues_whose_processors_name_an_executor(settings: Any) -> None:
    settings.DBTASKQUEUE = {"EMBEDDED_POLLER": {"threads": 2, "exclude": ["other"]}}
    queues, options = web_process.chosen_queues()
    assert "work" in queues and not {"apart", "other"} & {*queues}
    assert options.threads == 2
    settings.DBTASKQUEUE = {"EMBEDDED_POLLER": {"queues": ["apart"]}}
    with pytest.raises(ImproperlyConfigured, match=r"that of 'apart' does\. Run manage\.py runtaskpoller for it"):
        web_process.chosen_queues()


def test_a_value_that_cannot_be_is_refused(settings: Any) -> None:
    for value in ("yes", {"queue": ["work"]}, {"queues": "work"}, {"threads": 0}):
        settings.DBTASKQUEUE = {"EMBEDDED_POLLER": value}
        with pytest.raises(ImproperlyConfigured, match="EMBEDDED_POLLER"):
            conf.settings()
