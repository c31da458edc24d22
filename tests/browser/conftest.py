"""A real site, real pollers and a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_dbtaskqueue.contrib.embedded import free_port
from tests.browser.pictures import PROGRAMS
from tests.browser.policy import HEARTBEAT, REPAIRED, queue_settings
from tests.conftest import ProcessDatabase
from tests.forks import Fork
from tests.pgbouncer import answers
from tests.support import until

PATIENCE_MS = 120_000  # for anything that a browser waits for: ten minutes looked like a run that hangs
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
    window.violations.push(event.violatedDirective + " " + event.sourceFile);
});
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Without one the tests are skipped here, and fail in CI.

    One for each file: its driver's event loop stands in this thread, beside which Django would refuse the database.
    """
    name = "playwright.sync_api"
    playwright = import_module(name) if os.environ.get("CI") else pytest.importorskip(name)
    with playwright.sync_playwright() as running, pytest.MonkeyPatch.context() as environment:
        environment.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        own = running.chromium.executable_path
        program = next(filter(None, map(shutil.which, PROGRAMS)), own if Path(own).exists() else None)
        if program is None:
            message = "There is no Chromium: run `playwright install chromium`, or install your system's package."
            pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def long_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pollers that are rows only look alive."""
    monkeypatch.setenv(HEARTBEAT, "1m")


@pytest.fixture
def site(
    chromium: Any, postgres_process_database: ProcessDatabase, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, settings: Any,
) -> Iterator[Site]:  # fmt: skip
    """The site, served by a process of its own; ``ada`` may do everything."""
    User.objects.create_superuser("ada", "", "ada")
    settings.DBTASKQUEUE = queue_settings()
    flag = tmp_path / "repaired"
    monkeypatch.setenv(REPAIRED, str(flag))
    env = {**postgres_process_database.env, "DJANGO_SETTINGS_MODULE": "tests.browser.settings"}
    with ExitStack() as stack:

        def run(*command: str) -> Fork:
            fork = Fork(command, env, tmp_path / f"{command[0]}.log")
            stack.callback(fork.kill)
            return fork

        port = free_port()
        server = run("runserver", "--noreload", "--insecure", f"127.0.0.1:{port}")
        until(lambda: server.code is not None or answers(port))
        assert server.code is None, server.log
        yield Site(chromium, f"http://127.0.0.1:{port}", run, flag)


class Site:
    """What a test drives: addresses, browser windows, pollers, and the fault to repair."""

    def __init__(self, browser: Any, address: str, run: Callable[..., Fork], flag: Path) -> None:
        self.address, self._run, self._browser, self._flag = address, run, browser, flag
        self.wrong: list[str] = []  # what the browser complained of in the last window

    def repair(self) -> None:
        self._flag.touch()

    def poller(self, queue: str) -> Fork:
        return self._run("runtaskpoller", "--queue", queue)

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
        page.on("response", lambda one: wrong.append(f"{one.status} {one.url}") if one.status >= 500 else None)
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
    found = import_module("playwright.sync_api").expect
    found.set_options(timeout=PATIENCE_MS)
    return found(locator)
