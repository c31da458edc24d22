"""The pictures of the docs: ``python -m tests.browser.pictures docs/images`` takes them from the real demo.

It runs ``manage.py demo`` with its own data and logs in. Names, such as ``limited-queue-light``: only these. The pages
of ``FEATURES`` are those of the app ``pictured``.
"""

import argparse
import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django_dbtaskqueue.contrib.embedded import free_port
from tests.patience import until
from tests.pgbouncer import answers
from tests.templates import REPOSITORY

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Those that the docs show: page, theme and size, as in their names.
DOCS = (
    "overview-light", "overview-dark-phone", "failures-light", "failures-light-phone", "task-dark", "queue-dark",
    "confirm-light", "bulk-operation-light", "report-light", "schedule-light", "batch-light", "running-task-light",
    "limited-queue-light", "unique-task-light", "django-task-light",
)  # fmt: skip
SCHEDULE = "claims of the day"
LISTS = {"overview": "overview/", "failures": "failuregroup/", "queue": "queue/claims/change/",
         "schedule": f"schedule/{SCHEDULE.replace(' ', '%20')}/change/"}  # fmt: skip
# Of the app ``pictured``: what finds a task as soon as the page is as it should be.
FEATURES = {
    "running-task": "queue:statements status:PROCESSING", "limited-queue": "queue:register status:PROCESSING",
    "unique-task": "queue:search status:CREATED", "django-task": "queue:letters status:COMPLETED",
}  # fmt: skip
FEATURE_SETTINGS = "tests.browser.pictured.settings"
FEATURE_QUEUES = "statements,register,search,letters"
FEATURE_CODE = "from tests.browser.pictured import tasks; tasks.{}()"
# The first row of a list, opened.
ROWS = {
    "batch": ("batch/", "td.field-name a"),
    "task": ("task/?q=status:ERROR", "td.field-reference a"),
    "bulk-operation": ("bulkoperation/", "td.field-id a"),
    "report": ("pipelinereport/?kind=report", "td.field-id a"),
}


def manage(*words: str, settings: str = "example_project.settings", **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": settings, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(REPOSITORY / "manage.py"), *words]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **options)


@contextmanager
def demo() -> Iterator[tuple[str, str]]:
    """Run the demo until it serves; yield the address of its admin and the operator's password."""
    port = str(free_port())
    with manage("demo", "--tasks", "20000", "--port", port, stdout=subprocess.PIPE) as process:
        try:
            login = next(line for line in process.stdout or () if line.startswith("Login"))
            next(line for line in process.stdout or () if line.startswith("Admin"))
            yield f"http://127.0.0.1:{port}/admin/", login.split()[-1]
        finally:
            process.terminate()


@contextmanager
def features() -> Iterator[str]:
    """Serve the demo's database with the tasks of the app ``pictured``, and run them; yield the admin's address."""
    shell = ("shell", "--verbosity", "0", "--command")
    address = f"127.0.0.1:{free_port()}"
    running = []
    try:
        assert manage(*shell, FEATURE_CODE.format("play"), settings=FEATURE_SETTINGS).wait() == 0
        for words in (("runserver", "--noreload", "--insecure", address), ("runtaskpoller", "--queue", FEATURE_QUEUES)):
            running.append(manage(*words, settings=FEATURE_SETTINGS))
        yield f"http://{address}/admin/"
    finally:
        for process in running:
            process.kill()  # its tasks never end
            process.wait()
        assert manage(*shell, FEATURE_CODE.format("clean"), settings=FEATURE_SETTINGS).wait() == 0


@contextmanager
def logged_in(browser: Any, admin: str, password: str, width: int, theme: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    context.set_default_timeout(60_000)
    page = context.new_page()
    until(lambda: answers(urlsplit(admin).port))  # the server is just about to listen
    page.goto(f"{admin}login/?next=/admin/")
    page.fill("#id_username", "operator")
    page.fill("#id_password", password)
    page.click("input[type=submit]")
    page.wait_for_url("**/admin/")
    page.evaluate("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
    yield page
    context.close()


def act(page: Any, admin: str) -> None:
    """Limit a queue, make a schedule, and reprocess the first group, so that audit and bulk operations have rows."""
    page.goto(f"{admin}dbtaskqueue/queue/claims/change/")
    form = page.locator("form.dbtq-set").first
    form.locator("[name=set]").select_option("max_running")
    form.locator("[name=value]").fill("200")
    form.locator("[name=reason]").fill("the register allows 200 connections")
    form.locator("button").click()
    page.wait_for_load_state()
    page.goto(f"{admin}dbtaskqueue/schedule/")
    page.click("button[value=add_schedule]")
    said = {"name": SCHEDULE, "queue": "claims", "cron": "0 7 * * mon-fri", "timezone": "America/New_York"}
    for field, text in {**said, "payload": '{"flights": "of yesterday"}', "reason": "the desk opens at 8"}.items():
        page.fill(f"[name={field}]", text)
    page.click("button[name=confirm]")
    page.wait_for_load_state()  # the data of an earlier run may have it already
    page.goto(f"{admin}dbtaskqueue/failuregroup/")
    page.locator("button[value=reprocess]").first.click()
    page.fill("input[name=reason]", "the record is complete now")
    page.click("button[name=confirm]")
    page.wait_for_url("**/bulkoperation/**")
    if page.locator("button[name=work]").count():
        page.click("button[name=work]")


def open_page(page: Any, admin: str, name: str) -> None:
    """Go to a page; a row of a list is opened by its link."""
    if name in LISTS:
        page.goto(f"{admin}dbtaskqueue/{LISTS[name]}")
    elif name in ROWS:
        address, row = ROWS[name]
        page.goto(f"{admin}dbtaskqueue/{address}")
        page.locator(row).first.click()
    elif name in FEATURES:
        page.goto(f"{admin}dbtaskqueue/task/?q={FEATURES[name]}")
        page.locator("td.field-id a").first.click()  # the poller is just about to take it, and lists refresh themselves
        if name == "limited-queue":
            page.goto(f"{admin}dbtaskqueue/queue/register/change/")
    else:
        page.goto(f"{admin}dbtaskqueue/task/?q=status:ERROR")
        page.check("#dbtq-tick-1")
        page.click("button[value=reprocess]")
        page.wait_for_selector("button[name=confirm]")
    page.mouse.move(0, 0)  # a chart under the pointer would name its values
    page.wait_for_load_state()


def shoot(page: Any, file: Path) -> None:
    """Write what the page shows, as WebP, which ``page.screenshot`` cannot."""
    height = min(page.evaluate("document.documentElement.scrollHeight"), 1400)
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height, "scale": 1}
    options = {"format": "webp", "quality": 80, "clip": clip, "captureBeyondViewport": True}
    found = page.context.new_cdp_session(page).send("Page.captureScreenshot", options)
    file.write_bytes(base64.b64decode(found["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; default: those that the docs show")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    given.folder.mkdir(parents=True, exist_ok=True)
    with demo() as (admin, password), sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with logged_in(browser, admin, password, 1440, "light") as page:
            act(page, admin)

        def take(admin: str, pages: Iterable[str]) -> None:
            for theme, (mark, width) in product(("light", "dark"), {"": 1440, "-phone": 390}.items()):
                names = [name for name in pages if f"{name}-{theme}{mark}" in (given.names or DOCS)]
                with logged_in(browser, admin, password, width, theme) if names else nullcontext() as page:
                    for name in names:
                        open_page(page, admin, name)
                        shoot(page, given.folder / f"admin-{name}-{theme}{mark}.webp")

        shop = ("overview", "failures", "batch", *FEATURES)
        take(admin, [name for name in (*LISTS, *ROWS, "confirm") if name not in shop])
        with features() as admin:
            take(admin, shop)
        browser.close()


if __name__ == "__main__":
    main()
