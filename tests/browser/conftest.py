"""A real site, real pollers and a real browser."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from tests.browser.policy import REPAIRED, queue_settings
from tests.conftest import REPOSITORY, ProcessDatabase
from tests.patience import PATIENCE
from tests.poller.processes import runtaskpoller
from tests.support import until

PATIENCE_MS = 1000 * PATIENCE  # the browser waits for anything
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(event.violatedDirective + " " + event.sourceFile);
});
"""


@pytest.fixture
def chromium() -> Iterator[Any]:
    """The browser. Without one the tests are skipped here, and fail in CI.

    One for each test: while its driver's event loop stands in this thread, Django refuses the database to other tests.
    """
    playwright = pytest.importorskip("playwright.sync_api") if not os.environ.get("CI") else _playwright()
    with playwright.sync_playwright() as running:
        own = running.chromium.executable_path
        program = next(filter(None, map(shutil.which, PROGRAMS)), own if Path(own).exists() else None)
        if program is None:
            message = "There is no Chromium: run `playwright install chromium`, or install your system's package."
            pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def _playwright() -> Any:
    from playwright import sync_api

    return sync_api


@pytest.fixture
def site(
    chromium: Any,
    postgres_process_database: ProcessDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> Iterator[Site]:
    """The site, served by a process of its own; ``ada`` may do everything."""
    # The browser's driver runs an event loop in this thread; Django would refuse the database next to it.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    User.objects.create_superuser("ada", "", "ada")
    settings.DBTASKQUEUE = queue_settings()
    flag = tmp_path / "repaired"
    monkeypatch.setenv(REPAIRED, str(flag))
    database = _Here(postgres_process_database.vendor, postgres_process_database.url)
    with _served(database) as address:
        yield Site(chromium, address, database, flag)


class _Here(ProcessDatabase):
    """Processes of the browser tests have settings of their own."""

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "DJANGO_SETTINGS_MODULE": "tests.browser.settings"}


class Site:
    """What a test drives: addresses, browser windows, pollers, and the fault to repair."""

    def __init__(self, browser: Any, address: str, database: ProcessDatabase, flag: Path) -> None:
        self.address, self.database, self._browser, self._flag = address, database, browser, flag
        self.wrong: list[str] = []  # what the browser complained of in the last window

    def repair(self) -> None:
        self._flag.touch()

    def poller(self, queue: str) -> Any:
        return runtaskpoller(self.database, "--queue", queue)

    @contextmanager
    def window(self, **options: Any) -> Iterator[Any]:
        """A window of its own, logged in; at its end nothing may have gone wrong in it."""
        context = self._browser.new_context(**{"viewport": {"width": 1360, "height": 800}, **options})
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(WATCH)
        page = context.new_page()
        wrong = self.wrong = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "response", lambda answer: wrong.append(f"{answer.status} {answer.url}") if answer.status >= 500 else None
        )
        page.goto(f"{self.address}/admin/login/?next=/admin/")
        page.fill("#id_username", "ada")
        page.fill("#id_password", "ada")
        page.click("input[type=submit]")
        page.wait_for_url("**/admin/")
        wrong.clear()
        yield page
        context.close()
        assert wrong == []

    def url(self, page: str) -> str:
        return f"{self.address}/admin/dbtaskqueue/{page}"


def expect(locator: Any) -> Any:
    """Wait for what should be seen."""
    return _playwright().expect(locator)


@contextmanager
def _served(database: ProcessDatabase) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, str(REPOSITORY / "manage.py"), "runserver", "--noreload", "--insecure", address]
    server = subprocess.Popen(
        command, env=database.env, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: server.poll() is not None or _answers(address))
        assert server.poll() is None, "the server did not start"
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _answers(address: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("GET", "/admin/login/")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
